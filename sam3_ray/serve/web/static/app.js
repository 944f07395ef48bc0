// The page: one picture, its phrases, one answer; everything on screen follows from these.

import { saveBlob, toCoco } from "./coco.js";
import { contours, pathOf } from "./contour.js";
import { element, Instances } from "./instances.js";
import { Phrases } from "./phrases.js";
import { decodeRle } from "./rle.js";
import { check, exampleAddress, fetchExample, fetchExamples, fetchInfo, predict, Problem } from "./service.js";
import { Stage } from "./stage.js";
import { renderTiming } from "./timing.js";

const $ = (id) => document.getElementById(id);

let picture = null; // {file, name, bitmap, width, height, digest, suggestions, photo}
let found = []; // [{phrase, presence, truncated, instances: [{id, score, box, mask, path, area, raw}]}]
let answeredBy = "";
let demo = false; // the demo checkpoint answers, which is at a loss with photographs
let running = null; // AbortController of the request under way
let choosing = 0; // counts choices of pictures: a slow one must not replace a later one
let hovered = null;
let pinned = null;

const stage = new Stage($("canvas"), { onHover: setHovered, onPick: setPinned });
const list = new Instances($("list"), { onActive: setHovered, onPick: setPinned });
const phrases = new Phrases({ box: $("phrases"), list: $("chips"), input: $("phrase"), onChange: refresh });

// The picture.

async function choose(file, { name = file.name, suggestions = [], photo = false } = {}) {
  const choice = ++choosing;
  if (running) {
    running.abort();
    setBusy(false);
  }
  clearProblem();
  let bitmap = null;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    // Not an image, or of a kind that only the service reads: it is asked below.
  }
  if (choice !== choosing) return;
  const next = { file, name, bitmap, width: bitmap?.width, height: bitmap?.height, digest: null, suggestions, photo };
  if (!bitmap) {
    try {
      const controller = (running = new AbortController());
      setBusy(true, "Asking the service about this file…");
      const answer = await check(file, controller);
      Object.assign(next, { width: answer.width, height: answer.height, digest: answer.image_digest });
    } catch (error) {
      if (error.name !== "AbortError") showProblem(error, name);
      return;
    } finally {
      if (choice === choosing) setBusy(false);
    }
    if (choice !== choosing) return;
  }
  picture?.bitmap?.close();
  picture = next;
  phrases.dropSuggested();
  found = [];
  hovered = pinned = null;
  stage.setPicture(picture);
  $("frame").dataset.state = "ready";
  $("frame").scrollIntoView({ block: "nearest" });
  $("tools").hidden = false;
  $("results").hidden = true;
  $("unseen").hidden = Boolean(bitmap);
  $("unseen").textContent = "This browser cannot show this kind of picture; the service reads it.";
  $("picture-name").textContent = name;
  $("picture-size").textContent = `${picture.width} × ${picture.height}`;
  say("");
  for (const button of $("examples-part").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.file === name));
  }
  refresh();
}

async function chooseExample({ file, prompts, kind }) {
  const choice = ++choosing;
  try {
    const chosen = await fetchExample(file);
    if (choice === choosing) await choose(chosen, { name: file, suggestions: prompts, photo: kind === "photo" });
  } catch (error) {
    showProblem(error);
  }
}

// Asking.

async function run() {
  if (running) {
    running.abort();
    return;
  }
  phrases.take();
  if (!picture || !phrases.texts.length) return;
  const controller = (running = new AbortController());
  const asked = picture;
  const started = performance.now();
  clearProblem();
  setBusy(true, "Running…");
  const ticking = setInterval(() => {
    $("run").querySelector(".elapsed").textContent = ` ${((performance.now() - started) / 1000).toFixed(0)} s`;
  }, 1000);
  try {
    const answer = await predict(asked, phrases.texts, {
      signal: controller.signal,
      onWait: (seconds) => say(`The service is busy; trying again in ${seconds} s.`),
    });
    const roundTrip = performance.now() - started;
    if (asked === picture) await show(answer, roundTrip);
  } catch (error) {
    if (error.name === "AbortError") say("Cancelled.");
    else showProblem(error);
  } finally {
    clearInterval(ticking);
    if (running === controller) {
      running = null;
      setBusy(false);
    }
  }
}

async function show(answer, roundTrip) {
  if (answer.width !== picture.width || answer.height !== picture.height) await asStored(answer);
  answeredBy = answer.checkpoint;
  found = answer.results.map(({ prompt, presence, truncated, instances }, group) => ({
    phrase: prompt,
    presence,
    truncated,
    instances: instances.map((raw, index) => {
      const mask = decodeRle(raw.mask);
      return { id: `${group}-${index}`, score: raw.score, box: raw.box_xyxy, area: raw.mask_area, mask, path: pathOf(contours(mask)), raw };
    }),
  }));
  hovered = pinned = null;
  $("results").hidden = false;
  renderTiming({ total: $("timing-total"), stages: $("stages"), parts: $("timing-parts"), by: $("answered-by") }, answer, roundTrip);
  refresh();
  saySummary();
}

/** The service does not turn pictures upright (SAM3_EXIF=0): show this one as it is stored, too. */
async function asStored({ width, height }) {
  const bitmap = await createImageBitmap(picture.file, { imageOrientation: "none" });
  Object.assign(picture, { bitmap, width, height });
  stage.setPicture(picture);
}

// What is on screen.

const threshold = () => Number($("threshold").value);

/** What is found for the phrases that are still there, above the threshold. */
function groups() {
  return found
    .filter(({ phrase }) => phrases.colour(phrase))
    .map(({ phrase, truncated, instances }) => ({
      phrase,
      colour: phrases.colour(phrase),
      shown: instances.filter(({ score }) => score > threshold()),
      best: instances.length ? instances[0].score : null,
      // Only what lies above the threshold matters: cut off are scores below the lowest given.
      truncated: truncated && instances[instances.length - 1].score > threshold(),
    }));
}

function refresh() {
  const shown = groups();
  const instances = shown.flatMap(({ phrase, colour, shown: some }) => some.map((instance) => ({ ...instance, phrase, colour })));
  if (!instances.some(({ id }) => id === pinned)) pinned = null;
  if (!instances.some(({ id }) => id === hovered)) hovered = null;
  $("threshold-value").textContent = threshold().toFixed(2);
  stage.setInstances(instances);
  list.render(shown, threshold());
  highlight();
  if (picture) {
    const counts = shown.map(({ phrase, shown: some }) => `${some.length} ${phrase}`).join(", ");
    $("canvas").setAttribute("aria-label", `Picture ${picture.name}${counts ? `: ${counts}` : ""}`);
  }
  $("run").disabled = !running && !(picture && phrases.any);
  renderSuggestions();
}

function setHovered(id) {
  hovered = id;
  highlight();
}

function setPinned(id) {
  pinned = pinned === id ? null : id;
  highlight();
}

function highlight() {
  const active = hovered ?? pinned;
  stage.setActive(active);
  list.setActive(active, pinned);
}

function renderSuggestions() {
  const there = phrases.texts.map((text) => text.toLowerCase());
  const beyond = demo && picture?.photo;
  const left = beyond ? [] : (picture?.suggestions ?? []).filter((text) => !there.includes(text.toLowerCase()));
  const full = there.length >= phrases.most;
  $("suggestions").hidden = !left.length;
  $("suggestions").replaceChildren(...left.map((text) => {
    const button = element("button", "suggestion", text);
    button.type = "button";
    button.disabled = full;
    button.setAttribute("aria-label", `Add ${text}`);
    button.setAttribute("aria-describedby", "suggestions-help");
    button.addEventListener("click", () => {
      phrases.suggest(text);
      ($("suggestions").querySelector("button:enabled") ?? $("run")).focus();
    });
    const item = element("li");
    item.append(button);
    return item;
  }));
  let help = "";
  if (beyond) help = "A picture for SAM3’s own weights: the demo checkpoint finds nothing but coloured shapes.";
  else if (left.length && full) help = `${phrases.most} phrases at most: take one away to add one of these.`;
  $("suggestions-help").textContent = help;
  $("suggestions-help").hidden = !help;
}

function setBusy(busy, message = "") {
  document.body.classList.toggle("busy", busy);
  $("frame").setAttribute("aria-busy", String(busy));
  $("run").replaceChildren(busy ? "Cancel" : "Run", element("span", "elapsed"));
  $("run").classList.toggle("cancel", busy);
  if (!busy) running = null;
  $("run").disabled = !busy && !(picture && phrases.any);
  if (message) say(message);
}

function say(message) {
  $("say").textContent = message;
}

function saySummary() {
  say(`Found: ${groups().map(({ phrase, shown }) => shown.length ? `${shown.length} × ${phrase}` : `no ${phrase}`).join(", ")}`);
}

function clearProblem() {
  $("problem").hidden = true;
  $("problem").replaceChildren();
}

function showProblem(error, about = "") {
  say("");
  const known = error instanceof Problem;
  if (!known) console.error(error);
  const title = known ? error.title : "The page could not use the answer";
  $("problem").replaceChildren(element("h2", "", about ? `${about}: ${title}` : title));
  const detail = known ? error.detail : error.message;
  const errors = (known && error.errors) || [];
  if (errors.length > 1) {
    const faults = element("ul");
    faults.append(...errors.map(({ field, message }) => element("li", "", `${field}: ${message}`)));
    $("problem").append(faults);
  } else if (detail) {
    $("problem").append(element("p", "", detail));
  }
  if (known && error.status) $("problem").append(element("p", "dim", `HTTP ${error.status}`));
  $("problem").hidden = false;
  $("problem").scrollIntoView({ block: "nearest" });
}

// The service and the examples.

async function greet(wait = 1) {
  try {
    const info = await fetchInfo();
    demo = info.checkpoint === "demo";
    $("server").dataset.state = "ready";
    $("server-text").textContent = `${demo ? "demo checkpoint" : info.checkpoint} · ${machine(info)}`;
    $("notice").hidden = !demo;
    $("notice").textContent = "Demo checkpoint: knows coloured shapes only, such as “red circle” or “blue star”.";
    $("photos-title").textContent = demo ? "For SAM3’s own weights" : "Photo-like";
    phrases.setMost(info.limits.max_prompts);
    renderSuggestions();
    $("phrase-help").textContent = `Noun phrases, ${phrases.most} at most; comma or Enter ends one.`;
  } catch (error) {
    $("server").dataset.state = "away";
    $("server-text").textContent = error instanceof Problem ? error.title : "The service cannot be reached";
    setTimeout(() => greet(Math.min(wait * 2, 15)), wait * 1000);
  }
}

function machine({ backend, chips }) {
  if (backend === "cpu") return "CPU";
  const parked = chips.filter((chip) => chip.parked !== null).length;
  return `${chips.length} ${chips.length === 1 ? "chip" : "chips"}${parked ? `, ${parked} parked` : ""}`;
}

async function listExamples() {
  const examples = await fetchExamples();
  const photos = examples.filter(({ kind }) => kind === "photo");
  $("examples-part").hidden = !examples.length;
  $("photos-title").hidden = !photos.length;
  $("examples").replaceChildren(...examples.filter((example) => !photos.includes(example)).map(exampleItem));
  $("photos").replaceChildren(...photos.map(exampleItem));
}

function exampleItem(example) {
  const button = element("button", "example");
  button.type = "button";
  button.dataset.file = example.file;
  button.title = example.title;
  button.setAttribute("aria-pressed", "false");
  const image = element("img");
  Object.assign(image, { src: exampleAddress(example.file), alt: example.alt, loading: "lazy", decoding: "async" });
  button.append(image, element("span", "", example.title));
  button.addEventListener("click", () => chooseExample(example));
  const item = element("li");
  item.append(button);
  return item;
}

// Events.

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("threshold").addEventListener("input", () => {
  refresh();
  saySummary();
});
for (const input of [$("file"), $("file-again")]) {
  input.addEventListener("change", () => {
    if (input.files.length) choose(input.files[0]);
    input.value = ""; // the same file can be chosen again
  });
}
for (const toggle of document.querySelectorAll(".toggle")) {
  toggle.addEventListener("click", () => {
    const on = toggle.getAttribute("aria-pressed") !== "true";
    toggle.setAttribute("aria-pressed", String(on));
    stage.setView({ [toggle.dataset.view]: on });
  });
}
$("save-coco").addEventListener("click", () => {
  const shown = groups().map(({ phrase, shown: some }) => ({ phrase, instances: some.map(({ raw }) => raw) }));
  const text = JSON.stringify(toCoco(picture, shown, answeredBy), null, 1);
  saveBlob(new Blob([text], { type: "application/json" }), `${stem(picture.name)}-coco.json`);
});
$("save-picture").addEventListener("click", () => {
  $("canvas").toBlob((blob) => saveBlob(blob, `${stem(picture.name)}-sam3.png`));
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) run();
  else if (event.key === "Escape" && running) running.abort();
  else if (event.key === "Escape") setPinned(null);
});
document.addEventListener("paste", (event) => {
  const file = [...(event.clipboardData?.files ?? [])][0];
  if (file) {
    event.preventDefault();
    choose(file, { name: file.name || "pasted.png" });
  }
});
let inside = 0; // dragenter and dragleave come in pairs for every element crossed
const carriesFile = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
document.addEventListener("dragenter", (event) => {
  if (carriesFile(event)) $("dropping").hidden = ++inside === 0;
});
document.addEventListener("dragleave", (event) => {
  if (carriesFile(event)) $("dropping").hidden = --inside <= 0;
});
document.addEventListener("dragover", (event) => carriesFile(event) && event.preventDefault());
document.addEventListener("drop", (event) => {
  if (!carriesFile(event)) return;
  event.preventDefault();
  inside = 0;
  $("dropping").hidden = true;
  if (event.dataTransfer.files.length) choose(event.dataTransfer.files[0]);
});

const stem = (name) => name.replace(/\.[^.]+$/, "") || "picture";

setBusy(false);
refresh();
greet();
listExamples();
