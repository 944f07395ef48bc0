// The picture and what was found on it, drawn on a canvas at the screen's own resolution.

import { inkOn } from "./palette.js";

const LABEL_SIZE = 12;
const SMALLEST_LABELLED = 28; // screen pixels: smaller instances show their score only while active

/**
 * An instance here: {id, colour, score, phrase, box: [x0, y0, x1, y1], mask, path}, in picture coordinates.
 * onHover(id or null) and onPick(id or null) tell what the pointer is on.
 */
export class Stage {
  constructor(canvas, { onHover, onPick }) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.picture = null;
    this.instances = [];
    this.active = null;
    this.view = { masks: true, boxes: false, scores: true };
    this.pending = false;
    new ResizeObserver(() => this.redraw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => event.pointerType !== "touch" && onHover(this.find(event)));
    canvas.addEventListener("pointerleave", () => onHover(null));
    canvas.addEventListener("click", (event) => onPick(this.find(event)));
  }

  /** Show a picture: {bitmap or null, width, height}; without a bitmap a plain ground stands in for it. */
  setPicture(picture) {
    this.picture = picture;
    this.instances = [];
    this.active = null;
    // Read by the style sheet: the frame keeps the picture's proportions.
    this.canvas.style.aspectRatio = `${picture.width} / ${picture.height}`;
    this.canvas.style.setProperty("--ratio", String(picture.width / picture.height));
    this.redraw();
  }

  setInstances(instances) {
    this.instances = instances;
    this.redraw();
  }

  setActive(id) {
    if (id === this.active) return;
    this.active = id;
    this.redraw();
  }

  setView(view) {
    Object.assign(this.view, view);
    this.redraw();
  }

  /** Id of the smallest instance under the pointer, or null. */
  find(event) {
    if (!this.picture) return null;
    const area = this.canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - area.left) / area.width) * this.picture.width);
    const y = Math.floor(((event.clientY - area.top) / area.height) * this.picture.height);
    let found = null;
    for (const instance of this.instances) {
      const { mask } = instance;
      const column = x - mask.x, row = y - mask.y;
      const covers = column >= 0 && row >= 0 && column < mask.width && row < mask.height;
      if (covers && mask.data[row * mask.width + column] && !(found && found.area <= instance.area)) found = instance;
    }
    return found && found.id;
  }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  draw() {
    const { canvas, context, picture } = this;
    if (!picture || !canvas.clientWidth) return;
    const dense = window.devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * dense);
    const height = Math.max(1, Math.round((width * picture.height) / picture.width));
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.globalAlpha = 1;
    context.imageSmoothingQuality = "high";
    if (picture.bitmap) {
      context.drawImage(picture.bitmap, 0, 0, width, height);
    } else {
      context.fillStyle = "#8a908d";
      context.fillRect(0, 0, width, height);
    }
    // The largest first, so that a small one on a large one stays in sight; the active one last.
    const order = [...this.instances].sort((a, b) => b.area - a.area);
    const active = order.find(({ id }) => id === this.active);
    if (active) order.push(...order.splice(order.indexOf(active), 1));
    const scale = width / picture.width;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    for (const instance of order) this.drawInstance(instance, scale / dense, active);
    context.setTransform(dense, 0, 0, dense, 0, 0);
    context.globalAlpha = 1;
    for (const instance of order) this.drawLabel(instance, scale / dense, active);
    canvas.dataset.shown = String(this.instances.length);
    canvas.dataset.active = active ? active.id : "";
  }

  drawInstance({ colour, path, box: [x0, y0, x1, y1], id }, zoom, active) {
    const { context, view } = this;
    const isActive = active && active.id === id;
    const faint = active && !isActive;
    context.lineJoin = "round";
    if (view.masks || isActive) {
      context.fillStyle = colour;
      context.globalAlpha = isActive ? 0.62 : faint ? 0.16 : 0.46;
      context.fill(path, "evenodd");
      context.globalAlpha = faint ? 0.35 : 1;
      context.strokeStyle = "rgba(10, 14, 12, 0.55)";
      context.lineWidth = (isActive ? 5 : 3.6) / zoom;
      context.stroke(path);
      context.strokeStyle = isActive ? "#ffffff" : colour;
      context.lineWidth = (isActive ? 2.6 : 1.8) / zoom;
      context.stroke(path);
    }
    if (view.boxes || isActive) {
      context.globalAlpha = faint ? 0.35 : 1;
      context.strokeStyle = "rgba(10, 14, 12, 0.5)";
      context.lineWidth = 3 / zoom;
      context.strokeRect(x0, y0, x1 - x0, y1 - y0);
      context.strokeStyle = colour;
      context.lineWidth = 1.5 / zoom;
      context.strokeRect(x0, y0, x1 - x0, y1 - y0);
    }
  }

  drawLabel({ colour, phrase, score, box: [x0, y0, x1, y1], id }, zoom, active) {
    const { context, canvas, view } = this;
    const isActive = active && active.id === id;
    const small = Math.min(x1 - x0, y1 - y0) * zoom < SMALLEST_LABELLED;
    if (!isActive && (!view.scores || small || active)) return;
    const text = isActive ? `${phrase}  ${score.toFixed(2)}` : score.toFixed(2);
    context.font = `600 ${LABEL_SIZE}px ui-sans-serif, system-ui, sans-serif`;
    const wide = context.measureText(text).width + 12, tall = LABEL_SIZE + 8;
    const limitX = canvas.clientWidth - wide - 2, limitY = canvas.clientHeight - tall - 2;
    const left = Math.max(2, Math.min(((x0 + x1) / 2) * zoom - wide / 2, limitX));
    const above = y0 * zoom - tall - 4;
    const top = Math.max(2, Math.min(above > 2 ? above : y0 * zoom + 6, limitY));
    context.fillStyle = colour;
    context.shadowColor = "rgba(0, 0, 0, 0.35)";
    context.shadowBlur = 4;
    context.beginPath();
    context.roundRect(left, top, wide, tall, tall / 2);
    context.fill();
    context.shadowBlur = 0;
    context.shadowColor = "transparent";
    context.fillStyle = inkOn(colour);
    context.textBaseline = "middle";
    context.fillText(text, left + 6, top + tall / 2 + 0.5);
  }
}
