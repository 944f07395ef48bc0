"""How the page asks: pictures and phrases given to it, requests, error answers."""

import io
import json
from collections.abc import Callable

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Route

from tests.serve.page.visit import EXAMPLES, Visit


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
    visit.page.route("**/predict", lambda route: held.append(route))
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
    most = service.get("/info").json()["limits"]["max_prompts"]
    page = visit.page
    page.fill("#phrase", "red circle,  Blue   star , red circle,")
    assert page.locator(".chip span").all_inner_texts() == ["red circle", "Blue star"]
    page.locator("#phrase").press("Backspace")
    assert page.locator(".chip span").all_inner_texts() == ["red circle"]
    page.fill("#phrase", ",".join(f"phrase {n}" for n in range(most + 2)) + ",")
    assert page.locator(".chip").count() == most
    assert page.input_value("#phrase") != ""  # what does not fit is not thrown away


LISTING = {
    example["title"]: example for example in json.loads((EXAMPLES / "examples.json").read_text())
}


def test_an_example_suggests_phrases(visit: Visit) -> None:
    page = visit.page
    visit.choose("Small change")
    page.fill("#phrase", "anything,")
    assert page.locator(".suggestion").all_inner_texts() == LISTING["Small change"]["prompts"]
    page.get_by_label("Add orange circle").click()
    assert page.locator(".chip span").all_inner_texts() == ["anything", "orange circle"]
    assert page.get_by_label("Add orange circle").count() == 0
    visit.choose("Parade")  # what was typed stays
    assert page.locator(".chip span").all_inner_texts() == ["anything"]
    assert page.locator(".suggestion").all_inner_texts() == LISTING["Parade"]["prompts"]
    assert page.is_hidden("#suggestions-help")


def test_with_no_room_for_a_suggestion_the_page_says_why(
    visit: Visit, service: httpx.Client
) -> None:
    page = visit.page
    most = service.get("/info").json()["limits"]["max_prompts"]
    page.fill("#phrase", ",".join(f"phrase {n}" for n in range(most)) + ",")
    visit.choose("Playground")
    suggestions = page.locator(".suggestion")
    assert suggestions.all_inner_texts() == LISTING["Playground"]["prompts"]
    assert [suggestions.nth(n).is_disabled() for n in range(suggestions.count())] == [True] * 4
    assert f"{most} phrases at most" in page.inner_text("#suggestions-help")
    page.get_by_label("Remove phrase 0").click()
    assert page.is_hidden("#suggestions-help")
    page.get_by_label("Add blue star").click()
    assert page.locator(".chip span").all_inner_texts()[-1] == "blue star"
    assert page.evaluate("document.activeElement.id") == "run"  # the others are disabled again


def of_kind(kind: str) -> list[str]:
    return [title for title, example in LISTING.items() if example["kind"] == kind]


def test_the_demo_checkpoint_offers_no_phrases_for_what_it_cannot_know(visit: Visit) -> None:
    page = visit.page
    assert page.locator("#examples .example").all_inner_texts() == of_kind("shapes")
    assert page.locator("#photos .example").all_inner_texts() == of_kind("photo")
    assert page.inner_text("#photos-title") == "For SAM3’s own weights"
    visit.choose("Sails")
    assert page.is_hidden("#suggestions")
    assert "SAM3’s own weights" in page.inner_text("#suggestions-help")
    visit.choose("Parade")
    assert page.locator(".suggestion").count() == 4
    assert page.is_hidden("#suggestions-help")


def test_the_full_model_is_offered_every_picture(visit: Visit, service: httpx.Client) -> None:
    page = visit.page
    info = service.get("/info").json() | {"checkpoint": "facebook/sam3@3c879f39"}
    page.route("**/info", lambda route: route.fulfill(json=info))
    page.reload()
    page.wait_for_selector("#server[data-state=ready]")
    page.wait_for_selector("#photos .example")
    assert page.is_hidden("#notice")
    assert page.inner_text("#photos-title") == "Photo-like"
    visit.choose("Sails")
    assert page.locator(".suggestion").all_inner_texts() == LISTING["Sails"]["prompts"]
    assert page.is_hidden("#suggestions-help")
