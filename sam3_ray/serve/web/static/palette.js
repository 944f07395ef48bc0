// One colour a phrase: apart in hue and, side by side, in lightness; legible on most pictures with a thin dark edge.

const COLOURS = ["#2f8cff", "#ff4f81", "#17c08a", "#ffb01f", "#a56bff", "#00bcd4", "#ff7847", "#93c83e"];

/** Colour of the n-th phrase as #rrggbb. */
export function colourOf(index) {
  if (index < COLOURS.length) return COLOURS[index];
  const hue = (index * 137.5) % 360; // golden angle: new hues fall into the largest gap
  return hex(hue, 0.72, index % 2 ? 0.48 : 0.62);
}

function hex(hue, saturation, lightness) {
  const a = saturation * Math.min(lightness, 1 - lightness);
  const channel = (n) => {
    const k = (n + hue / 30) % 12;
    const value = lightness - a * Math.max(-1, Math.min(k - 3, 9 - k, 1));
    return Math.round(255 * value).toString(16).padStart(2, "0");
  };
  return `#${channel(0)}${channel(8)}${channel(4)}`;
}

/** Black or white, whichever reads better on a colour. */
export function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(colour.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.22 ? "#101312" : "#ffffff";
}
