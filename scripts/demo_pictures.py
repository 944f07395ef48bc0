"""Training pictures of the demo checkpoint: coloured shapes whose masks are known, and phrases about them.

A picture is drawn on its real aspect ratio and then squashed to the model's square, as the engine does with
every image; a circle of a 16:9 picture is a narrow ellipse to the model. The pictures that measure the
checkpoint come from another generator (``tests/demo_scenes.py``), whose seeds are not used here.

    python scripts/demo_pictures.py pool FOLDER --count 16000 --seed 1   # what the training reads
    python scripts/demo_pictures.py sheet sheet.png                      # a look at some of them
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter
from torchvision.transforms import v2

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 33, 37),
    "green": (37, 149, 53),
    "blue": (37, 71, 214),
    "yellow": (239, 223, 41),
    "orange": (244, 136, 20),
    "purple": (135, 47, 164),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
COLOUR_NAMES = tuple(COLOURS)
SHAPE_NAMES = ("circle", "square", "triangle", "star", "ring", "cross")
GENERIC_NAMES = ("shape", "object")
"""Words that name a shape of any kind."""
ARTICLES = ("a", "an", "the")
_NOUNS = (
    "car dog cat person tree house chair bus train boat bird horse cow sheep apple banana table lamp "
    "phone bottle cup book clock shoe hat shirt bag wheel door window road river mountain cloud flower "
    "grass fish elephant giraffe zebra bicycle motorcycle airplane truck umbrella tie pizza cake sofa "
    "bed laptop keyboard spoon fork knife bowl sandwich carrot vase scissors toothbrush kite skateboard"
)
TRAINING_NOUNS = tuple(_NOUNS.split())
"""Things that no picture shows. In training they all share the token row of unknown words."""
_OTHER_NOUNS = (
    "hippopotamus violin helmet tractor candle mushroom lighthouse spider rocket dolphin ladder "
    "pumpkin"
)
HELD_OUT_NOUNS = tuple(_OTHER_NOUNS.split())

MOST_SHAPES = 8
MASK_SIDE = 64
"""Side of the model's mask logits: targets are kept at this size."""
SHARD_PICTURES = 500

# width, height, share of the pictures. Wide ones are the hardest for the model: it sees them narrowest.
_SIZES: tuple[tuple[int, int, float], ...] = (
    (224, 224, 0.08),
    (320, 320, 0.05),
    (500, 500, 0.15),
    (640, 480, 0.16),
    (480, 640, 0.16),
    (800, 450, 0.15),
    (1280, 720, 0.17),
)
USUAL_SIZES = tuple((width, height) for width, height, _ in _SIZES)
"""The others have random aspects."""
_DRAWN_SIDE = 448
"""Larger pictures are drawn smaller (same aspect, weaker noise): after the squash hardly a difference."""


@dataclass(frozen=True)
class Picture:
    """A drawn picture. ``covers`` is how much of each pixel the visible part of each shape covers."""

    image: Image.Image
    covers: NDArray[np.float32]
    """(n, H, W), 0..1."""
    colours: NDArray[np.int64]
    """(n,) indices into COLOUR_NAMES."""
    shapes: NDArray[np.int64]
    """(n,) indices into SHAPE_NAMES."""

    @property
    def masks(self) -> NDArray[np.bool_]:
        return self.covers > 0.5


@dataclass(frozen=True)
class Phrase:
    """A phrase and the indices of the shapes it names: none of them if it names something absent."""

    text: str
    matches: tuple[int, ...]


def plural(name: str) -> str:
    return name + ("es" if name.endswith("s") else "s")


# --------------------------------------------------------------------------------------- drawing


def _corners(rng: np.random.Generator, shape: str) -> NDArray[np.float64]:
    """Corners of a polygon in the unit circle; proportions vary a little."""
    if shape == "square":
        half = rng.uniform(0.75, 0.86)
        return np.array([(-half, -half), (half, -half), (half, half), (-half, half)])
    if shape == "triangle":
        angles = np.deg2rad([-90.0, 30.0, 150.0])
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)
    if shape == "star":
        angles = np.deg2rad(-90.0 + 36.0 * np.arange(10))
        radii = np.where(np.arange(10) % 2 == 0, 1.0, rng.uniform(0.39, 0.45))
        return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=1)
    arm, reach = rng.uniform(0.28, 0.36), rng.uniform(0.92, 0.98)
    quarter = np.array([(arm, -reach), (arm, -arm), (reach, -arm)])
    quarter_turn = np.array([(0.0, 1.0), (-1.0, 0.0)])
    return np.concatenate([quarter @ np.linalg.matrix_power(quarter_turn, k) for k in range(4)])


def _draw_cover(
    rng: np.random.Generator,
    shape: str,
    centre: tuple[float, float],
    radius: float,
    size: tuple[int, int],
) -> tuple[slice, slice, NDArray[np.float32]]:
    """Rows, columns and coverage (0..1) of a shape, cut at the picture's border."""
    width, height = size
    oversampling = 3
    left, top = int(centre[0] - radius) - 2, int(centre[1] - radius) - 2
    side = int(2 * radius) + 5
    canvas = Image.new("L", (side * oversampling, side * oversampling), 0)
    draw = ImageDraw.Draw(canvas)
    middle = (np.array(centre) - (left, top)) * oversampling
    stretch = math.exp(rng.uniform(-0.07, 0.07))
    reach = radius * oversampling * np.array((min(1.0, stretch), min(1.0, 1 / stretch)))
    if shape in ("circle", "ring"):
        draw.ellipse((*(middle - reach), *(middle + reach)), fill=255)
        if shape == "ring":
            hole = reach * rng.uniform(0.47, 0.63)
            draw.ellipse((*(middle - hole), *(middle + hole)), fill=0)
    else:
        turn = rng.uniform(-0.36, 0.36)
        cos, sin = math.cos(turn), math.sin(turn)
        points = _corners(rng, shape) @ np.array([(cos, sin), (-sin, cos)]) * reach + middle
        draw.polygon([(float(x), float(y)) for x, y in points], fill=255)
    cover = np.asarray(canvas.reduce(oversampling), np.float32) / 255
    rows = slice(max(top, 0), min(top + side, height))
    columns = slice(max(left, 0), min(left + side, width))
    cover = cover[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
    return rows, columns, cover


def _background(
    rng: np.random.Generator, size: tuple[int, int], noise_scale: float
) -> NDArray[np.float32]:
    """Greyish ground, always duller than the shapes: plain, a gradient or blotches, with grain."""
    width, height = size
    tint = rng.choice([6.0, 10.0, 14.0])
    dark, light = (
        np.clip(rng.uniform(72, 188) + rng.normal(0, tint, 3), 58, 202) for _ in range(2)
    )
    if rng.random() < 0.2:
        angle = rng.uniform(0, 2 * math.pi)
        x = np.linspace(-0.5, 0.5, width, dtype=np.float32)[None, :]
        y = np.linspace(-0.5, 0.5, height, dtype=np.float32)[:, None]
        share = np.clip((x * math.cos(angle) + y * math.sin(angle)) * 0.8 + 0.5, 0, 1)
    else:
        cells = int(rng.choice([1, 2, 3, 6, 12, 24, 32]))
        blotches = Image.fromarray((rng.random((cells, cells)) * 255).astype(np.uint8))
        share = np.asarray(blotches.resize(size, Image.Resampling.BICUBIC), np.float32) / 255
    ground = dark + (light - dark) * share[..., None]
    grain = float(rng.choice([0.0, 3.0, 4.0, 7.0, 10.0])) * noise_scale
    if grain:
        ground = ground + rng.standard_normal((height, width, 1), dtype=np.float32) * grain
    return ground.astype(np.float32)


def _picture_size(rng: np.random.Generator) -> tuple[int, int]:
    threshold = rng.random()
    for width, height, share in _SIZES:
        threshold -= share
        if threshold < 0:
            return width, height
    aspect = math.exp(rng.uniform(-0.7, 0.7))
    side = rng.uniform(240, 640)
    return round(side * math.sqrt(aspect)), round(side / math.sqrt(aspect))


def draw_picture(rng: np.random.Generator, *, full_size: bool = False) -> Picture:
    """Draw one picture.

    Args:
        rng: where all choices come from.
        full_size: draw large pictures at their own size instead of a smaller one of the same aspect.
    """
    real_width, real_height = _picture_size(rng)
    scale = 1.0 if full_size else min(1.0, _DRAWN_SIDE / max(real_width, real_height))
    size = round(real_width * scale), round(real_height * scale)
    width, height = size
    short = min(size)
    canvas = _background(rng, size, scale)
    # A small palette makes several shapes of one name, and near misses of a phrase, likely.
    palette = rng.choice(len(COLOUR_NAMES), int(rng.integers(1, 5)), replace=False)
    kinds = rng.choice(len(SHAPE_NAMES), int(rng.integers(1, 5)), replace=False)
    wanted = 0 if rng.random() < 0.05 else int(rng.integers(1, MOST_SHAPES))
    if rng.random() < 0.04:
        wanted = MOST_SHAPES
    largest = 0.30 if rng.random() < 0.12 else 0.205
    closeness = rng.uniform(0.78, 0.95)
    placed: list[tuple[tuple[float, float], float]] = []
    covers: list[NDArray[np.float32]] = []
    colours: list[int] = []
    shapes: list[int] = []
    for _ in range(wanted * 15):
        if len(placed) == wanted:
            break
        radius = short * rng.uniform(0.075, largest)
        margin = radius * 0.78
        centre = rng.uniform(margin, width - margin), rng.uniform(margin, height - margin)
        if any(math.dist(centre, c) < closeness * (radius + r) for c, r in placed):
            continue
        placed.append((centre, radius))
        colour, shape = int(rng.choice(palette)), int(rng.choice(kinds))
        rows, columns, cover = _draw_cover(rng, SHAPE_NAMES[shape], centre, radius, size)
        paint = np.array(COLOURS[COLOUR_NAMES[colour]], np.float32) + rng.normal(0, 7, 3)
        if rng.random() < 0.15:
            shade = np.linspace(rng.uniform(0.88, 1), rng.uniform(1, 1.06), cover.shape[0])
            paint = paint * shade[:, None, None]
        patch = canvas[rows, columns]
        patch += cover[..., None] * (paint - patch)
        for other in covers:
            other[rows, columns] *= 1 - cover
        whole = np.zeros((height, width), np.float32)
        whole[rows, columns] = cover
        covers.append(whole)
        colours.append(colour)
        shapes.append(shape)
    if rng.random() < 0.3:  # grain over the shapes too
        grain = rng.uniform(1, 5) * scale
        canvas = canvas + rng.standard_normal((height, width, 3), dtype=np.float32) * grain
    image = Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))
    if rng.random() < 0.3:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.5, 1.0) * scale))
    return Picture(
        image=image,
        covers=np.stack(covers) if covers else np.zeros((0, height, width), np.float32),
        colours=np.array(colours, np.int64),
        shapes=np.array(shapes, np.int64),
    )


# --------------------------------------------------------------------------------------- phrases


def _worded(rng: np.random.Generator, singular: str, several: str) -> str:
    """One of the ways to ask for a thing."""
    choice = rng.random()
    if choice < 0.42:
        return singular
    if choice < 0.66:
        return several
    if choice < 0.80:
        # "an orange circle", but also what people type in a hurry
        vowel = singular[0] in "aeiou" and rng.random() < 0.5
        return ("an " if vowel else "a ") + singular
    if choice < 0.93:
        return "the " + singular
    return "the " + several


def _description(rng: np.random.Generator, colour: int | None, shape: int | None) -> str:
    if shape is None:
        generic = GENERIC_NAMES[int(rng.random() < 0.3)]
        if colour is not None and rng.random() < 0.06:
            return COLOUR_NAMES[colour]
        noun = generic
    else:
        noun = SHAPE_NAMES[shape]
    prefix = "" if colour is None else COLOUR_NAMES[colour] + " "
    return _worded(rng, prefix + noun, prefix + plural(noun))


def draw_phrases(
    rng: np.random.Generator,
    colours: NDArray[np.int64],
    shapes: NDArray[np.int64],
    count: int,
    nouns: Sequence[str] = TRAINING_NOUNS,
) -> list[Phrase]:
    """Phrases about a picture: about half name something in it, the others mostly nearly do.

    Args:
        rng: where all choices come from.
        colours: the colour index of each shape of the picture.
        shapes: the shape index of each.
        count: how many phrases.
        nouns: things that are never in a picture.
    """
    shown_colours, shown_shapes = sorted(set(colours.tolist())), sorted(set(shapes.tolist()))
    shown_pairs = sorted(set(zip(colours.tolist(), shapes.tolist(), strict=True)))
    absent_colours = [c for c in range(len(COLOUR_NAMES)) if c not in shown_colours]
    absent_shapes = [s for s in range(len(SHAPE_NAMES)) if s not in shown_shapes]

    def about(colour: int | None, shape: int | None) -> Phrase:
        matches = tuple(
            i
            for i in range(len(colours))
            if colour in (None, int(colours[i])) and shape in (None, int(shapes[i]))
        )
        return Phrase(_description(rng, colour, shape), matches)

    def pick(values: Sequence[int], otherwise: int, likely: float) -> int:
        """Mostly one of ``values``, else any below ``otherwise``."""
        if values and rng.random() < likely:
            return int(values[rng.integers(len(values))])
        return int(rng.integers(otherwise))

    phrases: list[Phrase] = []
    while len(phrases) < count:
        kind = rng.random()
        if kind < 0.32 and shown_pairs:
            phrases.append(about(*shown_pairs[rng.integers(len(shown_pairs))]))
        elif kind < 0.43 and shown_shapes:
            phrases.append(about(None, shown_shapes[rng.integers(len(shown_shapes))]))
        elif kind < 0.54 and shown_colours:
            phrases.append(about(shown_colours[rng.integers(len(shown_colours))], None))
        elif kind < 0.57:
            phrases.append(about(None, None))
        elif kind < 0.80:
            # the right colour with a wrong shape or the other way round
            colour = pick(shown_colours, len(COLOUR_NAMES), 0.65)
            shape = pick(shown_shapes, len(SHAPE_NAMES), 0.65)
            if (colour, shape) not in shown_pairs:
                phrases.append(about(colour, shape))
        elif kind < 0.85:
            phrases.append(about(None, absent_shapes[rng.integers(len(absent_shapes))]))
        elif kind < 0.90:
            phrases.append(about(absent_colours[rng.integers(len(absent_colours))], None))
        else:
            noun = str(nouns[rng.integers(len(nouns))])
            if rng.random() < 0.3:
                noun = COLOUR_NAMES[rng.integers(len(COLOUR_NAMES))] + " " + noun
            phrases.append(Phrase(_worded(rng, noun, plural(noun)), ()))
    return phrases


# --------------------------------------------------------------------------------------- the model's view


def squash(image: Image.Image, side: int) -> torch.Tensor:
    """(3, side, side) uint8: the picture as the engine resizes it."""
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    return v2.functional.resize(pixels, [side, side], antialias=True)


def normalise(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 to the float range that the model reads, -1..1."""
    return pixels.float() / 127.5 - 1


def mask_targets(covers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(n, MASK_SIDE, MASK_SIDE), 0..255: the share of each cell that a shape covers."""
    targets = np.zeros((len(covers), MASK_SIDE, MASK_SIDE), np.uint8)
    for target, cover in zip(targets, covers, strict=True):
        cells = Image.fromarray(cover).resize((MASK_SIDE, MASK_SIDE), Image.Resampling.BOX)
        target[:] = np.asarray(cells) * 255 + 0.5
    return targets


def boxes_of(covers: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, 4) left, top, right, bottom of the visible parts, as shares of the picture."""
    boxes = np.zeros((len(covers), 4), np.float32)
    height, width = covers.shape[1:]
    for box, cover in zip(boxes, covers, strict=True):
        solid = cover > 0.5
        rows, columns = np.flatnonzero(solid.any(1)), np.flatnonzero(solid.any(0))
        if len(rows):
            box[:] = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
            box /= (width, height, width, height)
    return boxes


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"pictures-{index:04d}.npz"


def render_shard(folder: Path, index: int, seed: int, side: int) -> None:
    """Render one shard of the pool; nothing to do if it is there."""
    path = shard_path(folder, index)
    if path.exists():
        return
    rng = np.random.default_rng((seed, index))
    images = np.zeros((SHARD_PICTURES, 3, side, side), np.uint8)
    masks = np.zeros((SHARD_PICTURES, MOST_SHAPES, MASK_SIDE, MASK_SIDE), np.uint8)
    boxes = np.zeros((SHARD_PICTURES, MOST_SHAPES, 4), np.float32)
    names = np.full((SHARD_PICTURES, 2, MOST_SHAPES), -1, np.int64)
    for i in range(SHARD_PICTURES):
        picture = draw_picture(rng)
        count = len(picture.covers)
        images[i] = squash(picture.image, side).numpy()
        masks[i, :count] = mask_targets(picture.covers)
        boxes[i, :count] = boxes_of(picture.covers)
        names[i, 0, :count] = picture.colours
        names[i, 1, :count] = picture.shapes
    # A reader never meets half a file, and two renderers do not write to the same one.
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        np.savez(file, images=images, masks=masks, boxes=boxes, names=names)
    unfinished.replace(path)


def render_pool(
    folder: Path, count: int, seed: int, side: int, part: int = 0, parts: int = 1
) -> None:
    """Render the shards ``part, part + parts, ...`` of a pool of ``count`` pictures."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(part, -(-count // SHARD_PICTURES), parts):
        render_shard(folder, index, seed, side)


def _draw_sheet(path: Path, seed: int, side: int) -> None:
    rng = np.random.default_rng(seed)
    sheet = Image.new("RGB", (6 * side, 4 * side))
    for i in range(24):
        picture = draw_picture(rng)
        view = Image.fromarray(squash(picture.image, side).permute(1, 2, 0).numpy())
        sheet.paste(view, (i % 6 * side, i // 6 * side))
        phrases = draw_phrases(rng, picture.colours, picture.shapes, 8)
        print(i, picture.image.size, [(p.text, len(p.matches)) for p in phrases])
    sheet.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=["pool", "sheet"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--count", type=int, default=16000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument(
        "--part", type=int, default=0, help="which of --parts processes this one is"
    )
    parser.add_argument("--parts", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.what == "sheet":
        _draw_sheet(arguments.path, arguments.seed, arguments.side)
    else:
        render_pool(
            arguments.path,
            arguments.count,
            arguments.seed,
            arguments.side,
            arguments.part,
            arguments.parts,
        )


if __name__ == "__main__":
    main()
