// Where the time of an answer went.

import { element } from "./instances.js";

const STAGES = [
  ["queue", "queue"], ["decode", "decode"], ["image", "image part"], ["text", "text"],
  ["prompts", "prompt part"], ["masks", "masks"], ["encode", "encode"],
];

const inWords = (ms) => (ms >= 10_000 ? `${(ms / 1000).toFixed(1)} s` : ms >= 10 ? `${Math.round(ms)} ms` : `${ms.toFixed(1)} ms`);

/** Fill the timing part from an answer and the round trip measured here, both in ms. */
export function renderTiming({ total, stages, parts, by }, answer, roundTrip) {
  const timing = answer.timing_ms;
  const known = STAGES.filter(([key]) => typeof timing[key] === "number");
  const sum = known.reduce((all, [key]) => all + timing[key], 0) || 1;
  total.replaceChildren(
    element("strong", "", inWords(timing.total)), ` in the service, ${inWords(roundTrip)} in all`,
    ...(answer.cached ? [" ", element("span", "tag", "image cached")] : []),
  );
  stages.replaceChildren(...known.map(([key]) => {
    const bar = element("span", `stage stage-${key}`);
    bar.style.flexGrow = String(timing[key] / sum);
    return bar;
  }));
  parts.replaceChildren(...known.map(([key, label]) => {
    const pair = element("div", `stage-${key}`);
    pair.append(element("dt", "", label), element("dd", "", inWords(timing[key])));
    return pair;
  }));
  const where = answer.chip === null || answer.chip === undefined ? "" : `, chip ${answer.chip}`;
  by.textContent = `${answer.checkpoint === "demo" ? "demo checkpoint" : answer.checkpoint}${where}, ${answer.width} × ${answer.height} px seen at ${answer.input_size} px`;
}
