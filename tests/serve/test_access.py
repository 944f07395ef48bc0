"""Keys: who may ask, what is kept of a key, and that images of one key are nobody else's."""

import json
import logging

import pytest

from sam3_ray.engine import Engine
from sam3_ray.images import ImageSource, file_digest
from sam3_ray.prompt import Request
from sam3_ray.serve.access import Access, AccessFileError
from sam3_ray.serve.errors import ProblemError
from sam3_ray.serve.routes import http_app
from tests.serve.fakes import LIMITS, Web, assert_problem

ONE, OTHER, WATCHER = "one-0123456789abcdef", "other-0123456789abcdef", "watch-0123456789abcdef"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def web(tmp_path) -> Web:
    file = tmp_path / "keys"
    file.write_text(f"# keys\none: {ONE}\n\nother: {OTHER}\nwatcher: {WATCHER} info-only\n")
    web = Web()
    web.app = http_app(web.service, LIMITS, 5.0, Access.from_file(file))
    return web


def ask(web: Web, headers: dict[str, str]):
    return web.post(content=b"x" * 10, headers={"content-type": "image/png"} | headers)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": ONE},
        {"authorization": f"Basic {ONE}"},
        bearer(ONE[:-1]),
        bearer(ONE + "x"),
        bearer(""),
    ],
)
def test_without_a_key_nothing_is_answered_but_health(web, headers):
    response = ask(web, headers)
    assert_problem(response, 401, "unauthorized", "Authorization: Bearer")
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert ONE not in response.text
    assert_problem(web.call("GET", "/info", headers=headers), 401, "unauthorized")
    assert web.call("GET", "/health", headers=headers).status_code == 200
    assert not web.service.jobs


@pytest.mark.parametrize("prefix", ["/sam3", "/health", "/a/b"])
def test_health_is_open_below_a_route_prefix_and_nothing_else_is(web, prefix):
    """As Serve has it: the whole path, and the prefix as the root path."""

    async def below(scope, receive, send):
        await web_app(scope | {"root_path": prefix}, receive, send)

    web_app, web.app = web.app, below
    assert web.call("GET", f"{prefix}/health").status_code == 200
    assert web.call("GET", f"{prefix}/healthz").status_code == 200
    for path in ("/info", "", "/health/info", "/health/health"):
        assert web.call("GET", prefix + path).status_code == 401


def test_a_key_that_only_watches_may_not_predict(web):
    assert web.call("GET", "/info", headers=bearer(WATCHER)).status_code == 200
    assert_problem(ask(web, bearer(WATCHER)), 403, "forbidden", "watcher")


def test_keys_are_never_logged(web, caplog):
    with caplog.at_level(logging.DEBUG):
        ask(web, bearer(ONE))
        ask(web, bearer("wrong-" + ONE))
    lines = [json.loads(r.message) for r in caplog.records if r.name == "sam3_ray.requests"]
    assert [(line["status"], line.get("caller")) for line in lines] == [(200, "one"), (401, None)]
    assert ONE not in caplog.text


def test_each_key_has_a_namespace_of_its_own(web):
    for key in (ONE, OTHER, ONE):
        assert ask(web, bearer(key)).status_code == 200
    first, second, third = (job.namespace for job in web.service.jobs)
    assert first == third != second
    assert ONE not in first


def test_no_key_finds_the_image_of_another(demo_engine: Engine, png: bytes):
    def source(namespace: str, *, digest_only: bool = False) -> ImageSource:
        made = ImageSource.from_digest(file_digest(png)) if digest_only else ImageSource.of(png)
        made.namespace = namespace
        return made

    asked = [
        source("a"),
        source("a"),
        source("b", digest_only=True),
        source("b"),  # the same pixels: still a miss
        source("a", digest_only=True),
    ]
    answers = [demo_engine.ground([Request(one)])[0] for one in asked]
    assert [None if a.error else a.cached for a in answers] == [False, True, None, False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key"),
        ("# only a comment\n", "has no key"),
        (f"one {ONE}\n", ":1: want `name: key`"),
        (f"one: {ONE} admin\n", ":1: want"),
        ("one: short\n", ":1: the key has 5 characters"),
        (f"one: {ONE}\none: {OTHER}\n", ":2: a name or a key is given twice"),
        (f"one: {ONE}\ntwo: {ONE}\n", ":2: a name or a key is given twice"),
    ],
)
def test_a_wrong_file_is_an_error_that_shows_no_key(tmp_path, text, message):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(AccessFileError, match=message) as caught:
        Access.from_file(file)
    assert ONE not in str(caught.value)


def test_a_refused_caller_is_a_problem_also_without_http():
    with pytest.raises(ProblemError):
        Access([("one", ONE, True)]).caller(None)


@pytest.fixture(scope="module")
def png() -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def demo_engine():
    from sam3_ray import Sam3

    with Sam3.from_pretrained("demo", backend="cpu", num_threads=1) as model:
        yield model.engine
