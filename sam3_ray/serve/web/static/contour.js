// The outline of a mask, as rings of points through the middles of the pixel edges between in and out: sharp at
// any zoom, without the stairs of pixel corners.

const STEP_X = [1, 0, -1, 0]; // east, south, west, north
const STEP_Y = [0, 1, 0, -1];

/** Rings of a decoded mask ({x, y, width, height, data}) in picture coordinates, each [x0, y0, x1, y1, ...]. */
export function contours({ x, y, width, height, data }) {
  const columns = width + 1;
  const leaving = new Uint8Array(columns * (height + 1)); // a bit for each direction an edge leaves a corner in
  const inside = (px, py) => px >= 0 && py >= 0 && px < width && py < height && data[py * width + px] === 1;
  for (let py = 0; py < height; py++) {
    for (let px = 0; px < width; px++) {
      if (!data[py * width + px]) continue;
      const corner = py * columns + px; // the mask lies to the right of each edge
      if (!inside(px, py - 1)) leaving[corner] |= 1;
      if (!inside(px + 1, py)) leaving[corner + 1] |= 2;
      if (!inside(px, py + 1)) leaving[corner + columns + 1] |= 4;
      if (!inside(px - 1, py)) leaving[corner + columns] |= 8;
    }
  }
  const rings = [];
  for (let start = 0; start < leaving.length; start++) {
    while (leaving[start]) rings.push(walk(start, leaving, columns, x, y));
  }
  return rings;
}

function walk(start, leaving, columns, offsetX, offsetY) {
  const directions = [];
  let corner = start;
  let direction = Math.log2(leaving[start] & -leaving[start]);
  do {
    leaving[corner] &= ~(1 << direction);
    directions.push(direction);
    corner += STEP_X[direction] + STEP_Y[direction] * columns;
    // Where two parts touch at a corner, turning right keeps them apart.
    const next = [1, 0, 3].map((turn) => (direction + turn) % 4).find((d) => leaving[corner] & (1 << d));
    if (next === undefined) break;
    direction = next;
  } while (corner !== start || leaving[corner]);
  const ring = [];
  let px = start % columns, py = Math.floor(start / columns);
  for (let i = 0; i < directions.length; i++) {
    const now = directions[i];
    const before = directions[(i || directions.length) - 1], after = directions[(i + 1) % directions.length];
    if (before !== now || after !== now) {
      ring.push(offsetX + px + STEP_X[now] / 2, offsetY + py + STEP_Y[now] / 2);
    }
    px += STEP_X[now];
    py += STEP_Y[now];
  }
  return ring;
}

/** The rings as a Path2D, to be filled "evenodd". */
export function pathOf(rings) {
  const path = new Path2D();
  for (const ring of rings) {
    path.moveTo(ring[0], ring[1]);
    for (let i = 2; i < ring.length; i += 2) path.lineTo(ring[i], ring[i + 1]);
    path.closePath();
  }
  return path;
}
