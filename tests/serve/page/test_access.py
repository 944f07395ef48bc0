"""For everyone: a phone, the keyboard alone, a screen reader, light and dark, less motion."""

import numpy as np
import pytest
from playwright.sync_api import Page

from tests.serve.page.visit import Visit

PHONE = {"width": 375, "height": 740}


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
