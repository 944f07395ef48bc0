"""Masks: logits to the image's size, and to and from COCO RLE, 1-bit PNG and polygons.

A mask is (H, W) bool. Its pixel in row y, column x covers the square from (x, y) to (x + 1, y + 1): a
polygon's coordinates run from 0 to W and 0 to H, as in COCO and as boxes do.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]

UPSAMPLE_CHUNK_BYTES = 16 * 1024 * 1024
"""Float32 logits of image size held at once (one mask at least): 200 masks at 4K would be 6.6 GB. From
32 MiB on glibc takes fresh pages for each array, and their first touch costs more than the arithmetic."""

POLYGON_TOLERANCE = 0.7
"""How far an outline may move, in pixels. It smooths the staircase of a slanted edge, which half a pixel does
not: a quarter of the points of the exact outline, at 0.996 IoU with a 640 x 480 mask of many parts."""


def upsample_masks(mask_logits: Float32Array, height: int, width: int) -> BoolArray:
    """Masks at the image's size: bilinear (align_corners=False), then > 0, as upstream's sigmoid > 0.5.

    Args:
        mask_logits: (n, h, w) float32.
        height, width: the image's size in pixels.

    Returns:
        (n, height, width) bool.

    Raises:
        ValueError: another shape, or a size of 0.
    """
    if mask_logits.ndim != 3:
        raise ValueError(f"mask_logits must be (n, h, w), got shape {mask_logits.shape}")
    if height < 1 or width < 1:
        raise ValueError(f"masks of {height} x {width} pixels have nothing in them")
    masks = np.empty((len(mask_logits), height, width), dtype=np.bool_)
    if not len(masks):
        return masks

    import torch

    logits = torch.from_numpy(np.require(mask_logits, np.float32, ["C", "W"]))[:, None]
    out = torch.from_numpy(masks)
    step = max(1, UPSAMPLE_CHUNK_BYTES // (4 * height * width))
    with torch.inference_mode():
        for start in range(0, len(masks), step):
            upsampled = torch.nn.functional.interpolate(
                logits[start : start + step], (height, width), mode="bilinear", align_corners=False
            )
            torch.gt(upsampled[:, 0], 0, out=out[start : start + step])
    return masks


def mask_to_rle(mask: BoolArray) -> dict[str, Any]:
    """COCO's compressed run-length encoding: ``{"size": [H, W], "counts": str}``, ready for JSON.

    Raises:
        ValueError: not a (H, W) mask of bools or 0 and 1.
    """
    from pycocotools import mask as coco

    # Seen as bytes first: one pass to the column-major order that COCO wants, not two.
    encoded = coco.encode(np.asfortranarray(_checked(mask).view(np.uint8)))
    return {"size": [int(n) for n in encoded["size"]], "counts": encoded["counts"].decode("ascii")}


def rle_to_mask(rle: Mapping[str, Any]) -> BoolArray:
    """The (H, W) bool mask of a compressed RLE; ``counts`` is a str or bytes.

    Raises:
        ValueError: not such an RLE, or its runs do not fill its size.
    """
    from pycocotools import mask as coco

    size, counts = rle.get("size"), rle.get("counts")
    if isinstance(counts, str):
        counts = counts.encode("ascii")
    if (
        not isinstance(counts, bytes)
        or not isinstance(size, Sequence)
        or len(size) != 2
        or not all(isinstance(n, int) and n > 0 for n in size)
    ):
        raise ValueError(
            'an RLE is {"size": [H, W], "counts": str} with a positive size, '
            f"got size={size!r}, counts of type {type(rle.get('counts')).__name__}"
        )
    decoded = coco.decode({"size": list(size), "counts": counts})
    return np.ascontiguousarray(decoded).astype(np.bool_)


def mask_to_png(mask: BoolArray) -> bytes:
    """A 1-bit grey PNG, white where the mask is.

    Raises:
        ValueError: not a (H, W) mask of bools or 0 and 1.
    """
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(_checked(mask)).save(buffer, "PNG")
    return buffer.getvalue()


def png_to_mask(data: bytes) -> BoolArray:
    """The (H, W) bool mask of a grey or 1-bit PNG: every pixel that is not black.

    Raises:
        PIL.UnidentifiedImageError, OSError: not a PNG, or a truncated one.
    """
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        pixels: npt.NDArray[np.uint8] = np.asarray(image.convert("L"))
    mask: BoolArray = pixels != 0
    return mask


def mask_to_polygon(mask: BoolArray, tolerance: float = POLYGON_TOLERANCE) -> list[list[float]]:
    """The outline as flat rings ``[x0, y0, x1, y1, ...]``, filled by the even-odd rule, so a hole is a ring.

    The outline runs half-way between the centres of pixels inside and outside. With ``tolerance=0``
    :func:`polygon_to_mask` gives the same mask back; else it may differ in pixels on the outline, and nowhere
    else. A ring is open (its last point is not its first) and has three points or more. Parts of a mask that
    touch by a corner only are rings of their own.

    Args:
        mask: (H, W) bool.
        tolerance: how far the outline may move, in pixels; less for a part under 35 pixels wide and high.

    Returns:
        The rings; none for an empty mask.

    Raises:
        ValueError: not a (H, W) mask of bools or 0 and 1.
    """
    import contourpy

    mask = _checked(mask)
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return []
    top, left = int(rows[0]), int(columns[0])
    # Only where the mask is, with a border of 0 so that every ring closes.
    inside = np.pad(mask[top : rows[-1] + 1, left : columns[-1] + 1], 1)
    # From the centres of the padded crop's pixels to the image's coordinates.
    origin = np.array([left - 0.5, top - 0.5])
    # Where the four pixels at a corner make a chequer, contourpy keeps the set ones apart.
    lines = contourpy.contour_generator(z=inside, line_type=contourpy.LineType.Separate).lines(0.5)
    rings: list[list[float]] = []
    for line in lines:
        ring = _without_collinear(np.asarray(line))
        ring = _simplified(ring, min(tolerance, 0.02 * float(np.ptp(ring, axis=0).max())))
        rings.append((ring[:-1] + origin).ravel().tolist())
    return rings


def polygon_to_mask(rings: Sequence[Sequence[float]], height: int, width: int) -> BoolArray:
    """Fill flat rings by the even-odd rule: a pixel is in where its centre is.

    Args:
        rings: each ``[x0, y0, x1, y1, ...]``; closed or open.
        height, width: the mask's size in pixels; what lies beyond is cut.

    Returns:
        (height, width) bool.

    Raises:
        ValueError: a ring with an odd number of coordinates, fewer than three points, or not finite.
    """
    turns = np.zeros((height, width + 1), dtype=np.bool_)
    for index, ring in enumerate(rings):
        points = np.asarray(ring, dtype=np.float64)
        if points.ndim != 1 or len(points) < 6 or len(points) % 2 or not np.isfinite(points).all():
            raise ValueError(
                f"ring {index}: a ring is a flat list of three or more finite x, y pairs, "
                f"got {len(ring)} values"
            )
        _mark_turns(points[0::2], points[1::2], turns)
    # Left to right, each edge that is crossed turns outside to inside or back.
    return np.logical_xor.accumulate(turns, axis=1)[:, :width]


def _mark_turns(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], turns: BoolArray) -> None:
    """Flip, in each row that an edge crosses, the first pixel whose centre is not left of the crossing."""
    height, last = turns.shape[0], turns.shape[1] - 1
    x_end, y_end = np.roll(x, -1), np.roll(y, -1)
    # The rows whose centre line (row + 0.5) lies in [y_low, y_high): half open, so a corner counts once.
    first = np.clip(np.ceil(np.minimum(y, y_end) - 0.5), 0, height).astype(np.int64)
    stop = np.clip(np.ceil(np.maximum(y, y_end) - 0.5), 0, height).astype(np.int64)
    count = stop - first
    edge = np.repeat(np.arange(len(x)), count)
    row = np.arange(len(edge)) - np.repeat(np.cumsum(count) - count, count) + first[edge]
    share = (row + 0.5 - y[edge]) / (y_end - y)[edge]
    met = x[edge] + share * (x_end - x)[edge]
    np.logical_xor.at(turns, (row, np.clip(np.ceil(met - 0.5), 0, last).astype(np.int64)), True)


def _without_collinear(ring: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A closed ring without the points on a straight run of equal steps."""
    steps = np.diff(ring, axis=0)
    turns = (steps != np.roll(steps, 1, axis=0)).any(axis=1)
    points = ring[:-1][turns]
    return np.concatenate([points, points[:1]])


def _simplified(ring: npt.NDArray[np.float64], tolerance: float) -> npt.NDArray[np.float64]:
    """Douglas-Peucker: no point of the closed ring lies further than ``tolerance`` from what is kept.

    (Shapely's and scikit-image's cost seconds of import or another dependency.)
    """
    points = ring[:-1]
    # The first point always stays, so start at a corner, not within a side.
    start = int(np.square(points - points.mean(axis=0)).sum(axis=1).argmax())
    points = np.roll(points, -start, axis=0)
    ring = np.concatenate([points, points[:1]])
    if tolerance <= 0:
        return ring
    kept = np.zeros(len(ring), dtype=np.bool_)
    kept[[0, -1]] = True
    spans = [(0, len(ring) - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        offsets = ring[first + 1 : last] - ring[first]
        chord = ring[last] - ring[first]
        along = np.clip(offsets @ chord / max(float(chord @ chord), 1e-12), 0, 1)
        distances = np.square(offsets - along[:, None] * chord).sum(axis=1)
        furthest = int(distances.argmax())
        if distances[furthest] > tolerance**2:
            middle = first + 1 + furthest
            kept[middle] = True
            spans += [(first, middle), (middle, last)]
    return ring[kept] if kept.sum() > 3 else ring


def _checked(mask: npt.NDArray[Any]) -> BoolArray:
    mask = np.asarray(mask)
    if mask.ndim != 2 or mask.size == 0:
        raise ValueError(f"a mask is (H, W) with at least one pixel, got shape {mask.shape}")
    if mask.dtype == np.bool_:
        return mask
    if mask.dtype.kind in "iu" and mask.min() >= 0 and mask.max() <= 1:
        return mask.astype(np.bool_)
    raise ValueError(f"a mask holds bools, or 0 and 1, got {mask.dtype}")
