"""The page's own mask decoder and outlines, against pycocotools and pixel by pixel."""

import numpy as np
from pycocotools import mask as coco_mask
from scipy import ndimage

from tests.serve.page.visit import Visit


def masks_to_decode() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    masks = [np.zeros((5, 7), bool), np.ones((6, 3), bool), np.eye(9, dtype=bool)]
    masks += [rng.random((1, 11)) < 0.5, rng.random((13, 1)) < 0.5]
    masks += [rng.random(rng.integers(1, 40, 2)) < share for share in (0.02, 0.2, 0.5, 0.8, 0.98)]
    big = ndimage.gaussian_filter(rng.standard_normal((240, 410)), 9) > 0
    return [*masks, big]


def test_its_masks_are_pycocotools_masks(visit: Visit) -> None:
    masks = masks_to_decode()
    rles = [coco_mask.encode(np.asfortranarray(mask.astype(np.uint8))) for mask in masks]
    found = visit.page.evaluate(
        """async (rles) => {
             const {decodeRle} = await import(new URL("static/rle.js", document.baseURI).href);
             return rles.map((rle) => { const m = decodeRle(rle); return {...m, data: Array.from(m.data)}; });
           }""",
        [{"size": r["size"], "counts": r["counts"].decode()} for r in rles],
    )
    for mask, crop in zip(masks, found, strict=True):
        whole = np.zeros_like(mask)
        data = np.array(crop["data"], dtype=bool).reshape(crop["height"], crop["width"])
        y, x = crop["y"], crop["x"]
        whole[y : y + crop["height"], x : x + crop["width"]] = data
        np.testing.assert_array_equal(whole, mask)


def test_its_outlines_hold_each_pixel_of_the_mask_and_no_other(visit: Visit) -> None:
    masks = masks_to_decode()[:-1]
    found = visit.page.evaluate(
        """async (masks) => {
             const {contours, pathOf} = await import(new URL("static/contour.js", document.baseURI).href);
             const context = document.createElement("canvas").getContext("2d");
             return masks.map(({width, height, data}) => {
               const path = pathOf(contours({x: 0, y: 0, width, height, data: Uint8Array.from(data)}));
               const holds = (x, y) => context.isPointInPath(path, x + 0.5, y + 0.5, "evenodd");
               return data.map((_, i) => holds(i % width, Math.floor(i / width)));
             });
           }""",
        [
            {"width": m.shape[1], "height": m.shape[0], "data": m.astype(int).ravel().tolist()}
            for m in masks
        ],
    )
    for mask, inside in zip(masks, found, strict=True):
        np.testing.assert_array_equal(np.array(inside).reshape(mask.shape), mask)


def test_a_broken_mask_is_refused(visit: Visit) -> None:
    messages = visit.page.evaluate(
        """async (rles) => {
             const {decodeRle} = await import(new URL("static/rle.js", document.baseURI).href);
             return rles.map((rle) => {
               try { decodeRle(rle); return ""; } catch (error) { return error.message; }
             });
           }""",
        [{"size": [4, 4], "counts": counts} for counts in ("4", "P", "~~~")],
    )
    assert "4 pixels" in messages[0]
    assert "middle of a number" in messages[1]
    assert "hold" in messages[2]
