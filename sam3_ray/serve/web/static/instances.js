// The list of what was found, a group for each phrase. One stop for the Tab key; arrows move within it.

/** onActive(id or null) while an instance is pointed at or focused; onPick(id) when it is clicked. */
export class Instances {
  constructor(root, { onActive, onPick }) {
    Object.assign(this, { root, onActive, onPick });
    this.buttons = [];
    root.addEventListener("keydown", (event) => this.move(event));
  }

  /** groups: [{phrase, colour, shown: instances above the threshold, best: highest score or null, truncated}]. */
  render(groups, threshold) {
    const focused = this.buttons.find((button) => button === document.activeElement)?.dataset.id;
    this.buttons = [];
    this.root.replaceChildren(...groups.map((group) => this.group(group, threshold)));
    const kept = this.buttons.find((button) => button.dataset.id === focused);
    if (kept) kept.focus({ preventScroll: true });
    this.setStop(kept ?? this.buttons[0]);
  }

  group({ phrase, colour, shown, best, truncated }, threshold) {
    const part = element("section", "group");
    part.style.setProperty("--colour", colour);
    const head = element("h3");
    head.append(element("span", "swatch"), element("span", "phrase", phrase), element("span", "count", String(shown.length)));
    part.append(head);
    if (!shown.length) {
      const nearest = best === null ? "Nothing found." : `Nothing above ${threshold.toFixed(2)}; the best scores ${best.toFixed(2)}.`;
      part.append(element("p", "none", nearest));
      return part;
    }
    const list = element("ol");
    list.append(...shown.map((instance, index) => this.row(instance, index, phrase)));
    part.append(list);
    if (truncated) part.append(element("p", "none", "There are more; the lowest scores were cut off."));
    return part;
  }

  row(instance, index, phrase) {
    const { id, score, box: [x0, y0, x1, y1] } = instance;
    const size = `${Math.round(x1 - x0)} × ${Math.round(y1 - y0)} px`;
    const button = element("button", "instance");
    button.type = "button";
    button.dataset.id = id;
    button.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-label", `${phrase} ${index + 1}, score ${score.toFixed(2)}, ${size}`);
    const meter = element("span", "meter");
    meter.style.setProperty("--share", String(score));
    button.append(element("span", "rank", String(index + 1)), meter, element("span", "score", score.toFixed(2)), element("span", "size", size));
    button.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && this.onActive(id));
    button.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && this.onActive(null));
    button.addEventListener("focus", () => {
      this.setStop(button);
      this.onActive(id);
    });
    button.addEventListener("blur", () => this.onActive(null));
    button.addEventListener("click", () => this.onPick(id));
    this.buttons.push(button);
    const row = element("li");
    row.append(button);
    return row;
  }

  /** Mark the active instance and bring it into sight within the list; the pinned one counts as pressed. */
  setActive(active, pinned) {
    for (const button of this.buttons) {
      const isActive = button.dataset.id === active;
      button.classList.toggle("active", isActive);
      button.setAttribute("aria-pressed", String(button.dataset.id === pinned));
      if (isActive) reveal(this.root, button);
    }
  }

  move(event) {
    const at = this.buttons.indexOf(document.activeElement);
    const last = this.buttons.length - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    this.buttons[Math.max(0, Math.min(to, last))].focus();
  }

  setStop(stop) {
    for (const button of this.buttons) button.tabIndex = button === stop ? 0 : -1;
  }
}

/** Scroll a box, and only that box, until a child is in sight. */
function reveal(box, child) {
  const outer = box.getBoundingClientRect(), inner = child.getBoundingClientRect();
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 8;
  else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 8;
}

/** An element with a class and a text. */
export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
