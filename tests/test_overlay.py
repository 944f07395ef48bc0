"""The overlay's pixels: colour where the masks are, the picture elsewhere, labels that can be read."""

import colorsys
import itertools
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageColor

from sam3_ray.overlay import PALETTE, TINT, draw_overlay
from sam3_ray.result import Sam3Result


def picture(height: int = 300, width: int = 400) -> np.ndarray:
    return np.random.default_rng(0).integers(90, 110, (height, width, 3), dtype=np.uint8)


def found(
    boxes: list[list[int]], prompt: str = "car", size: tuple[int, int] = (300, 400)
) -> Sam3Result:
    masks = np.zeros((len(boxes), *size), bool)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
        mask[y0:y1, x0:x1] = True
    return Sam3Result(
        prompt,
        np.linspace(0.97, 0.6, len(boxes), dtype=np.float32),
        np.array(boxes, np.float32).reshape(-1, 4),
        masks,
        0.99,
        size[1],
        size[0],
    )


TWO = [[40, 60, 160, 200], [220, 100, 380, 280]]


def tinted(pixel: np.ndarray, color: str) -> np.ndarray:
    return np.rint(pixel + (np.array(ImageColor.getrgb(color)) - pixel.astype(float)) * TINT)


def test_inside_is_tinted_and_outside_is_the_picture() -> None:
    pixels = picture()
    drawn = found(TWO).overlay(pixels)
    assert isinstance(drawn, Image.Image)
    assert drawn.mode == "RGB"
    assert drawn.size == (400, 300)
    overlaid = np.asarray(drawn)
    for (x0, y0, x1, y1), color in zip(TWO, PALETTE, strict=False):
        middle = slice(y0 + 30, y1 - 10), slice(x0 + 10, x1 - 10)
        np.testing.assert_array_equal(overlaid[middle], tinted(pixels[middle], color))
    changed = (overlaid != pixels).any(axis=2)
    away = np.ones(changed.shape, bool)
    for x0, y0, x1, y1 in TWO:
        away[max(0, y0 - 30) : y1 + 30, max(0, x0 - 60) : x1 + 60] = False
    assert away.any()
    assert not changed[away].any()


def test_the_picture_given_stays_as_it_is() -> None:
    pixels = picture()
    found(TWO).overlay(pixels)
    np.testing.assert_array_equal(pixels, picture())


def test_an_outline_and_a_box_in_the_instances_colour() -> None:
    round_mask = found([[100, 60, 300, 240]])
    rows, columns = np.mgrid[:300, :400]
    disc = ((rows + 0.5 - 150) / 90) ** 2 + ((columns + 0.5 - 200) / 100) ** 2 <= 1
    overlaid = np.asarray(replace(round_mask, masks=disc[None]).overlay(picture()))
    red = np.array(ImageColor.getrgb(PALETTE[0]))
    assert np.abs(overlaid[150, 100].astype(int) - red).max() < 60  # the disc's leftmost point
    assert (
        np.abs(overlaid[238:240, 105].astype(int) - red).max(axis=1).min() == 0
    )  # the box, off the disc
    inside = overlaid[150, 150]
    np.testing.assert_array_equal(inside, tinted(picture()[150, 150], PALETTE[0]))


def test_several_results_are_coloured_by_phrase() -> None:
    pixels = picture()
    results = [found(TWO, "car"), found([[170, 20, 210, 60]], "person")]
    overlaid = np.asarray(draw_overlay(pixels, results))
    for x0, y0, x1, y1 in TWO:
        at = (y0 + y1) // 2, (x0 + x1) // 2
        np.testing.assert_array_equal(overlaid[at], tinted(pixels[at], PALETTE[0]))
    np.testing.assert_array_equal(overlaid[50, 190], tinted(pixels[50, 190], PALETTE[1]))


@pytest.mark.parametrize("color", ["#00ff00", "lime", (0, 255, 0)])
def test_a_colour_of_ones_own(color: str | tuple[int, int, int]) -> None:
    overlaid = np.asarray(found(TWO).overlay(picture(), color=color))
    for x0, y0, x1, y1 in TWO:
        at = (y0 + y1) // 2, (x0 + x1) // 2
        np.testing.assert_array_equal(overlaid[at], tinted(picture()[at], "#00ff00"))


def test_wrong_colours_and_sizes_are_told() -> None:
    with pytest.raises(ValueError, match="unknown color"):
        found(TWO).overlay(picture(), color="no such colour")
    with pytest.raises(ValueError, match="1 colours for 2 results"):
        draw_overlay(picture(), [found(TWO), found(TWO)], colors=["red"])
    with pytest.raises(
        ValueError, match=r"'car' is of an image of 400 x 300 pixels, this one has 300 x 400"
    ):
        found(TWO).overlay(picture(400, 300))


def test_without_masks_boxes_and_labels_are_drawn() -> None:
    result = found(TWO)
    boxes_only = Sam3Result("car", result.scores, result.boxes, None, 0.9, 400, 300)
    overlaid = np.asarray(boxes_only.overlay(picture()))
    np.testing.assert_array_equal(overlaid[60, 150], ImageColor.getrgb(PALETTE[0]))
    np.testing.assert_array_equal(overlaid[130, 100], picture()[130, 100])


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (24, 24), (72, 96), (224, 224), (1080, 1920)])
def test_any_size_of_picture(size: tuple[int, int]) -> None:
    height, width = size
    box = [0, 0, width, height]
    small = [
        width // 3,
        height // 3,
        max(width // 2, width // 3 + 1),
        max(height // 2, height // 3 + 1),
    ]
    drawn = found([box, small], "a red double-decker bus", size).overlay(picture(height, width))
    assert drawn.size == (width, height)


@pytest.mark.parametrize("size", [(100, 140), (300, 400), (1080, 1920)])
def test_a_label_has_text_that_stands_out(size: tuple[int, int]) -> None:
    height, width = size
    box = [width // 4, height // 2, width * 3 // 4, height - 5]
    for color in PALETTE if height < 1000 else PALETTE[:2]:
        overlaid = np.asarray(
            found([box], size=size).overlay(np.full((*size, 3), 128, np.uint8), color)
        )
        above = overlaid[: height // 2 - 1]  # where only the label is
        plate = above[(np.abs(above.astype(int) - 128) > 12).any(axis=2)]
        assert len(plate) > 60
        light = plate.astype(float) @ (0.299, 0.587, 0.114)
        assert light.max() - light.min() > 80


def test_labels_keep_off_each_other_where_there_is_room() -> None:
    boxes = [[100, 100, 200, 200], [105, 102, 205, 202]]
    overlaid = np.asarray(found(boxes).overlay(np.full((300, 400, 3), 128, np.uint8)))
    for color in PALETTE[:2]:
        near = np.abs(overlaid.astype(int) - ImageColor.getrgb(color)).max(axis=2) <= 12
        rows = near.sum(axis=1)
        assert rows.max() > 35  # a whole plate of each colour is in sight


def test_a_crowd_is_drawn_too() -> None:
    boxes = [[10 * i, 12 * j, 10 * i + 8, 12 * j + 9] for i in range(10) for j in range(20)]
    assert found(boxes).overlay(picture()).size == (400, 300)


def test_an_empty_mask_is_drawn_as_its_box() -> None:
    result = found([[50, 100, 90, 160]])
    assert result.masks is not None
    overlaid = np.asarray(replace(result, masks=np.zeros_like(result.masks)).overlay(picture()))
    np.testing.assert_array_equal(overlaid[150, 50], ImageColor.getrgb(PALETTE[0]))


def test_the_palettes_colours_are_distinct() -> None:
    rgb = np.array([ImageColor.getrgb(color) for color in PALETTE])
    assert len(set(PALETTE)) == len(PALETTE)
    distance = np.abs(rgb[:, None] - rgb[None]).sum(axis=2) + 1000 * np.eye(len(rgb), dtype=int)
    assert distance.min() >= 60
    hues = [colorsys.rgb_to_hsv(*(color / 255))[0] for color in rgb]
    for one, other in itertools.pairwise(hues):
        assert min(abs(one - other), 1 - abs(one - other)) > 0.05  # neighbours in the palette
