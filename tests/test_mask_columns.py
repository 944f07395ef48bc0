"""Masks made by their columns are those made whole, bit for bit, and so are their RLEs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import ndimage

from sam3_ray import masks
from sam3_ray.mask_columns import SMALL_SIDES, mask_columns
from sam3_ray.masks import mask_to_rle, upsample_masks

KINDS = ("noise", "blobs", "whole numbers", "one pixel", "positive", "negative", "zero")


def logits_of(kind: str, seed: int, height: int, width: int) -> np.ndarray:
    """Logits with much or little inside; whole numbers meet at exactly 0 in many places."""
    draw = np.random.default_rng(seed)
    noise = draw.standard_normal((height, width)).astype(np.float32) * 8
    if kind == "blobs":
        return ndimage.gaussian_filter(noise, 3, mode="nearest")
    if kind == "whole numbers":
        return np.round(noise / 8)
    if kind == "one pixel":
        alone = -np.abs(noise) - 1
        alone[draw.integers(height), draw.integers(width)] = 9
        return alone
    if kind == "zero":
        return np.zeros_like(noise)
    return np.abs(noise) + 1 if kind == "positive" else noise if kind == "noise" else -np.abs(noise)


def check(logits: np.ndarray, height: int, width: int) -> None:
    whole = upsample_masks(logits[None], height, width)[0]
    found = mask_columns(logits, height, width)
    np.testing.assert_array_equal(found.whole(), whole)
    assert found.area() == np.count_nonzero(whole)
    assert found.rle() == mask_to_rle(whole)
    assert found.columns.shape[1] == height


small, large = st.integers(1, 80), st.integers(1, 400)


@given(st.sampled_from(KINDS), st.integers(0, 10**6), small, small, large, large)
@example("noise", 0, 288, 288, 720, 1280)
@example("whole numbers", 0, 288, 288, 1080, 1920)
@example("blobs", 1, 288, 288, 97, 33)  # fewer pixels than logits
@example("blobs", 1, 288, 288, 1, 1)
@example("noise", 2, 1, 1, 300, 200)
@example("noise", 3, 1, 60, 1, 400)
@example("noise", 3, 60, 1, 400, 1)
@example("whole numbers", 4, 30, 40, 64, 64)  # where torch's kernel changes
@example("whole numbers", 4, 30, 40, 64, 65)
@settings(max_examples=600, deadline=None)
def test_columns_are_the_whole_mask(
    kind: str, seed: int, rows: int, columns: int, height: int, width: int
) -> None:
    check(logits_of(kind, seed, rows, columns), height, width)


@pytest.mark.parametrize("size", [(300, 401), (31, 97), (720, 1280), (20, 20)])
@pytest.mark.parametrize("edges", ["top", "bottom", "left", "right", "top left", "bottom right"])
def test_masks_at_the_edges(edges: str, size: tuple[int, int]) -> None:
    for thickness in (1, 2, 9):
        logits = -np.abs(logits_of("noise", thickness, 72, 72)) - 1
        inside = logits.copy()
        if "top" in edges:
            inside[:thickness] = 3
        if "bottom" in edges:
            inside[-thickness:] = 3
        if "left" in edges:
            inside[:, :thickness] = 3
        if "right" in edges:
            inside[:, -thickness:] = 3
        check(inside, *size)


def test_a_mask_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "UPSAMPLE_CHUNK_BYTES", 4 * 200 * 7)  # of 7 columns
    check(logits_of("blobs", 5, 72, 72), 200, 150)


def test_values_that_are_not_finite() -> None:
    logits = logits_of("blobs", 6, 40, 40)
    logits[3, 4], logits[20, 20], logits[30, 31] = np.inf, -np.inf, np.nan
    check(logits, 200, 150)


def test_read_only_logits() -> None:
    logits = logits_of("blobs", 7, 40, 40)
    logits.flags.writeable = False
    check(logits, SMALL_SIDES, 30)


def test_logits_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(h, w\), got shape \(1, 4, 4\)"):
        mask_columns(np.zeros((1, 4, 4), np.float32), 9, 9)
    with pytest.raises(ValueError, match="0 x 900"):
        mask_columns(np.zeros((4, 4), np.float32), 0, 900)
