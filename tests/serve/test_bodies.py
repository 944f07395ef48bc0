"""The four ways in agree, and everything else is refused by name."""

import base64
import json

import pytest

from sam3_ray.images import file_digest
from sam3_ray.prompt import Prompt
from sam3_ray.serve.bodies import MAX_PHRASE_CHARACTERS
from tests.serve.fakes import LIMITS, Web, assert_problem

IMAGE = b"\x89PNG not decoded here"
BASE64 = base64.b64encode(IMAGE).decode()
DIGEST = file_digest(IMAGE)


@pytest.fixture
def web() -> Web:
    return Web()


def form(image=IMAGE, **fields):
    files = {} if image is None else {"image": ("a.png", image, "image/png")}
    return {"files": files or {"": ("", b"")}, "data": fields} if files else {"data": fields}


def test_the_ways_in_make_the_same_job(web):
    options = {"threshold": 0.25, "max_instances": 7, "mask_format": "rle"}
    prompts = ["red circle", {"text": "car", "threshold": 0.75}]
    web.post(json={"image": BASE64, "prompts": prompts, **options})
    texts = {name: str(value) for name, value in options.items()}
    coded = ["red circle", json.dumps(prompts[1])]
    web.post(**form(prompts=coded, **texts))
    web.post(
        content=IMAGE, headers={"content-type": "image/png"}, params={"prompts": coded, **texts}
    )
    jobs = [{**vars(job), "sent_at": 0} for job in web.service.jobs]
    assert jobs[0] == jobs[1] == jobs[2]
    job = web.job
    assert job.image == IMAGE
    assert job.digest == DIGEST
    assert job.prompts == (Prompt("red circle"), Prompt("car", 0.75))
    assert (job.threshold, job.max_instances, job.mask_format) == (0.25, 7, "rle")


@pytest.mark.parametrize(
    "request_",
    [
        {"json": {"image_digest": DIGEST, "prompts": ["car"]}},
        {"files": [("image_digest", (None, DIGEST)), ("prompts", (None, "car"))]},
        {"params": {"image_digest": DIGEST, "prompts": "car"}},
        {
            "params": {"image_digest": DIGEST, "prompts": "car"},
            "headers": {"content-type": "image/png"},
        },
    ],
)
def test_a_digest_alone_in_every_way(web, request_):
    assert web.post(**request_).status_code == 200
    assert (web.job.digest, web.job.image, web.job.prompts) == (DIGEST, None, (Prompt("car"),))


def test_defaults_and_warming(web):
    assert web.post(json={"image": BASE64}).json() == {"image_digest": DIGEST}
    assert (web.job.prompts, web.job.threshold, web.job.max_instances) == ((), 0.5, 50)
    assert web.job.mask_format == "png"


def test_one_phrase_need_not_be_a_list(web):
    web.post(json={"image": BASE64, "prompts": "car"})
    assert web.job.prompts == (Prompt("car"),)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("gzip, br", True),
        ("gzip;q=0", False),
        ("br", False),
        ("identity", False),
        ("GZIP ; q=0.5", True),
    ],
)
def test_gzip_only_where_it_is_taken(web, accept, expected):
    web.post(json={"image": BASE64}, headers={"accept-encoding": accept})
    assert web.job.gzip is expected


JSON_FAULTS = {
    "not json": (b"{", 400, "unparseable-body", "JSON"),
    "not utf-8": (b'{"image": "\xff"}', 400, "unparseable-body", "JSON"),
    "half a surrogate": (b'{"image": "", "prompts": ["\\ud800"]}', 400, "unparseable-body", "JSON"),
    "deep": (b'{"prompts":' + b"[" * 10_000, 400, "unparseable-body", "JSON"),
    "empty": (b"", 400, "no-image", "empty"),
    "a list": (b"[]", 422, "invalid-request", "object"),
    "no image": (b'{"prompts": ["car"]}', 400, "no-image", "no image"),
    "empty image": (b'{"image": ""}', 400, "no-image", "empty"),
    "not base64": (b'{"image": "%%%"}', 400, "invalid-base64", "base64"),
    "base64 with a line end": (b'{"image": "iVBO\\nRw=="}', 400, "invalid-base64", "base64"),
    "data URL": (b'{"image": "data:image/png;base64,iVBO"}', 400, "invalid-base64", "leave out"),
    "URL": (b'{"image": "https://127.0.0.1/a.png"}', 400, "invalid-base64", "never fetches"),
    "path": (b'{"image": "/etc/passwd"}', 400, "invalid-base64", "base64"),
}


@pytest.mark.parametrize("name", JSON_FAULTS)
def test_json_that_cannot_be_read(web, name):
    body, status, slug, detail = JSON_FAULTS[name]
    response = web.post(content=body, headers={"content-type": "application/json"})
    assert_problem(response, status, slug, detail)
    assert not web.service.jobs


FIELD_FAULTS = {
    "unknown": ({"treshold": 0.5}, "treshold", "unknown field"),
    "threshold high": ({"threshold": 2}, "threshold", "less than or equal to 1.*got 2"),
    "threshold text": ({"threshold": "0.5"}, "threshold", "number"),
    "threshold bool": ({"threshold": True}, "threshold", "number"),
    "threshold null": ({"threshold": None}, "threshold", "number"),
    "instances 0": ({"max_instances": 0}, "max_instances", "greater"),
    "instances 201": ({"max_instances": 201}, "max_instances", "200"),
    "instances half": ({"max_instances": 1.5}, "max_instances", "integer"),
    "mask format": ({"mask_format": "jpeg"}, "mask_format", "'png', 'rle', 'polygon' or 'none'"),
    "five prompts": ({"prompts": list("abcde")}, "prompts", "5 phrases; at most 4"),
    "empty prompt": ({"prompts": ["a", "  "]}, "prompts[1]", "empty"),
    "number prompt": ({"prompts": ["a", 5]}, "prompts[1]", "phrase, or an object"),
    "prompts number": ({"prompts": 5}, "prompts", "array"),
    "prompt with boxes": (
        {"prompts": [{"text": "a", "boxes": []}]},
        "prompts[0].boxes",
        "unknown field",
    ),
    "prompt threshold": (
        {"prompts": [{"text": "a", "threshold": -1}]},
        "prompts[0].threshold",
        "greater",
    ),
    "prompt without text": ({"prompts": [{}]}, "prompts[0].text", "required"),
    "long prompt": (
        {"prompts": ["x" * (MAX_PHRASE_CHARACTERS + 1)]},
        "prompts[0]",
        "501 characters",
    ),
    "digest": ({"image_digest": "../etc"}, "image_digest", "pattern"),
    "digest of another": ({"image_digest": "0" * 32}, "image_digest", "not the digest"),
}


@pytest.mark.parametrize("name", FIELD_FAULTS)
def test_a_wrong_field_is_named(web, name):
    fields, field, message = FIELD_FAULTS[name]
    response = web.post(json={"image": BASE64, **fields})
    assert_problem(response, 422, "invalid-request", message)
    assert [error["field"] for error in response.json()["errors"]] == [field]
    assert not web.service.jobs


def test_every_fault_is_reported_at_once(web):
    response = web.post(json={"image": BASE64, "threshold": 2, "max_instances": 0, "typo": 1})
    fields = {error["field"] for error in response.json()["errors"]}
    assert fields == {"threshold", "max_instances", "typo"}


@pytest.mark.parametrize("text", ["nan", "inf", "-0.1", "1.1", "", "half"])
def test_numbers_in_texts_are_checked(web, text):
    assert_problem(web.post(**form(threshold=text)), 422, "invalid-request", "threshold")
    response = web.post(
        content=IMAGE, headers={"content-type": "image/png"}, params={"threshold": text}
    )
    assert_problem(response, 422, "invalid-request", "threshold")


def test_nan_in_json_is_refused(web):
    body = b'{"image": "%s", "threshold": NaN}' % BASE64.encode()
    response = web.post(content=body, headers={"content-type": "application/json"})
    assert_problem(response, 422, "invalid-request", "threshold")


@pytest.mark.parametrize(
    ("request_", "status", "slug", "detail"),
    [
        (form(typo="1"), 422, "invalid-request", "typo: unknown field"),
        ({"data": {"image": "text"}, "files": {"x": b"1"}}, 422, "invalid-request", "file part"),
        ({"files": [("image", b"1"), ("image", b"2")]}, 422, "invalid-request", "more than once"),
        ({"files": {"image": b"1", "prompts": b"2"}}, 422, "invalid-request", "plain field"),
        (form(threshold=["0.1", "0.2"]), 422, "invalid-request", "more than once"),
        (form(prompts="{no json"), 422, "invalid-request", r"prompts\[0\]"),
        (
            form(prompts='{"text": "a", "threshold": 3}'),
            422,
            "invalid-request",
            r"prompts\[0\].threshold",
        ),
        ({"files": {"image": b""}}, 400, "no-image", "empty"),
        ({"files": [("prompts", (None, "car"))]}, 400, "no-image", "no image"),
        ({"params": {"typo": "1"}}, 422, "invalid-request", "typo: unknown query parameter"),
        ({"params": {"prompts": "car"}}, 400, "no-image", "no image"),
        (
            {"params": {"threshold": "0.1"}, "json": {"image": BASE64}},
            422,
            "invalid-request",
            "query",
        ),
        ({"params": {"threshold": "0.1"}, **form()}, 422, "invalid-request", "query"),
        ({"content": IMAGE}, 415, "unsupported-media-type", "no Content-Type"),
        ({"data": {"a": "b"}}, 415, "unsupported-media-type", "x-www-form-urlencoded"),
        (
            {"content": IMAGE, "headers": {"content-type": "application/octet-stream"}},
            415,
            "unsupported-media-type",
            "octet-stream",
        ),
        (
            {
                "content": IMAGE,
                "headers": {"content-type": "image/png", "content-encoding": "gzip"},
            },
            415,
            "unsupported-media-type",
            "gzip",
        ),
        (
            {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
            400,
            "unparseable-body",
            "multipart",
        ),
        (
            {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}},
            400,
            "unparseable-body",
            "multipart",
        ),
    ],
)
def test_other_requests_are_refused(web, request_, status, slug, detail):
    assert_problem(web.post(**request_), status, slug, detail)
    assert not web.service.jobs


LARGE = b"x" * (LIMITS.max_upload_bytes + 1)


@pytest.mark.parametrize(
    "request_",
    [
        {"content": LARGE, "headers": {"content-type": "image/png"}},
        {"json": {"image": base64.b64encode(LARGE).decode()}},
        {"files": {"image": LARGE}},
    ],
)
def test_an_upload_over_the_limit(web, request_):
    assert_problem(web.post(**request_), 413, "too-large", "100000 bytes")
    assert not web.service.jobs


def test_an_upload_at_the_limit(web):
    data = LARGE[:-1]
    assert web.post(content=data, headers={"content-type": "image/png"}).status_code == 200
    assert web.post(json={"image": base64.b64encode(data).decode()}).status_code == 200
    assert web.post(files={"image": data}).status_code == 200
    assert [len(job.image or b"") for job in web.service.jobs] == [len(data)] * 3


def test_a_body_of_unknown_length_is_not_read_beyond_the_limit(web):
    read = 0

    async def endless():
        nonlocal read
        while True:
            read += 10_000
            yield b"x" * 10_000

    response = web.post(content=endless(), headers={"content-type": "image/png"})
    assert_problem(response, 413, "too-large")
    assert read <= LIMITS.max_upload_bytes + 20_000
