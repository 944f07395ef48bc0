"""``sam3-ray doctor`` on this machine, and on fake ones."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sam3_ray.cli import main
from sam3_ray.cli.doctor import Check, examine
from tests.test_chips import make_chip

CHECKS = [
    "Python",
    "packages",
    "bytecode",
    "torch",
    "ray",
    "ttnn",
    "chips",
    "vocabulary",
    "demo checkpoint",
    "weights",
    "port",
    "memory",
    "shared memory",
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without weights, token and network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("SAM3_WEIGHTS_DIR", raising=False)
    monkeypatch.delenv("TT_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("sam3_ray.checkpoint.local_checkpoint", lambda *_, **__: None)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def checks_on(root: Path, port: int | None = None) -> dict[str, Check]:
    return {check.name: check for check in examine(root=root, port=port or int(free_port()))}


def chip_machine(root: Path, *, iommu: str = "DMA-FQ", pids: list[int] | None = None) -> None:
    make_chip(root, 0, pci="0000:01:00.0", card="p150a", iommu=iommu, pids=pids or [])
    (root / "sys/module/tenstorrent").mkdir(parents=True)
    (root / "sys/module/tenstorrent/version").write_text("2.6.0\n")


def test_this_machine_can_serve(capsys: pytest.CaptureFixture[str]) -> None:
    """The test's own installation is complete, so nothing is missing."""
    assert main(["doctor", "--json", "--port", free_port()]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert [check["name"] for check in document["checks"] if check["name"] in CHECKS] == CHECKS
    for check in document["checks"]:
        assert check["status"] in ("ok", "warning")
        assert bool(check["todo"]) == (check["status"] == "warning"), check


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", free_port()]) == 0
    shown = capsys.readouterr().out
    assert "Ready." in shown
    assert "the demo checkpoint is served" in shown
    assert "SAM3_WEIGHTS_DIR" in shown


def test_without_a_chip_weights_are_a_warning(tmp_path: Path) -> None:
    checks = checks_on(tmp_path)
    assert checks["chips"].status == "ok"
    assert checks["weights"].status == "warning"
    assert "HF_HUB_OFFLINE" in checks["weights"].found
    assert "driver" not in checks


def test_with_a_chip_weights_are_required(tmp_path: Path) -> None:
    chip_machine(tmp_path)
    checks = checks_on(tmp_path)
    assert (checks["chips"].status, checks["driver"].found) == ("ok", "tt-kmd 2.6.0")
    assert "p150a" in checks["chips"].found
    assert checks["hugepages"].status == "ok"
    assert checks["weights"].status == "missing"


def test_a_busy_chip(tmp_path: Path) -> None:
    chip_machine(tmp_path, pids=[4242])
    chips = checks_on(tmp_path)["chips"]
    assert chips.status == "warning"
    assert "4242" in chips.found
    assert "TT_VISIBLE_DEVICES" in chips.todo


@pytest.mark.parametrize(("pages", "status"), [("0", "missing"), ("1", "ok"), (None, "missing")])
def test_hugepages_are_needed_without_an_iommu(
    tmp_path: Path, pages: str | None, status: str
) -> None:
    chip_machine(tmp_path, iommu="identity")
    if pages is not None:
        folder = tmp_path / "sys/kernel/mm/hugepages/hugepages-1048576kB"
        folder.mkdir(parents=True)
        (folder / "nr_hugepages").write_text(pages)
    assert checks_on(tmp_path)["hugepages"].status == status


def test_a_card_without_its_driver(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1e52\n")
    chips = checks_on(tmp_path)["chips"]
    assert chips.status == "missing"
    assert "tt-kmd" in chips.todo


def test_a_wrong_choice_of_chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip_machine(tmp_path)
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "7")
    chips = checks_on(tmp_path)["chips"]
    assert chips.status == "missing"
    assert "'7'" in chips.found


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check = checks_on(tmp_path, port)["port"]
    assert check.status == "warning"
    assert str(port) in check.found
    assert "--port" in check.todo
    assert "--port" not in check.found  # the advice stands once


@pytest.fixture
def answering() -> Iterator[tuple[int, list[bytes]]]:
    """A program that listens on a port of the loopback, and what it answers to GET, whatever is asked."""
    body: list[bytes] = [b""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/info" else 404)
            self.end_headers()
            self.wfile.write(body[0])

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server.server_port, body
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_the_port_of_a_service_that_runs_already(
    tmp_path: Path, answering: tuple[int, list[bytes]]
) -> None:
    port, body = answering
    info = {"service": "sam3_ray", "version": "0.1.0", "checkpoint": "demo", "backend": "cpu"}
    body[0] = json.dumps(info).encode()
    check = checks_on(tmp_path, port)["port"]
    assert (check.status, check.todo) == ("ok", "")
    assert f"port {port}" in check.found
    assert "by a sam3_ray that is running: demo, cpu" in check.found


@pytest.mark.parametrize(
    "answer", [b"", b"<html>", b"[1]", b'{"service": "other"}', b'{"service": "sam3_ray"}', b"\xff"]
)
def test_the_port_of_another_program(
    tmp_path: Path, answering: tuple[int, list[bytes]], answer: bytes
) -> None:
    port, body = answering
    body[0] = answer
    check = checks_on(tmp_path, port)["port"]
    assert check.status == "warning"
    assert "sam3_ray that is running" not in check.found


def test_no_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3_BPE_PATH", str(tmp_path / "absent.gz"))
    vocabulary = checks_on(tmp_path)["vocabulary"]
    assert vocabulary.status == "missing"
    assert "SAM3_BPE_PATH" in vocabulary.found


def test_something_missing_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAM3_BPE_PATH", str(tmp_path / "absent.gz"))
    assert main(["doctor", "--port", free_port()]) == 1
    assert "Not ready" in capsys.readouterr().out


@pytest.fixture
def hub() -> Iterator[tuple[str, list[int], list[str]]]:
    """A Hub on loopback: its address, the status it answers with, and what it was asked."""
    status = [200]
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(f"{self.command} {self.path} {self.headers.get('authorization')}")
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", status, asked
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.mark.parametrize(
    ("token", "answers", "found"),
    [
        (None, 401, "there is no Hub token here"),
        ("hf_x", 403, "may not read it (403)"),
        ("hf_x", 404, "answers 404"),
        ("hf_x", 302, "the Hub gives them"),
    ],
)
def test_access_to_the_gated_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hub: tuple[str, list[int], list[str]],
    token: str | None,
    answers: int,
    found: str,
) -> None:
    address, status, asked = hub
    status[0] = answers
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    weights = checks_on(tmp_path)["weights"]
    assert found in weights.found
    assert weights.status == ("ok" if answers < 400 else "warning")
    wanted = "/facebook/sam3/resolve/3c879f39826c281e95690f02c7821c4de09afae7/sam3.pt"
    bearer = f"Bearer {token}" if token else None
    assert asked[-1] == f"HEAD {wanted} {bearer}"
    assert all(line.startswith("HEAD") for line in asked)  # nothing is downloaded
