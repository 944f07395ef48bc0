"""Routes, problems, headers and the API's description, without Ray."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from sam3_ray.serve.errors import ProblemType
from sam3_ray.serve.routes import http_app
from sam3_ray.serve.schemas import Options, PredictBody
from tests.serve.fakes import LIMITS, Web, assert_problem

BODY = {"image_digest": "0" * 32}


@pytest.fixture
def web() -> Web:
    return Web()


def test_unknown_routes_and_methods_are_problems(web):
    assert_problem(web.call("GET", "/nothing"), 404, "not-found", "GET /nothing")
    assert_problem(web.call("GET", "/static/nothing.js"), 404, "not-found")
    assert_problem(web.call("GET", "/static/../../app.py"), 404, "not-found")
    assert_problem(web.call("GET", "/static/%2e%2e/%2e%2e/app.py"), 404, "not-found")
    response = web.call("GET", "/predict")
    assert_problem(response, 405, "method-not-allowed")
    assert response.headers["allow"] == "POST"


def test_over_capacity_says_when_to_come_back(web):
    response = web.post(json=BODY | {"prompts": ["fail"]})
    assert_problem(response, 503, "over-capacity", "full")
    assert response.headers["retry-after"] == "3"


def test_a_crash_tells_the_client_nothing_of_the_inside(web):
    response = web.post(json=BODY | {"prompts": ["crash"]})
    assert_problem(response, 500, "internal-error")
    assert "secret" not in response.text


def test_the_deadline_cancels_the_work():
    web = Web(deadline_s=0.05)
    headers = {"x-request-timeout-seconds": "0", "x-request-disconnect-disabled": "?1"}
    assert_problem(
        web.post(json=BODY | {"prompts": ["slow"]}, headers=headers),
        504,
        "deadline-exceeded",
        "0.05 s",
    )
    assert web.service.cancelled == 1


def test_the_deadline_counts_the_reading():
    import asyncio

    async def never_ends():
        yield b"x"
        await asyncio.Event().wait()

    response = Web(deadline_s=0.05).post(
        content=never_ends(), headers={"content-type": "image/png"}
    )
    assert_problem(response, 504, "deadline-exceeded")


def test_health(web):
    for path in ("/health", "/healthz"):
        assert web.call("GET", path).json() == {"status": "ok"}
    web.service.is_ready = False
    assert_problem(web.call("GET", "/healthz"), 503, "no-replica")


def test_every_answer_forbids_content_from_elsewhere(web):
    for path in ("/", "/docs", "/docs.css", "/info", "/nothing", "/static/app.js"):
        response = web.call("GET", path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert not re.search(r"https?:|\*|unsafe", policy)
        assert response.headers["x-content-type-options"] == "nosniff"


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.urls += [value for name, value in attrs if name in ("src", "href") and value]


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_pages_and_what_they_link_to_are_served_from_here(web, path):
    response = web.call("GET", path)
    assert response.status_code == 200
    links = Links()
    links.feed(response.text)
    for url in links.urls:
        if not url.startswith("#"):
            assert web.call("GET", f"/{url.removeprefix('./')}").status_code == 200, url


def test_a_browser_that_asks_for_an_icon_gets_one(web):
    response = web.call("GET", "/favicon.ico")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("image/svg+xml")
    assert ElementTree.fromstring(response.text).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_docs_describe_every_way_and_every_problem(web):
    page = web.call("GET", "/docs").text
    for words in ("application/json", "multipart/form-data", "image/*", *Options.model_fields):
        assert words in page, words
    for kind in ProblemType:
        if kind not in (ProblemType.NOT_FOUND, ProblemType.METHOD_NOT_ALLOWED):
            assert kind.slug in page, kind


def test_the_openapi_document_is_whole(web):
    document = web.call("GET", "/openapi.json").json()
    references = set(
        re.findall(r'"\$ref":\s*"#/components/schemas/(\w+)"', str(document).replace("'", '"'))
    )
    assert references
    assert references <= set(document["components"]["schemas"])
    predict = document["paths"]["/predict"]["post"]
    assert set(predict["requestBody"]["content"]) == {
        "application/json",
        "multipart/form-data",
        "image/*",
    }
    assert {parameter["name"] for parameter in predict["parameters"]} == set(Options.model_fields)
    assert set(predict["responses"]) == {
        "200",
        "400",
        "401",
        "403",
        "404",
        "408",
        "413",
        "415",
        "422",
        "500",
        "503",
        "504",
    }
    body = document["components"]["schemas"]["PredictBody"]
    assert set(body["properties"]) == set(PredictBody.model_fields)
    assert body["additionalProperties"] is False


def test_no_page_of_another_origin_may_call_unless_it_is_configured():
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    web = Web()
    refused = web.call("OPTIONS", "/predict", headers=headers)
    assert refused.status_code == 405
    answered = web.call("GET", "/info", headers=headers)
    assert not any(name.startswith("access-control") for name in answered.headers)

    web.app = http_app(web.service, LIMITS, 5.0, cors_origins=["https://example.org"])
    allowed = web.call("OPTIONS", "/predict", headers=headers)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    other = web.call("OPTIONS", "/predict", headers=headers | {"origin": "https://else.org"})
    assert "access-control-allow-origin" not in other.headers
    answered = web.call("GET", "/info", headers=headers)
    assert answered.headers["access-control-allow-origin"] == "https://example.org"
    # A page's code may read only the headers that are named.
    assert "x-request-id" in answered.headers["access-control-expose-headers"].lower()


def test_every_status_is_counted():
    web, counted = Web(), []
    web.app = http_app(web.service, LIMITS, 5.0, count=counted.append)
    web.call("GET", "/info")
    web.call("GET", "/nothing")
    web.post(content=b"", headers={"content-type": "image/png"})
    assert counted == [200, 404, 400]
