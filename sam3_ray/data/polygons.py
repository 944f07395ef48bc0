"""From even-odd rings to what COCO and YOLO hold: polygons without holes, and a polygon in one piece.

A hole is joined to the ring around it by a cut of no width that is walked there and back: filled by either
rule, even-odd or non-zero, the result covers what the rings did. So are the parts of a mask where there can
be one polygon only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]


def without_holes(rings: Sequence[Sequence[float]]) -> list[list[float]]:
    """Polygons that cover together what even-odd rings do; each hole is cut open to the ring around it.

    Args:
        rings: flat ``[x0, y0, x1, y1, ...]``, as of ``sam3_ray.masks.mask_to_polygon``: none cross.
    """
    points = [_points(ring) for ring in rings]
    outer: dict[int, list[int]] = {}
    holes: list[tuple[int, int]] = []
    for index, ring in enumerate(points):
        around = [
            other
            for other, candidate in enumerate(points)
            if other != index and _contains(candidate, ring)
        ]
        if len(around) % 2:
            # The ring that is right around it lies in all the others that are.
            parent = max(
                around, key=lambda other: sum(_contains(points[o], points[other]) for o in around)
            )
            holes.append((index, parent))
        else:
            outer[index] = []
    for index, parent in holes:
        outer[parent].append(index)
    return [_flat(_joined([points[i], *(points[n] for n in inner)])) for i, inner in outer.items()]


def in_one_piece(rings: Sequence[Sequence[float]]) -> list[float]:
    """One polygon that covers what even-odd rings do; empty for none."""
    return _flat(_joined([_points(ring) for ring in without_holes(rings)])) if rings else []


def _joined(rings: list[Points]) -> Points:
    """The first ring with each other cut in, one after another, where it is nearest to what there is."""
    joined = rings[0]
    for ring in rings[1:]:
        distances = np.square(joined[:, None] - ring[None]).sum(axis=2)
        here, there = divmod(int(distances.argmin()), len(ring))
        ring = np.roll(ring, -there, axis=0)
        joined = np.concatenate([joined[: here + 1], ring, ring[:1], joined[here:]])
    return joined


def _contains(ring: Points, other: Points) -> bool:
    """Whether a ring is around another: no two cross, so that one point of it tells."""
    low, high = ring.min(axis=0), ring.max(axis=0)
    if (other.min(axis=0) < low).any() or (other.max(axis=0) > high).any():
        return False
    x, y = (other[0] + other[1]) / 2
    (ax, ay), (bx, by) = ring.T, np.roll(ring, -1, axis=0).T
    crossed = (ay > y) != (by > y)
    with np.errstate(divide="ignore", invalid="ignore"):
        met = ax + (y - ay) * (bx - ax) / (by - ay)
    return bool(np.count_nonzero(crossed & (x < met)) % 2)


def _points(ring: Sequence[float]) -> Points:
    return np.asarray(ring, np.float64).reshape(-1, 2)


def _flat(points: Points) -> list[float]:
    flat: list[float] = points.ravel().tolist()
    return flat
