"""What the page shows of an answer: overlay, list, threshold, files to take away."""

import json
from pathlib import Path
from types import ModuleType

import httpx
import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from scipy import ndimage

from tests.serve.page.visit import EXAMPLES, Visit, ask, decoded

FIRST_COLOUR = np.array([0x2F, 0x8C, 0xFF])
"""What the page paints its first phrase with."""


def test_it_loads_with_nothing_wrong_and_says_what_serves(
    visit: Visit, service: httpx.Client
) -> None:
    assert visit.complaints == []
    assert visit.page.inner_text("#server-text") == "demo checkpoint · CPU"
    assert "knows coloured shapes only" in visit.page.inner_text("#notice")
    assert visit.page.locator(".example").count() == len(
        json.loads((EXAMPLES / "examples.json").read_text())
    )
    visit.page.wait_for_function(
        "() => [...document.querySelectorAll('.example img')].every(i => i.complete && i.naturalWidth > 0)"
    )
    assert visit.page.is_disabled("#run")


def test_the_overlay_colours_what_was_found_and_nothing_else(
    visit: Visit, service: httpx.Client, drawing: ModuleType
) -> None:
    _, truth = drawing.draw_shapes(drawing.example("playground").source)
    shapes = drawing.example("playground").source.shapes
    visit.choose("Playground")
    visit.page.click("[data-view=scores]")  # the labels would lie on the picture
    before = visit.pixels()
    visit.run("red circle")
    after = visit.pixels()
    assert before.shape == after.shape
    zoom = before.shape[1] / truth.shape[2]

    for shape in shapes:
        at = (int(shape.y * zoom), int(shape.x * zoom))
        if (shape.colour, shape.kind) == ("red", "circle"):
            np.testing.assert_allclose(
                after[at], before[at] + 0.46 * (FIRST_COLOUR - before[at]), atol=3
            )
        else:
            np.testing.assert_array_equal(after[at], before[at])

    # Every pixel, against pycocotools' reading of what the service sends.
    (result,) = ask(service, "playground.png", ["red circle"], 0.5)["results"]
    mask = np.any(decoded(result["instances"]), axis=0)
    size = (before.shape[1], before.shape[0])
    mask = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST))
    changed = (after != before).any(2)
    assert changed[ndimage.binary_erosion(mask, iterations=4)].all()
    assert not changed[~ndimage.binary_dilation(mask, iterations=4)].any()


def test_the_list_says_what_the_service_says(visit: Visit, service: httpx.Client) -> None:
    visit.choose("Playground")
    visit.run("red circle, square, car")
    results = ask(service, "playground.png", ["red circle", "square", "car"], 0.5)["results"]
    assert visit.page.locator(".group .phrase").all_inner_texts() == ["red circle", "square", "car"]
    assert visit.page.locator(".group .count").all_inner_texts() == [
        str(len(r["instances"])) for r in results
    ]
    scores = [f"{i['score']:.2f}" for r in results for i in r["instances"]]
    assert visit.page.locator(".instance .score").all_inner_texts() == scores
    assert len(scores) >= 3
    assert "ms" in visit.page.inner_text("#timing-total")
    # Two phrases, two colours; taking a phrase away takes its instances away.
    colours = visit.page.eval_on_selector_all(
        ".swatch", "all => all.map(e => getComputedStyle(e).backgroundColor)"
    )
    assert len(set(colours)) == 3
    visit.page.get_by_label("Remove red circle").click()
    assert visit.page.locator(".group .phrase").all_inner_texts() == ["square", "car"]
    assert len(visit.predictions()) == 1


def test_the_threshold_filters_without_a_request(visit: Visit, service: httpx.Client) -> None:
    visit.choose("Small change")
    visit.run("yellow circle, circle")
    asked = len(visit.requests)
    results = ask(service, "small-change.png", ["yellow circle", "circle"], 0.05)["results"]
    scores = [i["score"] for r in results for i in r["instances"]]
    slider = visit.page.locator("#threshold")
    assert slider.input_value() == "0.5"
    slider.focus()
    counts = set()
    for key in ("Home", "End", "PageDown", "PageDown", "PageDown", "ArrowLeft"):
        visit.page.keyboard.press(key)
        visit.settled()
        threshold = float(slider.input_value())
        assert visit.page.inner_text("#threshold-value") == f"{threshold:.2f}"
        assert visit.page.locator(".instance").count() == sum(s > threshold for s in scores)
        counts.add(visit.page.locator(".instance").count())
    assert len(counts) > 1
    assert len(visit.requests) == asked


def test_pointing_at_one_shows_it_in_the_other(visit: Visit, drawing: ModuleType) -> None:
    example = drawing.example("playground").source
    circles = [s for s in example.shapes if (s.colour, s.kind) == ("red", "circle")]
    visit.choose("Playground")
    visit.run("red circle")
    page, canvas = visit.page, visit.page.locator("#canvas")
    calm = visit.pixels()
    rows = page.locator(".instance")
    assert rows.count() == 2
    seen = set()
    for circle in circles:  # from the picture to the list
        page.mouse.move(*visit.point(circle.x, circle.y, example.width, example.height))
        page.wait_for_selector(".instance.active")
        assert page.locator(".instance.active").count() == 1
        seen.add(page.locator(".instance.active").get_attribute("data-id"))
    assert len(seen) == 2
    page.mouse.move(*visit.point(5, 5, example.width, example.height))
    page.wait_for_selector(".instance.active", state="detached")

    for n in range(2):  # from the list to the picture
        row = rows.nth(n)
        row.hover()
        page.wait_for_selector(f"#canvas[data-active='{row.get_attribute('data-id')}']")
    zoom = calm.shape[1] / example.width
    shown = visit.pixels()
    strength = [
        np.abs(shown[int(c.y * zoom), int(c.x * zoom)] - np.array(drawing.COLOURS["red"])).sum()
        for c in circles
    ]
    assert max(strength) > 2 * min(strength)  # the one stands out, the other steps back

    rows.nth(0).click()  # a click keeps it
    page.mouse.move(2, 2)
    assert rows.nth(0).get_attribute("aria-pressed") == "true"
    assert canvas.get_attribute("data-active") == rows.nth(0).get_attribute("data-id")
    page.keyboard.press("Escape")
    assert rows.nth(0).get_attribute("aria-pressed") == "false"


def test_the_coco_file_is_what_is_shown(
    visit: Visit, service: httpx.Client, tmp_path: Path
) -> None:
    visit.choose("Parade")
    visit.run("blue ring, orange triangle, car")
    with visit.page.expect_download() as download:
        visit.page.click("#save-coco")
    path = tmp_path / download.value.suggested_filename
    assert path.name == "parade-coco.json"
    download.value.save_as(path)
    coco = COCO(str(path))
    image = coco.loadImgs(coco.getImgIds())[0]
    assert (image["file_name"], image["width"], image["height"]) == ("parade.png", 960, 600)
    categories = {c["id"]: c["name"] for c in coco.loadCats(coco.getCatIds())}
    assert list(categories.values()) == ["blue ring", "orange triangle", "car"]
    results = ask(service, "parade.png", list(categories.values()), 0.5)["results"]
    annotations = coco.loadAnns(coco.getAnnIds())
    assert len(annotations) == sum(len(r["instances"]) for r in results) > 1
    pairs = [(r["prompt"], i) for r in results for i in r["instances"]]
    for annotation, (phrase, instance) in zip(annotations, pairs, strict=True):
        mask = coco.annToMask(annotation).astype(bool)
        np.testing.assert_array_equal(mask, coco_mask.decode(instance["mask"]).astype(bool))
        assert categories[annotation["category_id"]] == phrase
        assert annotation["score"] == instance["score"]
        assert annotation["area"] == mask.sum()
        x0, y0, x1, y1 = instance["box_xyxy"]
        assert annotation["bbox"] == pytest.approx([x0, y0, x1 - x0, y1 - y0], abs=0.011)


def test_the_picture_can_be_saved(visit: Visit, tmp_path: Path) -> None:
    visit.choose("First aid")
    visit.run("red cross")
    with visit.page.expect_download() as download:
        visit.page.click("#save-picture")
    download.value.save_as(tmp_path / "saved.png")
    saved = np.asarray(Image.open(tmp_path / "saved.png").convert("RGB"), dtype=np.int16)
    np.testing.assert_array_equal(saved, visit.pixels())
