"""The page at ``/``, driven in headless Chromium through the real service."""

import base64
import importlib.util
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Route, sync_playwright
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from scipy import ndimage

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PHONE = {"width": 375, "height": 740}
DESK = {"width": 1280, "height": 860}
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
FIRST_COLOUR = np.array([0x2F, 0x8C, 0xFF])
"""What the page paints its first phrase with."""


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    """``scripts/make_examples.py``, which knows where the shapes are."""
    spec = importlib.util.spec_from_file_location(
        "make_examples", ROOT / "scripts" / "make_examples.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.fail(
            "the page's tests need Chromium: install the system's `chromium` package (.ci/run does)"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@dataclass
class Visit:
    """The page in a window of its own, with what it asked for and complained about."""

    page: Page
    url: str
    requests: list[Request] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def predictions(self) -> list[Request]:
        return [request for request in self.requests if request.url.endswith("/predict")]

    def choose(self, title: str) -> None:
        self.page.get_by_title(title, exact=True).click()
        self.page.wait_for_selector(f"button[title='{title}'][aria-pressed=true]")

    def run(self, phrases: str) -> None:
        self.page.fill("#phrase", phrases)
        self.page.click("#run")
        self.page.wait_for_selector("#results:not([hidden])")
        self.settled()

    def settled(self) -> None:
        """Wait until no request is under way and the canvas shows as many instances as the list."""
        self.page.wait_for_function(
            """() => !document.body.classList.contains("busy") &&
               document.querySelector("#canvas").dataset.shown ===
                 String(document.querySelectorAll(".instance").length)"""
        )

    def pixels(self) -> np.ndarray:
        """(height, width, 3) of the canvas."""
        # Two frames: one in which the page draws what it has been told, one to be sure.
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        data = self.page.evaluate(
            "document.querySelector('#canvas').toDataURL('image/png').split(',')[1]"
        )
        return np.asarray(
            Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), dtype=np.int16
        )

    def point(self, x: float, y: float, width: int, height: int) -> tuple[float, float]:
        """Where a point of the picture is in the window."""
        box = self.page.locator("#canvas").bounding_box()
        assert box
        return box["x"] + x / width * box["width"], box["y"] + y / height * box["height"]


@pytest.fixture
def visit(
    browser: Browser, ray_url: str, service: httpx.Client, request: pytest.FixtureRequest
) -> Iterator[Visit]:
    """The page, opened. Whatever a test does: no error of a script, and nothing asked of anyone else."""
    options = {"viewport": DESK, "accept_downloads": True} | getattr(request, "param", {})
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(20_000)
    visit = Visit(page, ray_url)
    page.on("request", visit.requests.append)

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            visit.complaints.append(message.text)

    page.on("console", complain)
    page.on("pageerror", lambda error: visit.complaints.append(f"uncaught: {error}"))
    page.goto(f"{ray_url}/")
    page.wait_for_selector("#server[data-state=ready]")
    page.wait_for_selector(".example")
    yield visit
    elsewhere = [
        r.url for r in visit.requests if not r.url.startswith((f"{ray_url}/", "blob:", "data:"))
    ]
    # The browser itself writes a line for each answer that is an error.
    faults = [text for text in visit.complaints if not text.startswith("Failed to load resource")]
    context.close()
    assert elsewhere == []
    assert faults == []


def ask(service: httpx.Client, file: str, prompts: list[str], threshold: float) -> dict[str, Any]:
    """The service's own answer, by HTTP."""
    answer = service.post(
        "/predict",
        files={"image": (EXAMPLES / file).read_bytes()},
        data={
            "prompts": prompts,
            "threshold": str(threshold),
            "mask_format": "rle",
            "max_instances": "100",
        },
    )
    answer.raise_for_status()
    body: dict[str, Any] = answer.json()
    return body


def decoded(instances: list[dict[str, Any]]) -> list[np.ndarray]:
    return [coco_mask.decode(i["mask"]).astype(bool) for i in instances]


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


def test_a_file_that_is_no_image_gives_the_services_own_words(
    visit: Visit, service: httpx.Client
) -> None:
    data = b"just some text"
    visit.page.set_input_files(
        "#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": data}
    )
    problem = service.post("/predict", files={"image": data}).json()
    visit.page.wait_for_selector("#problem:not([hidden])")
    shown = visit.page.inner_text("#problem")
    assert problem["status"] == 415
    for words in (problem["title"], problem["detail"], "notes.txt", "HTTP 415"):
        assert words in shown
    assert visit.page.get_attribute("#problem", "role") == "alert"
    assert visit.page.get_attribute("#frame", "data-state") == "empty"
    visit.choose("Playground")  # and it goes on from there
    assert visit.page.is_hidden("#problem")
    visit.run("red circle")
    assert visit.page.locator(".instance").count() == 2


def test_a_picture_that_only_the_service_can_read(visit: Visit) -> None:
    file = io.BytesIO()
    Image.open(EXAMPLES / "playground.png").save(file, "TIFF")
    visit.page.set_input_files(
        "#file", {"name": "scan.tif", "mimeType": "image/tiff", "buffer": file.getvalue()}
    )
    visit.page.wait_for_selector("#frame[data-state=ready]")
    assert "cannot show" in visit.page.inner_text("#unseen")
    visit.run("red circle")
    assert visit.page.locator(".instance").count() == 2
    assert visit.predictions()[-1].post_data_json["image_digest"]


def test_the_picture_is_sent_once(visit: Visit) -> None:
    visit.choose("Playground")
    visit.run("red circle")
    visit.page.click("#run")
    visit.page.wait_for_function(
        "() => document.querySelector('#timing-total').textContent.includes('image cached')"
    )
    visit.settled()
    first, second = visit.predictions()
    assert first.headers["content-type"].startswith("multipart/form-data")
    assert second.headers["content-type"] == "application/json"
    assert set(second.post_data_json) == {
        "image_digest",
        "prompts",
        "threshold",
        "max_instances",
        "mask_format",
    }


def answering_first(
    status: int, problem_type: str, headers: dict[str, str] | None = None
) -> Callable[[Route], None]:
    """A handler that gives one error answer, then lets everything through to the service."""
    given: list[int] = []

    def handle(route: Route) -> None:
        if given:
            route.continue_()
            return
        given.append(status)
        body = {"type": problem_type, "title": "Not now", "status": status, "detail": "scripted"}
        route.fulfill(
            status=status,
            body=json.dumps(body),
            headers={"Content-Type": "application/problem+json"} | (headers or {}),
        )

    return handle


def test_a_picture_that_the_cache_has_lost_is_sent_again(visit: Visit) -> None:
    visit.choose("Playground")
    visit.run("red circle")
    visit.page.route("**/predict", answering_first(404, "image-not-cached"))
    visit.run("blue star")
    assert visit.page.locator(".group .phrase").all_inner_texts() == ["red circle", "blue star"]
    kinds = [request.headers["content-type"].split(";")[0] for request in visit.predictions()]
    assert kinds == ["multipart/form-data", "application/json", "multipart/form-data"]
    assert visit.page.is_hidden("#problem")


def test_a_busy_service_is_asked_again_when_it_says(visit: Visit) -> None:
    visit.page.route("**/predict", answering_first(503, "over-capacity", {"Retry-After": "1"}))
    visit.choose("Playground")
    visit.run("red circle")
    assert len(visit.predictions()) == 2
    assert visit.page.is_hidden("#problem")


def test_an_answer_for_another_picture_is_not_shown(visit: Visit) -> None:
    held: list[Route] = []
    visit.page.route("**/predict", held.append)
    visit.choose("Playground")
    visit.page.fill("#phrase", "red circle")
    with visit.page.expect_request("**/predict"):
        visit.page.click("#run")
    assert visit.page.inner_text("#run").startswith("Cancel")
    visit.choose("Parade")
    assert visit.page.inner_text("#run").startswith("Run")
    assert visit.page.is_hidden("#results")
    for route in held:
        route.abort()


@pytest.mark.parametrize("visit", [{"viewport": PHONE}], indirect=True)
def test_it_fits_a_phone(visit: Visit) -> None:
    def fits() -> None:
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        small = visit.page.eval_on_selector_all(
            "button, label.button",
            """all => all.filter(e => e.offsetParent && e.getBoundingClientRect().height < 27)
                         .map(e => e.outerHTML)""",
        )
        assert small == []

    fits()
    visit.choose("Parade")
    visit.run("blue ring, a rather long phrase about nothing in particular that is there")
    fits()
    visit.page.set_input_files(
        "#file-again",
        {"name": "n" * 120 + ".txt", "mimeType": "text/plain", "buffer": b"x" * 50},
    )
    visit.page.wait_for_selector("#problem:not([hidden])")
    fits()


def focused(page: Page) -> str:
    return str(
        page.evaluate(
            "() => { const e = document.activeElement; return e.id || e.title || e.className; }"
        )
    )


def tab_to(page: Page, wanted: str) -> None:
    for _ in range(40):
        if focused(page).startswith(wanted):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"the Tab key never reaches {wanted!r}")


def test_it_works_by_keyboard_alone(visit: Visit) -> None:
    page = visit.page
    page.keyboard.press("Tab")
    assert focused(page) == "skip"
    tab_to(page, "Playground")
    page.keyboard.press("Enter")
    page.wait_for_selector("#frame[data-state=ready]")
    tab_to(page, "phrase")
    page.keyboard.type("red circle")
    page.keyboard.press("Enter")
    assert page.locator(".chip").all_inner_texts() == ["red circle\n×"]
    page.keyboard.press("Enter")  # with an empty field it runs
    page.wait_for_selector(".instance")
    visit.settled()
    tab_to(page, "threshold")
    page.keyboard.press("Home")
    tab_to(page, "instance")
    first = page.locator(".instance").first.get_attribute("data-id")
    page.wait_for_selector(f"#canvas[data-active='{first}']")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.keyboard.press("ArrowDown")
    second = page.locator(".instance").nth(1).get_attribute("data-id")
    page.wait_for_selector(f"#canvas[data-active='{second}']")
    page.keyboard.press("Tab")  # the list is one stop
    assert focused(page) == "save-coco"


def test_everything_has_a_name_for_a_screen_reader(visit: Visit) -> None:
    visit.choose("Playground")
    visit.run("red circle")
    session = visit.page.context.new_cdp_session(visit.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "slider", "image", "img", "link"}
    named = [
        (n["role"]["value"], n.get("name", {}).get("value", "").strip())
        for n in nodes
        if not n.get("ignored") and n.get("role", {}).get("value") in roles
    ]
    assert [role for role, name in named if not name] == []
    assert ("slider", "Threshold") in named
    assert ("textbox", "What to find") in named
    assert any(name.startswith("red circle 1, score ") for _, name in named)
    canvas = visit.page.get_attribute("#canvas", "aria-label")
    assert canvas == "Picture playground.png: 2 red circle"
    assert visit.page.inner_text("#say") == "Found: 2 × red circle"


TEXTS = (
    *(
        "h1",
        ".lead",
        "#server-text",
        "#notice",
        ".help",
        ".suggestion",
        "#run",
        "#say",
        ".score",
        ".size",
    ),
    *(".none", ".timing dt", ".toggle", ".example span", ".chip span"),
)


def luminance(colour: str) -> float:
    channels = np.array([float(v) for v in colour[colour.index("(") + 1 : -1].split(",")[:3]]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


@pytest.mark.parametrize(
    "visit",
    [{"color_scheme": "light"}, {"color_scheme": "dark", "reduced_motion": "reduce"}],
    indirect=True,
    ids=["light", "dark"],
)
def test_its_text_is_legible_in_both_schemes(visit: Visit, request: pytest.FixtureRequest) -> None:
    visit.choose("Playground")
    visit.run("red circle, car")
    dark = "dark" in request.node.name
    for selector in TEXTS:
        ink, ground = visit.page.eval_on_selector(
            selector,
            """element => {
                 const plain = (colour) => { // color-mix() and the like, as the screen has it
                   const canvas = document.createElement("canvas");
                   const c = Object.assign(canvas, {width: 1, height: 1}).getContext("2d");
                   c.fillStyle = colour; c.fillRect(0, 0, 1, 1);
                   return "rgb(" + [...c.getImageData(0, 0, 1, 1).data].slice(0, 3).join(",") + ")";
                 };
                 let behind = element;
                 const ground = () => getComputedStyle(behind).backgroundColor;
                 while (ground() === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
                 return [plain(getComputedStyle(element).color), plain(ground())];
               }""",
        )
        bright, faint = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (bright + 0.05) / (faint + 0.05) >= 4.5, (selector, ink, ground)
    paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.1) == dark
    motion = visit.page.evaluate(
        """() => { document.body.classList.add("busy");
                   const bar = document.querySelector(".progress");
                   const name = getComputedStyle(bar, "::before").animationName;
                   document.body.classList.remove("busy"); return name; }"""
    )
    assert (motion == "none") == dark  # the dark visit also asks for less motion


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_a_picture_comes_by_drop_and_by_paste(visit: Visit, way: str) -> None:
    visit.page.evaluate(
        """async (way) => {
             const blob = await (await fetch("examples/first-aid.png")).blob();
             const data = new DataTransfer();
             data.items.add(new File([blob], "given.png", {type: "image/png"}));
             const event = way === "drop"
               ? new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true})
               : new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true});
             document.body.dispatchEvent(event);
           }""",
        way,
    )
    visit.page.wait_for_selector("#frame[data-state=ready]")
    assert visit.page.inner_text("#picture-name") == "given.png"
    assert visit.page.inner_text("#picture-size") == "600 × 600"


def test_phrases_are_separated_and_limited(visit: Visit, service: httpx.Client) -> None:
    most = service.get("/info").json()["max_prompts"]
    page = visit.page
    page.fill("#phrase", "red circle,  Blue   star , red circle,")
    assert page.locator(".chip span").all_inner_texts() == ["red circle", "Blue star"]
    page.locator("#phrase").press("Backspace")
    assert page.locator(".chip span").all_inner_texts() == ["red circle"]
    page.fill("#phrase", ",".join(f"phrase {n}" for n in range(most + 2)) + ",")
    assert page.locator(".chip").count() == most
    assert page.input_value("#phrase") != ""  # what does not fit is not thrown away


def masks_to_decode() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    masks = [np.zeros((5, 7), bool), np.ones((6, 3), bool), np.eye(9, dtype=bool)]
    masks += [rng.random((1, 11)) < 0.5, rng.random((13, 1)) < 0.5]
    masks += [rng.random(rng.integers(1, 40, 2)) < share for share in (0.02, 0.2, 0.5, 0.8, 0.98)]
    big = ndimage.gaussian_filter(rng.standard_normal((700, 1100)), 25) > 0
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
