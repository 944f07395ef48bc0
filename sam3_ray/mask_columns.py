"""A mask at the image's size as the columns that have anything in them: what an RLE and an area need.

Most masks are small, and COCO's runs go down the columns. So instead of every pixel of the image only the
columns of the object are made, each in one piece of memory, from the rows of logits that can be inside. The
pixels are those of ``sam3_ray.masks.upsample_masks``, bit for bit: torch's bilinear kernel interpolates
along a row, then between two such results, and its linear kernel does each of the two with the same
arithmetic (tests/test_mask_columns.py compares them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sam3_ray import masks
from sam3_ray.masks import BoolArray, Float32Array, upsample_masks

SMALL_SIDES = 128
"""Images whose sides add up to no more are given to ``upsample_masks``: torch has a kernel with another order
of operations for them (``_use_vectorized_kernel_cond_2d`` in its UpSampleKernel.cpp)."""


@dataclass(frozen=True)
class MaskColumns:
    """The columns of a mask between the first and the last that can have a pixel set.

    Attributes:
        columns: (n, H) bool, a column a row; left and right of them nothing is set.
        left: the first one's place in the mask.
        height, width: of the mask, in pixels.
    """

    columns: BoolArray
    left: int
    height: int
    width: int

    def whole(self) -> BoolArray:
        """The (H, W) mask."""
        mask = np.zeros((self.height, self.width), np.bool_)
        mask[:, self.left : self.left + len(self.columns)] = self.columns.T
        return mask

    def area(self) -> int:
        """Pixels that are set."""
        return int(np.count_nonzero(self.columns))

    def rle(self) -> dict[str, Any]:
        """What ``sam3_ray.masks.mask_to_rle`` gives for the whole mask."""
        from pycocotools import mask as coco

        size = [self.height, self.width]
        runs = {"size": size, "counts": self._runs().tolist()}
        counts: bytes = coco.frPyObjects(runs, self.height, self.width)["counts"]
        return {"size": size, "counts": counts.decode("ascii")}

    def _runs(self) -> npt.NDArray[np.int64]:
        """Lengths of the runs down the columns, clear and set in turns; the first is clear, maybe of none."""
        pixels = self.columns.reshape(-1)
        start = self.left * self.height
        total = self.height * self.width
        turns = [np.flatnonzero(pixels[1:] != pixels[:-1]) + (start + 1)]
        if len(pixels) and pixels[0]:
            turns.insert(0, np.array([start]))
        if len(pixels) and pixels[-1] and start + len(pixels) < total:
            turns.append(np.array([start + len(pixels)]))
        return np.diff(np.concatenate([[0], *turns, [total]]))


def mask_columns(logits: Float32Array, height: int, width: int) -> MaskColumns:
    """One mask at the image's size: the pixels that ``upsample_masks`` sets.

    Args:
        logits: (h, w) float32.
        height, width: the image's size in pixels.

    Raises:
        ValueError: another shape, or a size of 0.
    """
    if logits.ndim != 2:
        raise ValueError(f"the logits of one mask are (h, w), got shape {logits.shape}")
    if height < 1 or width < 1 or height + width <= SMALL_SIDES:
        return _columns_of(upsample_masks(logits[None], height, width)[0])
    nothing = MaskColumns(np.empty((0, height), np.bool_), 0, height, width)
    rows = np.flatnonzero((logits > 0).any(axis=1))
    if not len(rows):
        return nothing

    import torch

    def interpolated(values: torch.Tensor, size: int) -> torch.Tensor:
        return torch.nn.functional.interpolate(
            values[None], size, mode="linear", align_corners=False
        )[0]

    # A pixel lies between two rows of logits, so those beside the ones with something inside count too.
    top, end = max(int(rows[0]) - 1, 0), int(rows[-1]) + 2
    with torch.inference_mode():
        used = torch.from_numpy(np.require(logits[top:end], np.float32, ["C", "W"]))
        wide = interpolated(used, width)
        inside = np.flatnonzero((wide > 0).any(dim=0).numpy())
        if not len(inside):
            return nothing
        left, right = int(inside[0]), int(inside[-1]) + 1
        # Beyond the rows that are used nothing is above 0, so 0 does for all of them.
        upright = torch.zeros((right - left, len(logits)))
        upright[:, top:end] = wide[:, left:right].T
        columns = np.empty((right - left, height), np.bool_)
        out = torch.from_numpy(columns)
        step = max(1, masks.UPSAMPLE_CHUNK_BYTES // (4 * height))
        for start in range(0, right - left, step):
            some = interpolated(upright[start : start + step], height)
            torch.gt(some, 0, out=out[start : start + step])
    return MaskColumns(columns, left, height, width)


def _columns_of(mask: BoolArray) -> MaskColumns:
    height, width = mask.shape
    inside = np.flatnonzero(mask.any(axis=0))
    left, right = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
    return MaskColumns(np.ascontiguousarray(mask[:, left:right].T), left, height, width)
