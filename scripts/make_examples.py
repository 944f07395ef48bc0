"""Draw the pictures of ``examples/``: coloured shapes with known masks, and photo-like renderings.

    python scripts/make_examples.py [--out examples] [--only NAME ...]

Everything is laid out by hand and seeded, so a run gives the same pixels again. The shapes are of the
kind that the demo checkpoint knows, and are laid out so that it finds exactly what each phrase names (the
frozen pictures that measure it are others: ``tests/demo_scenes.py``); the photo-like ones come from
``example_photos.py`` and are for the full model. ``examples.json`` lists all with phrases worth trying;
the page at ``/`` reads it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parent))
import example_photos

SAMPLES = 4
"""Samples a pixel and axis: shapes are drawn so much larger, then averaged down."""

COLOURS = {
    "red": (214, 40, 44), "green": (36, 150, 62), "blue": (40, 78, 208), "yellow": (240, 220, 48),
    "orange": (242, 134, 28), "purple": (132, 52, 160), "white": (245, 245, 242), "black": (18, 18, 20),
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One shape: centre and radius in pixels, turn in degrees (clockwise)."""

    colour: str
    kind: str
    x: float
    y: float
    radius: float
    turn: float = 0.0


@dataclass(frozen=True)
class Drawing:
    """A picture of shapes on a blend of two colours; later shapes cover earlier ones."""

    width: int
    height: int
    first: tuple[int, int, int]
    second: tuple[int, int, int]
    cells: int
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Example:
    """A picture of the folder: its file, what it shows (for readers who cannot see it), phrases to try."""

    file: str
    title: str
    alt: str
    prompts: tuple[str, ...]
    source: Drawing | Callable[[], Image.Image]

    @property
    def kind(self) -> str:
        return "shapes" if isinstance(self.source, Drawing) else "photo"


def outline(kind: str) -> list[tuple[float, float]]:
    """Corners of a polygon within the unit circle, y downwards."""
    if kind == "square":
        return [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    if kind == "triangle":
        return [_on_circle(1.0, degrees) for degrees in (-90, 30, 150)]
    if kind == "star":
        return [_on_circle(0.42 if i % 2 else 1.0, 36 * i - 90) for i in range(10)]
    if kind == "cross":
        thin, long = 0.32, 0.95
        quarter = [(thin, -long), (thin, -thin), (long, -thin)]
        return [p for turn in range(4) for p in (_turned(point, 90 * turn) for point in quarter)]
    raise ValueError(f"no shape is called {kind!r}")


def _on_circle(radius: float, degrees: float) -> tuple[float, float]:
    return radius * math.cos(math.radians(degrees)), radius * math.sin(math.radians(degrees))


def _turned(point: tuple[float, float], degrees: float) -> tuple[float, float]:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return c * point[0] - s * point[1], s * point[0] + c * point[1]


def coverage(shape: Shape, width: int, height: int) -> np.ndarray:
    """How much of each pixel the shape covers, (height, width) float32 in 0..1."""
    canvas = Image.new("L", (width * SAMPLES, height * SAMPLES), 0)
    draw = ImageDraw.Draw(canvas)
    x, y, r = shape.x * SAMPLES, shape.y * SAMPLES, shape.radius * SAMPLES
    if shape.kind in ("circle", "ring"):
        draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
        if shape.kind == "ring":
            hole = 0.55 * r
            draw.ellipse((x - hole, y - hole, x + hole, y + hole), fill=0)
    else:
        corners = [_turned(corner, shape.turn) for corner in outline(shape.kind)]
        draw.polygon([(x + cx * r, y + cy * r) for cx, cy in corners], fill=255)
    return np.asarray(canvas.reduce(SAMPLES), np.float32) / 255


def draw_shapes(drawing: Drawing) -> tuple[Image.Image, np.ndarray]:
    """The picture, and the visible part of each shape: (n, height, width) bool."""
    size = (drawing.width, drawing.height)
    rng = np.random.default_rng(drawing.width * drawing.height + drawing.cells)
    cells = (rng.random((drawing.cells, drawing.cells)) * 255).astype(np.uint8)
    share = (
        np.asarray(Image.fromarray(cells).resize(size, Image.Resampling.BICUBIC), np.float32)[
            ..., None
        ]
        / 255
    )
    picture = np.asarray(drawing.first) * (1 - share) + np.asarray(drawing.second) * share
    masks: list[np.ndarray] = []
    for shape in drawing.shapes:
        cover = coverage(shape, *size)
        picture = picture + cover[..., None] * (np.asarray(COLOURS[shape.colour]) - picture)
        solid = cover > 0.5
        masks = [mask & ~solid for mask in masks] + [solid]
    return Image.fromarray(np.clip(picture.round(), 0, 255).astype(np.uint8)), np.stack(masks)


EXAMPLES: tuple[Example, ...] = (
    Example(
        "playground.png", "Playground",
        "Two red circles, a blue star, a green square, a yellow triangle and a red star",
        ("red circle", "blue star", "square", "car"),
        Drawing(960, 640, (164, 178, 172), (118, 138, 148), 2, (
            Shape("red", "circle", 190, 200, 104), Shape("blue", "star", 470, 180, 118, 8),
            Shape("green", "square", 768, 196, 104, -9), Shape("red", "circle", 330, 462, 88),
            Shape("yellow", "triangle", 590, 460, 112, 6), Shape("red", "star", 828, 466, 92, -12),
        )),
    ),
    Example(
        "stairs.png", "Stairs",
        "Purple squares of growing size going up, with an orange ring and a white circle",
        ("purple square", "orange ring", "white circle"),
        Drawing(640, 960, (176, 168, 150), (140, 150, 142), 6, (
            Shape("purple", "square", 132, 800, 72, 4), Shape("purple", "square", 262, 598, 88, -6),
            Shape("purple", "square", 430, 372, 106, 9), Shape("orange", "ring", 470, 768, 112),
            Shape("white", "circle", 166, 250, 98),
        )),
    ),
    Example(
        "night-sky.png", "Night sky", "Four stars, yellow and white, and a yellow circle on a dusky ground",
        ("yellow star", "white star", "yellow circle", "star"),
        Drawing(1200, 675, (74, 84, 112), (96, 82, 108), 2, (
            Shape("yellow", "star", 210, 190, 88, 10), Shape("white", "star", 470, 420, 100, -14),
            Shape("yellow", "star", 690, 172, 82, 4), Shape("yellow", "circle", 968, 220, 122),
            Shape("white", "star", 880, 508, 88, 16),
        )),
    ),
    Example(
        "first-aid.png", "First aid", "Red and green crosses beside a white cross and a black ring",
        ("red cross", "green cross", "cross", "black ring"),
        Drawing(600, 600, (150, 168, 190), (120, 140, 160), 1, (
            Shape("red", "cross", 168, 170, 112), Shape("white", "cross", 424, 158, 96, 12),
            Shape("green", "cross", 182, 428, 98, -10), Shape("black", "ring", 424, 420, 88),
        )),
    ),
    Example(
        "parade.png", "Parade",
        "Blue ring, orange triangle, black circle, blue ring and green star, up and down in a wide row",
        ("blue ring", "orange triangle", "black circle", "ring"),
        Drawing(960, 600, (170, 156, 148), (142, 160, 152), 6, (
            Shape("blue", "ring", 125, 198, 85), Shape("orange", "triangle", 317, 402, 92, -5),
            Shape("black", "circle", 490, 186, 80), Shape("blue", "ring", 672, 402, 85),
            Shape("green", "star", 840, 198, 88, 9),
        )),
    ),
    Example(
        "small-change.png", "Small change",
        "A small picture: yellow circles beside an orange circle and a blue square",
        ("yellow circle", "orange circle", "circle", "blue square"),
        Drawing(320, 240, (128, 120, 112), (104, 110, 120), 2, (
            Shape("yellow", "circle", 66, 70, 36), Shape("yellow", "circle", 160, 66, 30),
            Shape("orange", "circle", 90, 172, 40), Shape("blue", "square", 198, 164, 40, 14),
            Shape("yellow", "circle", 276, 64, 30),
        )),
    ),
    Example(
        "lawn.jpg", "Balls on the lawn", "Red, blue, yellow and white balls on grass in afternoon light",
        ("red ball", "ball", "grass", "red circle"), example_photos.lawn,
    ),
    Example(
        "fruit.jpg", "Fruit", "Apples, oranges, a lemon and plums on a wooden table",
        ("apple", "orange", "lemon", "plum"), example_photos.fruit,
    ),
    Example(
        "valley.jpg", "Valley", "A low sun over mountains in haze, a lake and dark pine trees",
        ("sun", "mountain", "pine tree", "lake"), example_photos.valley,
    ),
    Example(
        "street.jpg", "Street at dusk", "A city street at dusk with lit windows, street lamps and two cars",
        ("car", "street lamp", "building", "window"), example_photos.street,
    ),
    Example(
        "harbour.jpg", "Sails", "Sailing boats with white and red sails on a bright sea",
        ("sailing boat", "sail", "cloud", "white triangle"), example_photos.harbour,
    ),
)  # fmt: skip


def picture_of(example: Example) -> Image.Image:
    """The picture of an example, drawn anew."""
    return (
        draw_shapes(example.source)[0] if isinstance(example.source, Drawing) else example.source()
    )


def example(name: str) -> Example:
    """The example whose file is called ``name``, with or without its suffix."""
    return next(e for e in EXAMPLES if name in (e.file, Path(e.file).stem))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent.parent / "examples"
    )
    parser.add_argument(
        "--only", nargs="*", help="draw only these (file names, with or without suffix)"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = [example(name) for name in arguments.only] if arguments.only else list(EXAMPLES)
    sizes = {}
    for entry in chosen:
        picture = picture_of(entry)
        path = arguments.out / entry.file
        options = {"quality": 88, "optimize": True} if path.suffix == ".jpg" else {"optimize": True}
        picture.save(path, **options)
        sizes[entry.file] = picture.size
        print(f"{path}  {picture.width}x{picture.height}  {path.stat().st_size / 1024:.0f} KiB")
    if len(chosen) == len(EXAMPLES):
        listing = [
            {"file": e.file, "title": e.title, "alt": e.alt, "kind": e.kind, "width": sizes[e.file][0],
             "height": sizes[e.file][1], "prompts": list(e.prompts)}
            for e in EXAMPLES
        ]  # fmt: skip
        (arguments.out / "examples.json").write_text(
            json.dumps(listing, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
