"""Everything that a client can get wrong or try, over real HTTP: the right 4xx, and nothing left behind."""

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.serve.test_service import RAW, drawn, too_many_pixels, truncated_jpeg


def encoded(mode: str = "RGB", kind: str = "PNG", size: tuple[int, int] = (40, 30), **options):
    file = io.BytesIO()
    Image.new(mode, size, **({"color": 1} if mode in ("1", "P", "I;16") else {})).save(
        file, kind, **options
    )
    return file.getvalue()


def black_png(width: int, height: int) -> bytes:
    """All of it is there, in a few kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    packer = zlib.compressobj(9)
    row = b"\0" * (width // 8 + 1)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    )


GOOD = encoded()
B64 = base64.b64encode(GOOD).decode()
BOMB = black_png(20_000, 20_000)
ANIMATED = encoded(
    kind="GIF", save_all=True, append_images=[Image.new("RGB", (40, 30), "blue")], duration=50
)


def raw(data: bytes, **params) -> dict:
    return {"content": data, "headers": RAW, "params": params}


def typed(content_type: str, data: bytes = GOOD) -> dict:
    return {"content": data, "headers": {"content-type": content_type}}


def text(body: str | bytes) -> dict:
    return typed("application/json", body.encode() if isinstance(body, str) else body)


def options(**values) -> dict:
    return {"json": {"image": B64, **values}}


def form(name: str = "a.png", data: bytes = GOOD, fields=None, kind: str = "image/png") -> dict:
    return {"files": {"image": (name, data, kind)}, "data": fields or {}}


def multipart(body: bytes, boundary: str = "; boundary=x") -> dict:
    return typed("multipart/form-data" + boundary, body)


def part(name: str, value: str) -> bytes:
    return f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


CASES: dict[str, tuple[dict, int]] = {
    # images
    "empty body": (raw(b""), 400),
    "no body and no type": ({}, 400),
    "one byte": (raw(b"\0"), 415),
    "text": (raw(b"hello"), 415),
    "html": (raw(b"<html><script>alert(1)</script>"), 415),
    "svg": (raw(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), 415),
    "pdf": (raw(b"%PDF-1.7\n1 0 obj"), 415),
    "zip": (raw(b"PK\x03\x04" + b"\0" * 40), 415),
    "elf": (raw(b"\x7fELF" + b"\0" * 60), 415),
    "postscript": (raw(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), 415),
    "truncated jpeg": (raw(truncated_jpeg()), 415),
    "truncated png": (raw(drawn(1)[:500]), 415),
    "png signature only": (raw(b"\x89PNG\r\n\x1a\n"), 415),
    "jpeg marker only": (raw(b"\xff\xd8\xff\xe0"), 415),
    "zeros after a jpeg marker": (raw(b"\xff\xd8" + b"\0" * 5000), 415),
    "bomb, header only": (raw(too_many_pixels()), 413),
    "bomb, 20,000 x 20,000": (raw(BOMB), 413),
    "bomb in base64": (options(image=base64.b64encode(BOMB).decode()), 413),
    "bomb in a form": (form(data=BOMB), 413),
    "upload of 34 MB": (raw(b"x" * 34_000_000), 413),
    # content types
    "text/plain": (typed("text/plain"), 415),
    "octet-stream": (typed("application/octet-stream"), 415),
    "url-encoded": (typed("application/x-www-form-urlencoded", b"prompts=car"), 415),
    "xml": (typed("application/xml", b"<a/>"), 415),
    "a type that is none": (typed("%%%"), 415),
    "json called image": (typed("image/png", b'{"image": ""}'), 415),
    "image called json": (text(GOOD), 400),
    "compressed body": ({**raw(GOOD), "headers": RAW | {"content-encoding": "gzip"}}, 415),
    # JSON
    "empty json": (text(""), 400),
    "broken json": (text("{"), 400),
    "json twice": (text("{}{}"), 400),
    "not utf-8": (text(b'{"image": "\xff"}'), 400),
    "deep json": (text("[" * 100_000), 400),
    "deep objects": (text('{"a":' * 20_000 + "1" + "}" * 20_000), 400),
    "a million values": (text("[" + "1," * 1_000_000 + "1]"), 400),
    "a huge number": (text('{"threshold": ' + "9" * 5000 + "}"), 400),
    "nan": (text('{"image": "' + B64 + '", "threshold": NaN}'), 422),
    "a list": (text("[]"), 422),
    "null": (text("null"), 422),
    "a field twice": (text('{"image": "", "image": ""}'), 422),
    "no base64": (options(image="!"), 400),
    "a data url": (options(image="data:image/png;base64," + B64), 400),
    "a url": (options(image="http://127.0.0.1/secret.png"), 400),
    "a path": (options(image="../../etc/passwd"), 400),
    "image is a number": (options(image=5), 422),
    # options
    "unknown field": (options(treshold=0.5), 422),
    "threshold 2": (options(threshold=2), 422),
    "threshold -1": (options(threshold=-1), 422),
    "threshold text": (options(threshold="0.5"), 422),
    "no instances": (options(max_instances=0), 422),
    "201 instances": (options(max_instances=201), 422),
    "unknown format": (options(mask_format="tiff"), 422),
    "digest too short": ({"json": {"image_digest": "abc"}}, 422),
    "digest with a path": ({"json": {"image_digest": "../" * 10 + "ab"}}, 422),
    "digest of another image": (options(image_digest="0" * 32), 422),
    "digest that is not here": ({"json": {"image_digest": "f" * 32}}, 404),
    "unknown query": (raw(GOOD, model="big"), 422),
    "query twice": ({**raw(GOOD), "params": [("threshold", "0.1"), ("threshold", "0.2")]}, 422),
    "query beside json": ({**options(), "params": {"prompts": "car"}}, 422),
    "query not utf-8": ({"content": GOOD, "headers": RAW, "query": "prompts=%ff"}, 422),
    "deadline of 0": ({**raw(GOOD), "headers": RAW | {"x-request-timeout-ms": "0"}}, 422),
    # prompts
    "five prompts": (options(prompts=list("abcde")), 422),
    "10,000 prompts": (options(prompts=["car"] * 10_000), 422),
    "a prompt of 1 MB": (options(prompts=["a" * 1_000_000]), 422),
    "an empty prompt": (options(prompts=[""]), 422),
    "a blank prompt": (options(prompts=["  \t"]), 422),
    "a number as prompt": (options(prompts=[5]), 422),
    "a list as prompt": (options(prompts=[["car"]]), 422),
    "an unknown field of a prompt": (options(prompts=[{"text": "car", "box": [0, 0, 1, 1]}]), 422),
    "a nul in a prompt": (options(prompts=["ca\0r"]), 422),
    # forms
    "no boundary": (multipart(b"", ""), 400),
    "nothing in the form": (multipart(b"--x--\r\n"), 400),
    "wrong boundary": (multipart(b"--y\r\n\r\n"), 400),
    "form ends early": (multipart(part("prompts", "car")), 400),
    "a field twice in a form": (form(fields={"threshold": ["0.1", "0.2"]}), 422),
    "image as a field": (multipart(part("image", "x") + b"--x--\r\n"), 422),
    "two images": (
        {"files": [("image", ("a.png", GOOD)), ("image", ("b.png", GOOD))]},
        422,
    ),
    "another file": ({"files": {"mask": ("a.png", GOOD)}}, 422),
    "an empty file": (form(data=b""), 400),
    "300 fields": (multipart(part("prompts", "car") * 300 + b"--x--\r\n"), 400),
    "form in utf-16": (multipart(b"--x--\r\n", "; boundary=x; charset=utf-16"), 415),
    "field not utf-8": (
        multipart(part("prompts", "").replace(b"\r\n\r\n\r\n", b"\r\n\r\n\xff\r\n") + b"--x--\r\n"),
        400,
    ),
    # fine, however odd
    "animated": (raw(ANIMATED), 200),
    "cmyk": (raw(encoded("CMYK", "JPEG")), 200),
    "16 bits": (raw(encoded("I;16")), 200),
    "palette with transparency": (raw(encoded("P", transparency=0)), 200),
    "one bit": (raw(encoded("1")), 200),
    "one pixel": (raw(encoded(size=(1, 1))), 200),
    "png with an archive behind it": (raw(GOOD + b"PK\x03\x04" + b"\0" * 100), 200),
    "jpeg called png": (raw(encoded(kind="JPEG")), 200),
    "a path as file name": (form("../../../etc/passwd"), 200),
    "a nul in the file name": (form("a\0.png"), 200),
    "emoji": (options(prompts=["🦊 fox", "日本語"]), 200),
    "sql": (options(prompts=["'; DROP TABLE images; --"]), 200),
}

SECRETS = ("Traceback", 'File "', "site-packages", "sam3_ray/", "0x7f", "/tmp/")


def send(client: httpx.Client, request: dict) -> httpx.Response:
    request = dict(request)
    query = request.pop("query", None)
    if not request.get("params"):
        request.pop("params", None)
    return client.post("/predict" + (f"?{query}" if query else ""), **request)


def test_there_are_sixty_cases_and_the_bomb_is_small():
    assert len(CASES) >= 60
    assert len(BOMB) < 100_000


@pytest.fixture(scope="module")
def known(service, pictures) -> Callable[[], None]:
    """Checks that a good request still gets the answer that it got before all of this."""
    request = {
        "content": pictures[0].data,
        "headers": RAW,
        "params": {"prompts": pictures[0].phrase, "mask_format": "rle"},
    }

    def results() -> list:
        response = service.post("/predict", **request)
        assert response.status_code == 200, response.text
        return response.json()["results"]

    first = results()

    def check() -> None:
        assert results() == first

    return check


@pytest.mark.parametrize("name", CASES)
def test_bad_input(service, known, name):
    request, status = CASES[name]
    response = send(service, request)
    assert response.status_code == status, response.text[:500]
    if status != 200:
        assert response.headers["content-type"] == "application/problem+json"
        body = response.json()
        assert body["status"] == status
        assert len(body["detail"]) > 10
        assert len(response.content) < 10_000
    assert not any(secret in response.text for secret in SECRETS)
    known()


def test_exif_rotation_is_applied(service):
    pixels = np.zeros((30, 40, 3), np.uint8)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    answer = send(service, raw(file.getvalue())).json()
    assert (answer["width"], answer["height"]) == (30, 40)


def test_the_replicas_are_those_of_before(service, known):
    known()
    info = json.loads(service.get("/info").text)
    assert all(replica["incidents"] == [] for replica in info["replicas"])
    assert info["refused_images"] == []
