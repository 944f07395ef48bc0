// COCO's compressed run lengths, decoded. Runs go down the columns, background first; from the third on, each is
// written as the difference to the one before the last, in groups of five bits, least significant first.

/** Run lengths of a compressed string. */
export function runLengths(text) {
  const runs = [];
  let position = 0;
  while (position < text.length) {
    let value = 0;
    let shift = 0;
    let more = true;
    while (more) {
      if (position >= text.length) throw new Error("the mask's run lengths end in the middle of a number");
      const code = text.charCodeAt(position++) - 48;
      if (code < 0 || code > 63) throw new Error(`the mask's run lengths hold ${JSON.stringify(text[position - 1])}`);
      value |= (code & 0x1f) << shift;
      shift += 5;
      more = (code & 0x20) !== 0;
      if (!more && code & 0x10 && shift < 32) value |= -1 << shift;
    }
    runs.push(runs.length > 2 ? value + runs[runs.length - 2] : value);
  }
  return runs;
}

/**
 * The mask of an RLE {size: [height, width], counts}, cropped to what it covers:
 * {x, y, width, height, data}, data a Uint8Array of rows with 0 or 1. Nothing covered: width and height 0.
 */
export function decodeRle({ size: [imageHeight, imageWidth], counts }) {
  const runs = runLengths(counts);
  let x0 = imageWidth, y0 = imageHeight, x1 = -1, y1 = -1, at = 0;
  for (let i = 0; i < runs.length; i++) {
    if (i % 2 && runs[i] > 0) {
      const end = at + runs[i] - 1;
      const left = Math.floor(at / imageHeight), right = Math.floor(end / imageHeight);
      x0 = Math.min(x0, left);
      x1 = Math.max(x1, right);
      y0 = Math.min(y0, left === right ? at % imageHeight : 0);
      y1 = Math.max(y1, left === right ? end % imageHeight : imageHeight - 1);
    }
    at += runs[i];
  }
  if (at !== imageHeight * imageWidth) {
    throw new Error(`the mask has ${at} pixels, the picture ${imageHeight} x ${imageWidth}`);
  }
  if (x1 < 0) return { x: 0, y: 0, width: 0, height: 0, data: new Uint8Array(0) };
  const width = x1 - x0 + 1, height = y1 - y0 + 1;
  const data = new Uint8Array(width * height);
  at = 0;
  for (let i = 0; i < runs.length; i++) {
    if (i % 2) {
      for (let p = at; p < at + runs[i]; p++) {
        data[((p % imageHeight) - y0) * width + Math.floor(p / imageHeight) - x0] = 1;
      }
    }
    at += runs[i];
  }
  return { x: x0, y: y0, width, height, data };
}
