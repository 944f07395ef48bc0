"""Masks against torch, pycocotools, Pillow and scipy, and round trips over random masks."""

import io
import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image, ImageDraw
from pycocotools import mask as coco
from scipy import ndimage

from sam3_ray import masks
from sam3_ray.masks import (
    mask_to_png,
    mask_to_polygon,
    mask_to_rle,
    png_to_mask,
    polygon_to_mask,
    rle_to_mask,
    upsample_masks,
)

FULL = np.ones((3, 3), bool)


def smooth(seed: int, height: int, width: int, sigma: float) -> np.ndarray:
    """Blobs, with holes and parts that run off the border, as a model's masks look."""
    noise = np.random.default_rng(seed).standard_normal((height, width))
    return ndimage.gaussian_filter(noise, sigma, mode="nearest") > 0


noisy_masks = arrays(np.bool_, array_shapes(min_dims=2, max_dims=2, max_side=24))
smooth_masks = st.builds(
    smooth,
    st.integers(0, 10**6),
    st.integers(1, 90),
    st.integers(1, 90),
    st.floats(1, 8),
)
any_masks = noisy_masks | smooth_masks


def outline_pixels(mask: np.ndarray) -> np.ndarray:
    """Pixels with a pixel of the other kind beside them; beyond the border nothing is set."""
    padded = np.pad(mask, 1)
    near = ndimage.binary_dilation(padded, FULL) & ndimage.binary_dilation(~padded, FULL)
    return near[1:-1, 1:-1]


# --- upsampling ---


@pytest.mark.parametrize("size", [(480, 640), (288, 288), (97, 31), (1080, 1920), (1, 1)])
def test_upsampling_equals_upstream(size: tuple[int, int]) -> None:
    logits = torch.randn(5, 72, 72, generator=torch.Generator().manual_seed(0)) * 8
    upsampled = torch.nn.functional.interpolate(
        logits[:, None], size, mode="bilinear", align_corners=False
    )
    upstream = (upsampled.sigmoid() > 0.5)[:, 0].numpy()
    ours = upsample_masks(logits.numpy(), *size)
    assert ours.dtype == np.bool_
    assert ours.shape == (5, *size)
    # sigmoid rounds a positive logit this small to 0.5
    certain = (upsampled.abs() > 1e-6)[:, 0].numpy()
    np.testing.assert_array_equal(ours[certain], upstream[certain])
    assert certain.mean() > 0.9999


def test_upsampling_in_chunks_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(0).standard_normal((7, 40, 40)).astype(np.float32)
    whole = upsample_masks(logits, 100, 130)
    largest = []
    real = torch.nn.functional.interpolate
    monkeypatch.setattr(
        torch.nn.functional,
        "interpolate",
        lambda chunk, *args, **kwargs: largest.append(len(chunk)) or real(chunk, *args, **kwargs),
    )
    for budget, chunks in ((1, [1] * 7), (4 * 100 * 130 * 3, [3, 3, 1])):
        largest.clear()
        monkeypatch.setattr(masks, "UPSAMPLE_CHUNK_BYTES", budget)
        np.testing.assert_array_equal(upsample_masks(logits, 100, 130), whole)
        assert largest == chunks


def test_a_logit_of_zero_is_outside() -> None:
    assert not upsample_masks(np.zeros((1, 4, 4), np.float32), 9, 9).any()


def test_nothing_to_upsample() -> None:
    assert upsample_masks(np.empty((0, 288, 288), np.float32), 30, 40).shape == (0, 30, 40)


def test_logits_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\(n, h, w\)"):
        upsample_masks(np.zeros((4, 4), np.float32), 9, 9)
    with pytest.raises(ValueError, match="0 x 9"):
        upsample_masks(np.zeros((1, 4, 4), np.float32), 0, 9)


def test_read_only_logits() -> None:
    logits = np.ones((1, 4, 4), np.float32)
    logits.flags.writeable = False
    assert upsample_masks(logits, 5, 6).all()


# --- RLE and PNG ---


@given(any_masks)
@settings(max_examples=150, deadline=None)
def test_rle_is_pycocotools(mask: np.ndarray) -> None:
    rle = json.loads(json.dumps(mask_to_rle(mask)))
    assert rle["size"] == list(mask.shape)
    np.testing.assert_array_equal(coco.decode(rle).astype(bool), mask)
    assert coco.area(rle) == mask.sum()
    np.testing.assert_array_equal(rle_to_mask(rle), mask)
    np.testing.assert_array_equal(rle_to_mask({**rle, "counts": rle["counts"].encode()}), mask)


@given(any_masks)
@settings(max_examples=100, deadline=None)
def test_png_is_one_bit_and_pillow_reads_it(mask: np.ndarray) -> None:
    data = mask_to_png(mask)
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "PNG"
        assert image.mode == "1"
        np.testing.assert_array_equal(np.asarray(image), mask)
    np.testing.assert_array_equal(png_to_mask(data), mask)


def test_a_grey_png_is_a_mask_too() -> None:
    mask = smooth(3, 20, 30, 3)
    buffer = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8) * 255).save(buffer, "PNG")
    np.testing.assert_array_equal(png_to_mask(buffer.getvalue()), mask)


def test_a_mask_of_zeros_and_ones_is_taken() -> None:
    mask = smooth(3, 20, 30, 3)
    assert mask_to_rle(mask.astype(np.uint8)) == mask_to_rle(mask)


@pytest.mark.parametrize("convert", [mask_to_rle, mask_to_png, mask_to_polygon])
@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 3, 4), bool),
        np.zeros((0, 4), bool),
        np.full((2, 2), 255, np.uint8),
        np.ones((2, 2)),
    ],
)
def test_what_is_no_mask(convert, wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match="a mask"):
        convert(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"size": [3, 4]},
        {"size": [3], "counts": "0"},
        {"size": [3, -4], "counts": "0"},
        {"size": [3, 4], "counts": [1, 2]},
        {"size": [3, 4], "counts": "04000000000000"},
    ],
)
def test_what_is_no_rle(wrong: dict) -> None:
    with pytest.raises(ValueError, match="RLE"):
        rle_to_mask(wrong)


# --- polygons ---


@given(any_masks)
@settings(max_examples=300, deadline=None)
@example(np.zeros((4, 5), bool))
@example(np.ones((4, 5), bool))
@example(np.ones((1, 1), bool))
@example(np.eye(6, dtype=bool))
@example(np.eye(6, dtype=bool)[::-1])
@example(np.indices((7, 7)).sum(0) % 2 == 0)
@example(np.pad(np.zeros((3, 3), bool), 1, constant_values=True))
def test_an_exact_polygon_gives_the_mask_back(mask: np.ndarray) -> None:
    rings = mask_to_polygon(mask, tolerance=0)
    np.testing.assert_array_equal(polygon_to_mask(rings, *mask.shape), mask)


@given(any_masks)
@settings(max_examples=300, deadline=None)
@example(np.eye(6, dtype=bool))
def test_a_polygon_agrees_but_for_pixels_on_the_outline(mask: np.ndarray) -> None:
    rings = json.loads(json.dumps(mask_to_polygon(mask)))
    height, width = mask.shape
    for ring in rings:
        assert len(ring) >= 6
        assert len(ring) % 2 == 0
        assert ring[:2] != ring[-2:]
        assert min(ring) >= 0
        assert max(ring[0::2]) <= width
        assert max(ring[1::2]) <= height
    different = polygon_to_mask(rings, height, width) != mask
    assert not (different & ~outline_pixels(mask)).any()


@pytest.mark.parametrize("seed", range(8))
def test_a_polygon_of_a_models_mask_is_short_and_close(seed: int) -> None:
    mask = smooth(seed, 480, 640, 25)
    rings = mask_to_polygon(mask)
    filled = polygon_to_mask(rings, 480, 640)
    assert (filled & mask).sum() / (filled | mask).sum() > 0.995
    exact = mask_to_polygon(mask, tolerance=0)
    assert sum(map(len, rings)) < sum(map(len, exact)) / 3.5


def test_an_empty_mask_has_no_rings() -> None:
    assert mask_to_polygon(np.zeros((5, 6), bool)) == []
    assert not polygon_to_mask([], 5, 6).any()


def test_a_hole_is_a_ring() -> None:
    mask = np.zeros((40, 40), bool)
    mask[5:35, 5:35] = True
    mask[15:25, 15:25] = False
    assert len(mask_to_polygon(mask)) == 2


def test_pixels_that_touch_by_a_corner_are_rings_of_their_own() -> None:
    assert len(mask_to_polygon(np.eye(5, dtype=bool))) == 5


def test_coordinates_are_those_of_boxes() -> None:
    mask = np.zeros((30, 50), bool)
    mask[10:20, 30:50] = True
    (ring,) = mask_to_polygon(mask)
    assert (min(ring[0::2]), min(ring[1::2]), max(ring[0::2]), max(ring[1::2])) == (30, 10, 50, 20)


@pytest.mark.parametrize("seed", range(5))
def test_filling_agrees_with_pillow_and_with_pycocotools(seed: int) -> None:
    """Both round corners to pixels in their own ways; two pixels off the outline all three agree."""
    mask = ndimage.binary_fill_holes(smooth(seed, 120, 160, 9))
    rings = mask_to_polygon(mask)
    ours = polygon_to_mask(rings, 120, 160)
    pillow = np.zeros((120, 160), bool)
    for ring in rings:
        one = Image.new("1", (160, 120))
        ImageDraw.Draw(one).polygon([value - 0.5 for value in ring], fill=1)
        pillow ^= np.asarray(one)
    theirs = coco.decode(coco.merge(coco.frPyObjects(rings, 120, 160))).astype(bool)
    inner = ~ndimage.binary_dilation(outline_pixels(mask), FULL)
    np.testing.assert_array_equal(ours[inner], pillow[inner])
    np.testing.assert_array_equal(ours[inner], theirs[inner])


def test_a_square_is_filled_by_pixel_centres() -> None:
    square = [1.5, 1.5, 4.5, 1.5, 4.5, 3.5, 1.5, 3.5]
    expected = np.zeros((6, 6), bool)
    expected[1:3, 1:4] = True  # a centre on the left or top side is in, on the right or bottom not
    np.testing.assert_array_equal(polygon_to_mask([square], 6, 6), expected)
    closed = [*square, *square[:2]]
    np.testing.assert_array_equal(polygon_to_mask([closed], 6, 6), expected)


def test_what_lies_beyond_the_border_is_cut() -> None:
    assert polygon_to_mask([[-10, -10, 30, -10, 30, 30, -10, 30]], 6, 7).all()
    assert not polygon_to_mask([[20, 0, 30, 0, 30, 30]], 6, 7).any()


@pytest.mark.parametrize(
    "ring", [[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, float("nan")]]
)
def test_what_is_no_ring(ring: list) -> None:
    with pytest.raises(ValueError, match="ring 0"):
        polygon_to_mask([ring], 5, 5)
