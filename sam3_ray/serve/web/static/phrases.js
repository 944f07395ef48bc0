// The field of phrases: chips, each with its colour, and the one being typed.

import { colourOf } from "./palette.js";

/** Phrases in order; onChange() after each change. Colours stay with a phrase while it is there. */
export class Phrases {
  constructor({ box, list, input, onChange }) {
    Object.assign(this, { list, input, onChange });
    this.items = []; // {text, slot, colour, suggested}
    this.most = 4;
    input.addEventListener("input", () => {
      if (/[,\n]/.test(input.value)) this.take(); // typed or pasted
      else onChange();
    });
    input.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter" && !event.ctrlKey && !event.metaKey && input.value.trim()) {
        event.preventDefault(); // with an empty field, Enter submits the form
        this.take();
      } else if (event.key === "Backspace" && !input.value && this.items.length) {
        this.remove(this.items[this.items.length - 1].text);
      }
    });
    box.addEventListener("click", (event) => event.target === box && input.focus());
  }

  /** Texts of the chips. */
  get texts() {
    return this.items.map(({ text }) => text);
  }

  /** Whether anything could be asked, the phrase being typed counted. */
  get any() {
    return this.items.length > 0 || this.input.value.trim() !== "";
  }

  colour(text) {
    return this.items.find((item) => item.text === text)?.colour;
  }

  setMost(most) {
    this.most = most;
    this.render();
  }

  /** Turn what is typed into chips; what does not fit any more stays in the field. */
  take() {
    const texts = this.input.value.split(/[,\n]/);
    const left = texts.filter((text) => text.trim() && !this.put(text));
    this.input.value = left.map((text) => text.trim()).join(" ");
    this.render();
    this.onChange();
  }

  /** Take over a phrase that the page suggested for this picture. */
  suggest(text) {
    this.put(text, true);
    this.render();
    this.onChange();
  }

  /** Another picture: what was only suggested for the one before goes, what was typed stays. */
  dropSuggested() {
    this.items = this.items.filter((item) => !item.suggested);
    this.render();
  }

  /** Put a phrase at the end; false where there is no room. One that is there already stays where it is. */
  put(raw, suggested = false) {
    const text = raw.trim().replace(/\s+/g, " ");
    if (this.items.some((item) => item.text.toLowerCase() === text.toLowerCase())) return true;
    if (this.items.length >= this.most) return false;
    let slot = 0;
    while (this.items.some((item) => item.slot === slot)) slot++;
    this.items.push({ text, slot, colour: colourOf(slot), suggested });
    return true;
  }

  remove(text) {
    this.items = this.items.filter((item) => item.text !== text);
    this.render();
    this.onChange();
    this.input.focus();
  }

  render() {
    this.list.replaceChildren(...this.items.map(({ text, colour }) => {
      const chip = document.createElement("li");
      chip.className = "chip";
      chip.style.setProperty("--colour", colour);
      const name = document.createElement("span");
      name.textContent = text;
      const remove = document.createElement("button");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove ${text}`);
      remove.textContent = "×";
      remove.addEventListener("click", () => this.remove(text));
      chip.append(name, remove);
      return chip;
    }));
    const full = this.items.length >= this.most;
    this.input.readOnly = full && !this.input.value;
    this.input.placeholder = full ? `${this.most} at most` : this.items.length ? "another" : "red circle";
  }
}
