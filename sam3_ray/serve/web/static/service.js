// The service over HTTP. Addresses are relative to this file, so that the page works below a route prefix too.

const at = (path) => new URL(`../${path}`, import.meta.url);

/** Scores above this are asked for; the page's threshold filters from there without another request. */
export const LOWEST_THRESHOLD = 0.05;
const MOST_INSTANCES = 100;
const MOST_TRIES = 4;

/** An error answer (application/problem+json), or what came instead of one. */
export class Problem extends Error {
  constructor({ title, detail, status, errors = [] }) {
    super(detail || title);
    Object.assign(this, { title, detail, status, errors });
  }
}

/** GET /info. */
export async function fetchInfo() {
  const response = await reach(at("info"));
  if (!response.ok) throw await problemOf(response);
  return response.json();
}

/** The examples of /examples/examples.json; none where the service has none. */
export async function fetchExamples() {
  const response = await fetch(at("examples/examples.json"));
  return response.ok ? response.json() : [];
}

export const exampleAddress = (file) => at(`examples/${encodeURIComponent(file)}`).href;

/** The picture of an example as a File. */
export async function fetchExample(file) {
  const response = await reach(exampleAddress(file));
  if (!response.ok) throw await problemOf(response);
  const blob = await response.blob();
  return new File([blob], file, { type: blob.type });
}

/**
 * POST /predict. Sends only the digest where the service has answered for this picture before, and the picture
 * itself where its cache has lost it. Waits as told by Retry-After when the service is busy, telling onWait.
 */
export async function predict(picture, prompts, { signal, onWait }) {
  const options = { threshold: LOWEST_THRESHOLD, max_instances: MOST_INSTANCES, mask_format: "rle" };
  for (let attempt = 1; ; attempt++) {
    const response = await reach(at("predict"), {
      method: "POST",
      signal,
      ...(picture.digest ? asJson(picture.digest, prompts, options) : asForm(picture.file, prompts, options)),
    });
    if (response.ok) {
      const answer = await response.json();
      picture.digest = answer.image_digest;
      return answer;
    }
    const problem = await problemOf(response);
    if (response.status === 404 && picture.digest) {
      picture.digest = null;
    } else if (response.status === 503 && attempt < MOST_TRIES) {
      const seconds = Number(response.headers.get("Retry-After")) || 1;
      onWait(seconds);
      await pause(seconds, signal);
    } else {
      throw problem;
    }
  }
}

/** Ask whether the service reads a file that this browser cannot show; throws its Problem if not. */
export async function check(file, { signal }) {
  const form = new FormData();
  form.append("image", file, file.name);
  const response = await reach(at("predict"), { method: "POST", body: form, signal });
  if (!response.ok) throw await problemOf(response);
  return response.json();
}

function asJson(digest, prompts, options) {
  return {
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ image_digest: digest, prompts, ...options }),
  };
}

function asForm(file, prompts, options) {
  const form = new FormData();
  form.append("image", file, file.name);
  for (const prompt of prompts) form.append("prompts", prompt);
  for (const [name, value] of Object.entries(options)) form.append(name, String(value));
  return { body: form };
}

async function reach(address, request) {
  try {
    return await fetch(address, request);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem({ title: "The service cannot be reached", detail: "Is it still running? Then run again." });
  }
}

async function problemOf(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    if (body && typeof body.title === "string") return new Problem({ ...body, status: response.status });
  } catch {
    // Not JSON: Ray's proxy answers plain text.
  }
  return new Problem({ title: "The service answered with an error", detail: text.slice(0, 400), status: response.status });
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}
