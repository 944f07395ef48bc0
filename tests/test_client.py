"""client.py against a scripted HTTP server on loopback: what it sends, what it makes of each answer.

``tests/test_launch.py`` runs it against the real service.
"""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sam3_ray.client import (
    Client,
    DeadlineError,
    OverCapacityError,
    RequestRefusedError,
    ServerFailedError,
    ServiceError,
    UnreachableError,
)
from sam3_ray.prompt import Prompt

WIDTH, HEIGHT = 8, 6
SQUARE = np.zeros((HEIGHT, WIDTH), bool)
SQUARE[1:4, 2:5] = True


@dataclass
class Seen:
    """One request, as the server got it."""

    method: str
    path: str
    content_type: str
    body: bytes
    headers: dict[str, str]

    def options(self) -> dict[str, Any]:
        """The fields of a JSON or multipart body; ``image`` as bytes."""
        if self.content_type == "application/json":
            return dict(json.loads(self.body))
        head = f"Content-Type: {self.headers['content-type']}\r\n\r\n".encode()
        fields: dict[str, Any] = {"prompts": []}
        for part in BytesParser().parsebytes(head + self.body).get_payload():
            name = part.get_param("name", header="content-disposition")  # type: ignore[union-attr]
            data = part.get_payload(decode=True)  # type: ignore[union-attr]
            if name == "image":
                fields["image"] = data
            elif name == "prompts":
                fields["prompts"].append(data.decode())
            else:
                fields[str(name)] = data.decode()
        return fields


@dataclass
class Script:
    """Answers in order; the last one is repeated."""

    answers: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    url: str = ""
    delay: threading.Event | None = None

    def answer(self, status: int, body: Any = None, **headers: str) -> Script:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/json" if status < 400 else "application/problem+json"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.append((status, {"Content-Type": kind, **named}, data))
        return self

    def problem(self, status: int, kind: str, detail: str = "why", **headers: str) -> Script:
        body = {"type": kind, "title": kind.replace("-", " "), "status": status, "detail": detail}
        return self.answer(status, body, **headers)


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            kind = self.headers.get("Content-Type", "").split(";")[0]
            with lock:
                script.seen.append(Seen(self.command, self.path, kind, body, headers))
                status, extra, data = (
                    script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
                )
            if script.delay is not None:
                script.delay.wait(20)
            if status == 0:  # hang up
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(status)
            for name, value in extra.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_port}"
    yield script
    if script.delay is not None:
        script.delay.set()
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    with Client(script.url, timeout=20) as client:
        yield client


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client would have slept."""
    waited: list[float] = []
    monkeypatch.setattr("sam3_ray.client.time.sleep", waited.append)
    return waited


def answer(
    *prompts: str,
    mask: Any = None,
    mask_format: str = "rle",
    digest: str = "d" * 32,
    count: int = 1,
) -> dict[str, Any]:
    """A 200 of the service, as DESIGN.md section 8 has it."""
    instance = {"score": 0.9731, "box_xyxy": [2.0, 1.0, 5.0, 4.0], "mask_area": 9, "mask": mask}
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "input_size": 1008,
        "threshold": 0.5,
        "mask_format": mask_format,
        "results": [
            {
                "prompt": prompt,
                "presence": 0.9981,
                "num_instances": count,
                "truncated": True,
                "instances": [instance] * count,
            }
            for prompt in prompts
        ],
        "image_digest": digest,
        "cached": False,
        "checkpoint": "demo",
        "replica": "r1",
        "chip": None,
        "timing_ms": {"queue": 0.5, "total": 12.0},
    }


def coco_rle(mask: np.ndarray[Any, Any]) -> dict[str, Any]:
    from pycocotools import mask as coco

    rle = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode()}


def picture() -> Image.Image:
    return Image.effect_noise((WIDTH, HEIGHT), 90).convert("RGB")


def file_bytes(kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture().save(file, kind)
    return file.getvalue()


# -- what comes back -------------------------------------------------------------------------------


def test_a_phrase_gives_a_result(script: Script, client: Client) -> None:
    script.answer(200, answer("car", mask=coco_rle(SQUARE)))
    result = client.predict(file_bytes(), " car ")
    assert (result.prompt, result.width, result.height) == ("car", WIDTH, HEIGHT)
    assert result.truncated is True
    assert result.presence == 0.9981
    assert result.scores.dtype == np.float32
    assert result.scores.tolist() == [np.float32(0.9731)]
    assert result.boxes.tolist() == [[2.0, 1.0, 5.0, 4.0]]
    assert result.masks is not None
    assert np.array_equal(result.masks, SQUARE[None])


def test_phrases_give_a_list(script: Script, client: Client) -> None:
    script.answer(200, answer("car", "red bus", mask=coco_rle(SQUARE)))
    results = client.predict(file_bytes(), ["car", Prompt("red bus", 0.25)], threshold=0.4)
    assert [result.prompt for result in results] == ["car", "red bus"]
    sent = script.seen[0].options()
    assert sent["prompts"][0] == "car"
    assert json.loads(sent["prompts"][1]) == {"text": "red bus", "threshold": 0.25}
    assert (sent["threshold"], sent["max_instances"], sent["mask_format"]) == ("0.4", "50", "rle")


def test_nothing_found(script: Script, client: Client) -> None:
    script.answer(200, answer("car", count=0))
    result = client.predict(file_bytes(), "car")
    assert result.masks is not None
    assert (result.masks.shape, result.boxes.shape) == ((0, HEIGHT, WIDTH), (0, 4))


def test_png_polygon_and_no_masks(script: Script, client: Client) -> None:
    import base64

    file = io.BytesIO()
    Image.fromarray(SQUARE).save(file, "PNG")
    script.answer(
        200, answer("car", mask=base64.b64encode(file.getvalue()).decode(), mask_format="png")
    )
    result = client.predict(file_bytes(), "car", mask_format="png")
    assert result.masks is not None
    assert np.array_equal(result.masks[0], SQUARE)
    script.answers.clear()
    script.answer(200, answer("car", mask=None, mask_format="none"))
    assert client.predict(file_bytes(), "car", mask_format="none").masks is None
    script.answers.clear()
    ring = [[2, 1, 5, 1, 5, 4, 2, 4]]
    script.answer(200, answer("car", mask=ring, mask_format="polygon"))
    outlined = client.predict(file_bytes(), "car", mask_format="polygon")
    assert outlined.masks is not None
    assert np.array_equal(outlined.masks[0], SQUARE)


def test_ask_tells_the_rest(script: Script, client: Client) -> None:
    script.answer(200, answer("car", mask=coco_rle(SQUARE)))
    told = client.ask(file_bytes(), "car")
    assert (told.checkpoint, told.cached, told.replica, told.chip) == ("demo", False, "r1", None)
    assert told.timing_ms == {"queue": 0.5, "total": 12.0}


def test_info_and_warm(script: Script, client: Client) -> None:
    script.answer(200, {"checkpoint": "demo"})
    assert client.info() == {"checkpoint": "demo"}
    assert (script.seen[0].method, script.seen[0].path) == ("GET", "/info")
    script.answers.clear()
    script.answer(200, answer(digest="e" * 32))
    assert client.warm(file_bytes()) == "e" * 32
    assert script.seen[1].options()["prompts"] == []


# -- what is sent ----------------------------------------------------------------------------------


def test_files_go_as_they_are(script: Script, client: Client, tmp_path: Path) -> None:
    data = file_bytes("JPEG")
    path = tmp_path / "a.jpg"
    path.write_bytes(data)
    script.answer(200, answer("car", count=0))
    client.predict(path, "car")
    assert script.seen[0].options()["image"] == data
    # The same file as a str and as bytes is the same image: its digest is enough.
    for same in (str(path), data, bytearray(data), memoryview(data)):
        client.predict(same, "car")
    assert [seen.content_type for seen in script.seen[1:]] == ["application/json"] * 4


@pytest.mark.parametrize("form", ["pil", "array", "channels first", "floats", "tensor"])
def test_arrays_go_without_loss(script: Script, client: Client, form: str) -> None:
    pixels = np.asarray(picture())
    given: Any = pixels
    if form == "pil":
        given = Image.fromarray(pixels)
    elif form == "channels first":
        given = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    elif form == "floats":
        given = (pixels.astype(np.float64) + 0.5) / 255.999
    elif form == "tensor":
        import torch

        given = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    script.answer(200, answer("car", count=0))
    client.predict(given, "car")
    with Image.open(io.BytesIO(script.seen[0].options()["image"])) as sent:
        assert sent.format == "PNG"
        assert np.array_equal(np.asarray(sent), pixels)


def test_the_digest_is_sent_first_the_second_time(script: Script, client: Client) -> None:
    script.answer(200, answer("car", count=0, digest="a" * 32))
    pixels = np.asarray(picture())
    client.predict(pixels, "car")
    client.predict(pixels.copy(), ["dog", Prompt("cat", 0.1)], max_instances=3)
    assert script.seen[1].content_type == "application/json"
    assert script.seen[1].options() == {
        "image_digest": "a" * 32,
        "prompts": ["dog", {"text": "cat", "threshold": 0.1}],
        "threshold": 0.5,
        "max_instances": 3,
        "mask_format": "rle",
    }


def test_an_image_no_longer_cached_is_sent_again(script: Script, client: Client) -> None:
    data = file_bytes()
    script.answer(200, answer("car", count=0, digest="a" * 32))
    script.problem(404, "image-not-cached")
    script.answer(200, answer("car", count=0, digest="b" * 32))
    client.predict(data, "car")
    client.predict(data, "car")
    kinds = [seen.content_type for seen in script.seen]
    assert kinds == ["multipart/form-data", "application/json", "multipart/form-data"]
    client.predict(data, "car")
    assert script.seen[3].options()["image_digest"] == "b" * 32


def test_a_path_prefix_and_headers_are_kept(script: Script) -> None:
    script.answer(200, {})
    with Client(script.url + "/models/sam3/", headers={"X-API-Key": "k"}) as client:
        client.info()
    assert script.seen[0].path == "/models/sam3/info"
    assert script.seen[0].headers["x-api-key"] == "k"


# -- what goes wrong -------------------------------------------------------------------------------


def test_503_is_retried_as_told(script: Script, client: Client, waits: list[float]) -> None:
    script.problem(503, "over-capacity", Retry_After="3")
    script.problem(503, "over-capacity", Retry_After="7")
    script.answer(200, answer("car", count=0))
    client.predict(file_bytes(), "car")
    assert waits == [3.0, 7.0]
    assert len(script.seen) == 3
    assert {seen.content_type for seen in script.seen} == {"multipart/form-data"}


def test_503_is_not_retried_for_ever(script: Script, waits: list[float]) -> None:
    script.problem(503, "over-capacity", "64 requests wait", Retry_After="900")
    with (
        Client(script.url, retries=2, max_retry_wait=10) as client,
        pytest.raises(OverCapacityError, match="64 requests wait") as raised,
    ):
        client.predict(file_bytes(), "car")
    assert waits == [10.0, 10.0]
    assert len(script.seen) == 3
    assert (raised.value.status, raised.value.type) == (503, "over-capacity")


@pytest.mark.parametrize("told", ["", "soon", "nan", "-4", "Wed, 02 Dec 2026 07:28:00 GMT"])
def test_503_without_a_usable_retry_after(
    script: Script, client: Client, waits: list[float], told: str
) -> None:
    script.answer(503, b"busy", Retry_After=told).answer(200, {})
    client.info()
    assert waits == [1.0]


def test_503_really_waits(script: Script, client: Client) -> None:
    script.problem(503, "over-capacity", Retry_After="1").answer(200, {})
    started = time.monotonic()
    client.info()
    assert time.monotonic() - started >= 1.0


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (400, "no-image", RequestRefusedError),
        (404, "not-found", RequestRefusedError),
        (413, "too-large", RequestRefusedError),
        (415, "not-an-image", RequestRefusedError),
        (422, "invalid-request", RequestRefusedError),
        (500, "internal-error", ServerFailedError),
        (504, "deadline-exceeded", DeadlineError),
    ],
)
def test_problems(
    script: Script, client: Client, status: int, kind: str, error: type[ServiceError]
) -> None:
    script.problem(status, kind, "because of this")
    with pytest.raises(error) as raised:
        client.predict(file_bytes(), "car")
    assert type(raised.value) is error
    assert (raised.value.status, raised.value.type) == (status, kind)
    assert raised.value.title == kind.replace("-", " ")
    assert str(raised.value) == f"{kind.replace('-', ' ')}: because of this"
    assert isinstance(raised.value, ValueError) == (status < 500)
    assert isinstance(raised.value, TimeoutError) == (status == 504)
    assert len(script.seen) == 1


@pytest.mark.parametrize("body", [b"<html>nginx says no</html>", b"", b"[1]", b'{"title": null'])
def test_an_error_that_is_no_problem_document(script: Script, client: Client, body: bytes) -> None:
    script.answer(502, body)
    with pytest.raises(ServerFailedError, match="answered 502") as raised:
        client.info()
    assert raised.value.type == "about:blank"


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"{}", json.dumps(answer("car", mask="no rle")).encode()]
)
def test_an_answer_that_cannot_be_read(script: Script, client: Client, body: bytes) -> None:
    script.answer(200, body)
    with pytest.raises(ServerFailedError, match="cannot be read"):
        client.predict(file_bytes(), "car")


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        Client(f"http://127.0.0.1:{port}", timeout=20) as client,
        pytest.raises(UnreachableError, match=str(port)) as raised,
    ):
        client.info()
    assert isinstance(raised.value, ConnectionError)
    assert raised.value.status is None


def test_a_connection_that_breaks_is_tried_once_more(script: Script, client: Client) -> None:
    script.answer(0).answer(200, {"checkpoint": "demo"})
    assert client.info() == {"checkpoint": "demo"}
    script.answers.clear()
    script.answer(0)
    with pytest.raises(UnreachableError, match="broke"):
        client.info()
    assert len(script.seen) == 4


def test_no_answer_in_time(script: Script) -> None:
    script.answer(200, {})
    script.delay = threading.Event()
    with (
        Client(script.url, timeout=0.3) as client,
        pytest.raises(DeadlineError, match=r"within 0\.3 s"),
    ):
        client.info()
    assert len(script.seen) == 1


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda client: client.predict(b"", "car"), ValueError),
        (lambda client: client.predict(file_bytes(), ""), ValueError),
        (lambda client: client.predict(file_bytes(), []), ValueError),
        (lambda client: client.predict(file_bytes(), [3]), TypeError),
        (lambda client: client.predict(file_bytes(), "car", threshold=2), ValueError),
        (lambda client: client.predict(file_bytes(), "car", mask_format="tiff"), ValueError),
        (lambda client: client.predict("not/there.png", "car"), FileNotFoundError),
        (lambda client: client.predict(np.zeros((2, 3, 7), np.uint8), "car"), ValueError),
    ],
)
def test_what_is_wrong_here_is_not_sent(
    script: Script, client: Client, call: Callable[[Client], object], error: type[Exception]
) -> None:
    script.answer(500)
    with pytest.raises(error):
        call(client)
    assert script.seen == []


@pytest.mark.parametrize(
    "options", [{"url": "127.0.0.1:8000"}, {"url": "http://127.0.0.1", "retries": -1}]
)
def test_arguments_of_the_client(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Client(**options)


def test_threads_share_a_client(script: Script, client: Client) -> None:
    script.answer(200, answer("car", mask=coco_rle(SQUARE)))
    data = file_bytes()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: client.predict(data, "car"), range(40)))
    assert all(len(result) == 1 for result in results)
    assert len(script.seen) == 40
    assert sum(seen.content_type == "application/json" for seen in script.seen) >= 40 - 8
