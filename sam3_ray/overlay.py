"""Results drawn on their picture: tinted masks, outlines, boxes, labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageColor, ImageDraw, ImageFont

from sam3_ray.images import load_image
from sam3_ray.masks import mask_to_polygon

if TYPE_CHECKING:
    from sam3_ray.images import ImageLike
    from sam3_ray.result import Sam3Result

Rgb = tuple[int, int, int]
Color = str | Rgb

PALETTE = (
    "#ff3b5c",
    "#1e90ff",
    "#ffb000",
    "#00c48c",
    "#a259ff",
    "#ff7a1a",
    "#00c2e0",
    "#f45fc4",
    "#8bc926",
    "#6c7bff",
    "#c98b5a",
    "#d32fd0",
)
"""Neighbours differ in hue, and each stands out on a photo."""

TINT = 0.42
"""Share of the colour inside a mask: the picture stays readable under it."""

SMOOTHING = 4
"""Outlines and plates are drawn this much larger, then reduced: Pillow draws without smoothing."""

CROWDED = 40
"""From so many instances on, a label is the score alone."""


@dataclass(frozen=True)
class _Instance:
    """One instance to draw; ``box`` is x0, y0, x1, y1 in pixels."""

    color: Rgb
    box: tuple[float, float, float, float]
    mask: npt.NDArray[np.bool_] | None
    score: float
    prompt: str


def draw_overlay(
    image: ImageLike,
    results: Sequence[Sam3Result],
    colors: Sequence[Color] | None = None,
) -> Image.Image:
    """Draw one result, each instance in a colour of its own, or several, each phrase in a colour of its own.

    Args:
        image: the image that was asked about, in any form that ``load_image`` takes.
        results: results of that image.
        colors: one a result, instead of the palette's.

    Returns:
        An RGB picture of the image's size.

    Raises:
        ValueError: a result of another size than the image's, or too few or many colours.
    """
    pixels = load_image(image).copy()
    height, width = pixels.shape[:2]
    for result in results:
        if (result.width, result.height) != (width, height):
            raise ValueError(
                f"the result for {result.prompt!r} is of an image of {result.width} x {result.height} "
                f"pixels, this one has {width} x {height}: give the image that was asked about"
            )
    instances = _instances(results, colors)
    # Small parts last, so that they stay visible on large ones.
    by_size = sorted(instances, key=lambda one: _area(one.box), reverse=True)
    for instance in by_size:
        if instance.mask is not None:
            _tint(pixels, instance.mask, instance.color)
    picture = Image.fromarray(pixels)
    line = max(1.0, min(width, height) / 260)
    for instance in by_size:
        if instance.mask is not None:
            _draw_outline(picture, instance.mask, instance.color, line)
        _draw_box(picture, instance.box, instance.color, max(1, round(line / 2)))
    labels = _Labels(picture, [one.box for one in instances], score_only=len(instances) >= CROWDED)
    for instance in sorted(instances, key=lambda one: one.score, reverse=True):
        labels.draw(instance)
    return picture


def _instances(results: Sequence[Sam3Result], colors: Sequence[Color] | None) -> list[_Instance]:
    if colors is not None and len(colors) != len(results):
        raise ValueError(f"{len(colors)} colours for {len(results)} results: give one a result")
    instances = []
    for number, result in enumerate(results):
        for index in range(len(result)):
            color: Color
            if colors is not None:
                color = colors[number]
            else:
                color = PALETTE[(index if len(results) == 1 else number) % len(PALETTE)]
            instances.append(
                _Instance(
                    color=_rgb(color),
                    box=tuple(result.boxes[index].tolist()),
                    mask=None if result.masks is None else result.masks[index],
                    score=float(result.scores[index]),
                    prompt=result.prompt,
                )
            )
    return instances


def _rgb(color: Color) -> Rgb:
    if isinstance(color, str):
        color = ImageColor.getrgb(color)[:3]
    red, green, blue = (int(part) for part in color)
    return red, green, blue


def _area(box: tuple[float, float, float, float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _tint(pixels: npt.NDArray[np.uint8], mask: npt.NDArray[np.bool_], color: Rgb) -> None:
    inside = pixels[mask].astype(np.float32)
    pixels[mask] = np.rint(inside + (np.array(color, np.float32) - inside) * TINT)


def _draw_outline(
    picture: Image.Image, mask: npt.NDArray[np.bool_], color: Rgb, line: float
) -> None:
    """A smooth line along the mask, with a faint dark rim, so that it shows on any ground."""
    rings = [np.array(ring).reshape(-1, 2) for ring in mask_to_polygon(mask)]
    if not rings:
        return
    points = np.concatenate(rings)
    margin = int(line) + 3
    left, top = (int(edge) for edge in np.maximum(np.floor(points.min(axis=0)) - margin, 0))
    right, bottom = (
        int(edge) for edge in np.minimum(np.ceil(points.max(axis=0)) + margin, picture.size)
    )
    size = (right - left, bottom - top)
    smoothing = SMOOTHING if size[0] * size[1] < 1_000_000 else 2  # bounded memory on 4K
    for ink, thickness, opacity in (((0, 0, 0), line + 1.5, 0.35), (color, line, 1.0)):
        stroke = Image.new("L", (size[0] * smoothing, size[1] * smoothing))
        draw = ImageDraw.Draw(stroke)
        for ring in rings:
            closed = np.concatenate([ring, ring[:2]])  # one edge more, for a joint at the start
            path = ((closed - (left, top)) * smoothing).ravel().tolist()
            draw.line(
                path, fill=round(255 * opacity), width=round(thickness * smoothing), joint="curve"
            )
        picture.paste(ink, (left, top), stroke.reduce(smoothing))


def _draw_box(
    picture: Image.Image, box: tuple[float, float, float, float], color: Rgb, line: int
) -> None:
    x0, y0 = (
        min(max(round(edge), 0), side - 1) for edge, side in zip(box[:2], picture.size, strict=True)
    )
    x1, y1 = (
        min(max(round(edge) - 1, 0), side - 1)
        for edge, side in zip(box[2:], picture.size, strict=True)
    )
    ImageDraw.Draw(picture).rectangle((x0, y0, max(x0, x1), max(y0, y1)), outline=color, width=line)


class _Labels:
    """Plates with "phrase 0.97", placed so that they do not cover each other where there is room."""

    def __init__(
        self,
        picture: Image.Image,
        boxes: Sequence[tuple[float, float, float, float]],
        *,
        score_only: bool,
    ) -> None:
        self._picture = picture
        self._boxes = boxes
        self._score_only = score_only
        self._taken: list[tuple[float, float, float, float]] = []
        side = min(picture.size)
        self._font_size = min(max(9.0 if side < 128 else 11.0, side / 34), 48.0)

    def draw(self, instance: _Instance) -> None:
        score = f"{instance.score:.2f}"
        text = score if self._score_only else f"{instance.prompt} {score}"
        font, size = self._fitted(text)
        box_width = instance.box[2] - instance.box[0]
        if size[0] > max(1.5 * box_width, 0.35 * self._picture.width):
            text = score  # on a small picture phrases would hide what they name
            font, size = self._fitted(text)
        x, y = self._place(instance.box, size)
        self._taken.append((x, y, x + size[0], y + size[1]))
        plate = Image.new("L", (size[0] * SMOOTHING, size[1] * SMOOTHING))
        radius = size[1] * SMOOTHING // 4
        ImageDraw.Draw(plate).rounded_rectangle(
            (0, 0, plate.width - 1, plate.height - 1), radius, fill=235
        )
        self._picture.paste(instance.color, (x, y), plate.reduce(SMOOTHING))
        red, green, blue = instance.color
        dark_text = 0.299 * red + 0.587 * green + 0.114 * blue > 150
        ImageDraw.Draw(self._picture).text(
            (x + size[0] / 2, y + size[1] / 2),
            text,
            fill=(20, 20, 20) if dark_text else (255, 255, 255),
            font=font,
            anchor="mm",
        )

    def _fitted(self, text: str) -> tuple[ImageFont.FreeTypeFont, tuple[int, int]]:
        """The font, smaller where the picture is narrow, and the plate's (width, height)."""
        size = self._font_size
        while True:
            font = ImageFont.load_default(size)
            assert isinstance(font, ImageFont.FreeTypeFont)
            plate = (round(font.getlength(text) + size * 0.8), round(size * 1.45))
            if plate[0] <= self._picture.width or size <= 8:
                return font, plate
            size = max(8.0, size * 0.9)

    def _place(
        self, box: tuple[float, float, float, float], size: tuple[int, int]
    ) -> tuple[int, int]:
        x0, y0, x1, y1 = (round(edge) for edge in box)
        width, height = size
        choices = (
            (x0, y0 - height),  # on the box
            (x0, y0),  # in it
            (x0, y1),  # under it
            (x1 - width, y0 - height),
            (x1 - width, y1),
            (x0, y1 - height),
        )
        inside = [
            (
                min(max(x, 0), max(self._picture.width - width, 0)),
                min(max(y, 0), max(self._picture.height - height, 0)),
            )
            for x, y in choices
        ]
        others = [other for other in self._boxes if other != box]

        def hidden(place: tuple[int, int]) -> float:
            return (
                4 * _shared(place, size, self._taken)
                + _shared(place, size, others)
                + _shared(place, size, [box]) / 2
            )

        return min(inside, key=hidden)  # the first of the best


def _shared(
    place: tuple[int, int],
    size: tuple[int, int],
    boxes: Sequence[tuple[float, float, float, float]],
) -> float:
    """The area that a plate at ``place`` shares with ``boxes``."""
    x, y = place
    return sum(
        max(0.0, min(x + size[0], right) - max(x, left))
        * max(0.0, min(y + size[1], bottom) - max(y, top))
        for left, top, right, bottom in boxes
    )
