"""The four ways in agree, and everything else is refused by name."""

import asyncio
import base64
import json
import re
import time
from dataclasses import replace

import httpx
import pytest
from pydantic import ValidationError

from sam3_ray.images import file_digest
from sam3_ray.prompt import Prompt
from sam3_ray.serve.bodies import MAX_PHRASE_CHARACTERS
from sam3_ray.serve.schemas import PredictBody
from sam3_ray.serve.validation import MOST_FAULTS, validation_problem
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
    assert (web.job.prompts, web.job.threshold, web.job.max_instances) == ((), None, 50)
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
    "cut short": (b'{"prompts": ["car"]', 400, "unparseable-body", "JSON"),
    "a million values": (
        b'{"prompts": [' + b"5," * 66_000 + b"5]}",
        400,
        "unparseable-body",
        "65536",
    ),
    "a name twice": (
        b'{"image": "", "threshold": 0.1, "threshold": 0.9}',
        422,
        "invalid-request",
        "threshold: given more than once",
    ),
    "a name twice inside": (
        b'{"image": "", "prompts": [{"text": "car", "text": "dog"}]}',
        422,
        "invalid-request",
        "text: given more than once",
    ),
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
    "unseen prompt": ({"prompts": ["a", "&nbsp;\0"]}, "prompts[1]", "cannot be seen"),
    "65 prompts": ({"prompts": ["a"] * 65}, "prompts", "65 are too many"),
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


def many_faults(kind: str, count: int) -> dict:
    """A request with so many faults."""
    if kind == "unknown fields":
        body = {f"x{i}": i for i in range(count)}
    else:
        body = {"prompts": [{"text": "a", "threshold": 2, **{f"x{i}": i for i in range(count)}}]}
    return {"content": json.dumps(body), "headers": {"content-type": "application/json"}}


@pytest.mark.parametrize("kind", ["unknown fields", "unknown fields of a prompt"])
def test_of_many_faults_some_are_told(web, kind):
    problem = web.post(**many_faults(kind, 8000)).json()
    assert problem["status"] == 422
    assert len(problem["errors"]) == MOST_FAULTS
    assert re.search(r"and 79\d\d more$", problem["detail"])
    assert len(problem["detail"]) < 2000


def test_many_wrong_parameters_of_a_query_are_not_even_looked_at(web):
    response = web.call("POST", "/predict?" + "&".join(f"{i}=" for i in range(9000)))
    assert_problem(response, 422, "invalid-request", "query: more than 256 parameters")


def test_the_work_grows_no_faster_than_the_faults():
    """Sixteen times the faults: sixteen times the work, where comparing each with each makes it 256 times."""

    def shortest_s(count: int) -> float:
        with pytest.raises(ValidationError) as caught:
            PredictBody.model_validate({f"x{i}": i for i in range(count)})
        times = []
        for _ in range(5):
            started = time.perf_counter()
            validation_problem(caught.value, "field")
            times.append(time.perf_counter() - started)
        return min(times)

    assert shortest_s(8000) < 80 * shortest_s(500)


def test_a_long_name_is_cut(web):
    problem = web.post(json={"image": BASE64, "n" * 50_000: 1}).json()
    assert problem["errors"] == [{"field": "n" * 80 + "...", "message": "unknown field"}]


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
            "multipart body cannot be parsed: .*boundary",
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


def raw_form(*parts: bytes, charset: str = "", end: bytes = b"--b--\r\n") -> dict:
    """A multipart body byte by byte."""
    body = b"".join(b"--b\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts)
    content_type = "multipart/form-data; boundary=b" + (f"; charset={charset}" if charset else "")
    return {"content": body + end, "headers": {"content-type": content_type}}


FILE = b'name="image"; filename="a.png"\r\n\r\n' + IMAGE


def field(name: str, value: bytes) -> bytes:
    return b'name="%s"\r\n\r\n%s' % (name.encode(), value)


@pytest.mark.parametrize("charset", ["", "utf-8", "UTF8", '"utf-8"'])
def test_a_form_is_utf_8(web, charset):
    form = raw_form(FILE, field("prompts", "Übergrößenträger".encode()), charset=charset)
    assert web.post(**form).status_code == 200
    assert web.job.prompts == (Prompt("Übergrößenträger"),)


@pytest.mark.parametrize(
    "charset",
    [
        "unicode_escape",
        "punycode",
        "undefined",
        "latin-1",
        "utf-16",
        "idna",
        "hex",
        "no-such",
        "%00",
    ],
)
def test_a_form_in_anything_else_is_refused(web, charset):
    response = web.post(**raw_form(FILE, field("prompts", b"\\ud800"), charset=charset))
    assert_problem(response, 415, "unsupported-media-type", "charset")
    assert not web.service.jobs


def test_text_that_is_not_utf_8_becomes_no_other_phrase(web):
    response = web.post(**raw_form(FILE, field("prompts", b"caf\xe9")))
    assert_problem(response, 400, "unparseable-body", "'prompts' is not UTF-8")
    for query in ("prompts=%ff", "prompts=caf%E9", "%ff=1"):
        response = web.call(
            "POST", f"/predict?{query}", content=IMAGE, headers={"content-type": "image/png"}
        )
        assert_problem(response, 422, "invalid-request", "query: must be UTF-8")
    assert not web.service.jobs


@pytest.mark.parametrize("parts", [(FILE,), (FILE, field("threshold", b"0.9"))])
@pytest.mark.parametrize("end", [b"", b"--b\r\n", b"--b", b"--b-"])
def test_a_form_that_ends_too_early_is_refused(web, parts, end):
    """What was cut off might have been an option."""
    assert_problem(web.post(**raw_form(*parts, end=end)), 400, "unparseable-body", "boundary")
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


def trickling(pause_s: float, pieces: int, piece: bytes = b"x" * 10):
    async def stream():
        for _ in range(pieces):
            yield piece
            await asyncio.sleep(pause_s)

    return {"content": stream(), "headers": {"content-type": "image/png"}}


def test_a_body_that_stops_coming_is_given_up():
    web = Web(limits=replace(LIMITS, upload_idle_s=0.05), deadline_s=60)
    assert_problem(web.post(**trickling(30, 2)), 408, "slow-upload", "nothing came for 0.05 s")


def test_a_body_that_only_trickles_is_given_up():
    limits = replace(LIMITS, upload_grace_s=0.1, upload_bytes_per_s=10_000.0)
    web = Web(limits=limits, deadline_s=60)
    assert_problem(web.post(**trickling(0.02, 1000)), 408, "slow-upload", "at least 10000 a second")


def test_a_body_that_takes_its_time_is_read():
    limits = replace(LIMITS, upload_grace_s=0.1, upload_bytes_per_s=100.0)
    web = Web(limits=limits, deadline_s=60)
    assert web.post(**trickling(0.02, 20, b"x" * 100)).status_code == 200
    assert len(web.job.image or b"") == 2000


def test_all_uploads_together_have_a_limit():
    """While one body is here, another of the same size finds no room; then it does."""
    web = Web(limits=replace(LIMITS, upload_space_bytes=1500))
    hold = {"content": b"x" * 1000, "headers": {"content-type": "image/png"}}

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=web.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            slow = asyncio.create_task(client.post("/predict?prompts=slow", **hold))
            while not web.service.jobs:
                await asyncio.sleep(0)
            refused = await client.post("/predict", **hold)
            slow.cancel()
            await asyncio.wait([slow])
            return [refused, await client.post("/predict", **hold)]

    refused, taken = asyncio.run(run())
    assert_problem(refused, 503, "over-capacity", "1500 bytes")
    assert refused.headers["retry-after"] == "1"
    assert taken.status_code == 200
