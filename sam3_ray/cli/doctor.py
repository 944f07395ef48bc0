"""``sam3-ray doctor``: what is here, and what to do about what is not. Starts and downloads nothing."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from sam3_ray import __version__, chips
from sam3_ray.cli.doctor_check import Check, Status
from sam3_ray.cli.doctor_chips import check_chips, check_dispatch, check_what_chips_need
from sam3_ray.errors import CheckpointError, WeightsNotFoundError

DESCRIPTION = """\
Check this machine: Python and packages, Tenstorrent chips and what they need, weights and the access to them,
the port, memory. Nothing is started, opened or downloaded; without a network it takes a few seconds.

Each line is ok, a warning (something works less well, or not everything does), or missing (what this
machine is meant to run cannot run). The exit code is 1 where something is missing, else 0.
"""

EXAMPLES = """\
examples:
  sam3-ray doctor
  sam3-ray doctor --json
  TT_VISIBLE_DEVICES=0,1 sam3-ray doctor       as the service would see it
"""

WANTED_PYTHON = (3, 12)

GIB = 1024**3
FULL_MODEL_BYTES = 10 * GIB
"""Memory for the full model on the CPU: 3.4 GB of float32 weights, activations, Ray."""

DEMO_BYTES = 3 * GIB
"""Memory for Ray, Serve and the demo checkpoint."""

SHARED_MEMORY_BYTES = 512 * 1024 * 1024
"""What Ray's object store should have in /dev/shm; with less Ray takes slow files in /tmp."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--port", type=int, default=8000, help="the port to look at (default: 8000)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Look, and tell."""
    checks = list(examine(port=arguments.port))
    ok = all(check.status != "missing" for check in checks)
    if arguments.json:
        document = {"ok": ok, "version": __version__, "checks": [asdict(check) for check in checks]}
        print(json.dumps(document, indent=2, ensure_ascii=False))
        return 0 if ok else 1
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.status:8} {check.name:{width}}  {check.found}")
        if check.todo:
            print(f"{'':8} {'':{width}}  -> {check.todo}")
    print("\nReady." if ok else "\nNot ready: see what is missing above.")
    return 0 if ok else 1


def examine(*, root: Path = Path("/"), port: int = 8000) -> Iterator[Check]:
    """Every check, in order.

    Args:
        root: where ``dev``, ``proc`` and ``sys`` are; another folder in tests.
        port: that the service would listen on.
    """
    machine = chips.look(root)
    try:
        visible = machine.visible()
        problem = ""
    except ValueError as error:
        visible, problem = (), str(error)
    with_chips = bool(visible)
    yield _python()
    yield _packages(with_chips)
    yield _bytecode()
    yield from _package("torch")
    yield from _package("ray")
    yield _ttnn(with_chips)
    if problem:
        yield Check("chips", "missing", problem, f"correct {chips.VISIBLE_DEVICES}, or unset it")
    else:
        yield check_chips(machine, visible, root)
    if machine.chips:
        yield from check_what_chips_need(machine, visible)
        yield from check_dispatch(visible)
    yield _guarded("vocabulary", _vocabulary)
    yield _guarded("demo checkpoint", _demo)
    yield _guarded("weights", lambda: _weights(with_chips))
    yield _port(port)
    yield _memory()
    yield _shared_memory()


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """A check; a knob of the environment with an impossible value is what it finds."""
    try:
        return check()
    except (ValueError, OSError) as error:
        return Check(name, "missing", str(error), "mend that, and run this again")


# -- software --------------------------------------------------------------------------------------


def _python() -> Check:
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info[:2] == WANTED_PYTHON:
        return Check("Python", "ok", found)
    return Check("Python", "missing", found, "use Python 3.12: ttnn has wheels for it only")


def _packages(with_chips: bool) -> Check:
    from packaging.requirements import Requirement

    wrong = []
    wanted = 0
    for text in metadata.requires("sam3-ray") or []:
        requirement = Requirement(text)
        extras = ("", "blackhole") if with_chips else ("",)
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": e}) for e in extras
        ):
            continue
        wanted += 1
        version = _version(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if not wrong:
        return Check("packages", "ok", f"sam3-ray {__version__} and its {wanted} packages")
    return Check("packages", "missing", "; ".join(wrong), "install again: make install")


def _bytecode() -> Check:
    """Compiled Python files are the difference between a start of 15 s and one of 60 s."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        return Check("bytecode", "warning", "ray is not installed")
    if Path(importlib.util.cache_from_source(spec.origin)).is_file():
        return Check("bytecode", "ok", "packages are compiled")
    packages = Path(spec.origin).parent.parent
    never = " (PYTHONDONTWRITEBYTECODE is set)" if sys.dont_write_bytecode else ""
    return Check(
        "bytecode",
        "warning",
        f"packages are not compiled{never}: every process compiles them anew, a start takes minutes",
        f"once: {sys.executable} -m compileall -q -j 0 {packages}",
    )


def _package(name: str) -> Iterator[Check]:
    version = _version(name)
    if version is None:
        yield Check(name, "missing", "not installed", "install again: make install")
    else:
        yield Check(name, "ok", version)


def _ttnn(with_chips: bool) -> Check:
    version = _version("ttnn")
    if version is not None:
        return Check("ttnn", "ok", version)
    if with_chips:
        return Check(
            "ttnn",
            "missing",
            "not installed, and there are chips",
            "pip install 'sam3-ray[blackhole]'",
        )
    return Check("ttnn", "ok", "not installed; not needed without a chip")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# -- model -----------------------------------------------------------------------------------------


def _vocabulary() -> Check:
    from sam3_ray.text import check_bpe_file, find_bpe_file

    path = find_bpe_file()
    check_bpe_file(path)
    return Check("vocabulary", "ok", str(path))


def _demo() -> Check:
    from sam3_ray.checkpoint import DEMO_CHECKPOINT
    from sam3_ray.checkpoint_header import read_header

    try:
        header = read_header(DEMO_CHECKPOINT)
    except CheckpointError as error:
        return Check("demo checkpoint", "missing", str(error), "install sam3-ray again")
    return Check("demo checkpoint", "ok", f"{header.nbytes / 1e6:.1f} MB, {header.tensors} tensors")


def _weights(with_chips: bool) -> Check:
    """SAM3's weights on this disk, or whether the Hub would give them."""
    from sam3_ray.checkpoint import local_checkpoint
    from sam3_ray.checkpoint_header import read_header

    try:
        local = local_checkpoint()
        if local is not None:
            header = read_header(local.path)
            return Check(
                "weights", "ok", f"{local.label}: {local.path}, {header.nbytes / 1e9:.2f} GB"
            )
    except (WeightsNotFoundError, CheckpointError) as error:
        return Check(
            "weights", "missing", str(error), "correct SAM3_WEIGHTS_DIR, or fetch the file again"
        )
    refused = _hub_refusal()
    if refused is None:
        return Check(
            "weights", "ok", "not on this disk; the Hub gives them at the first start (3.45 GB)"
        )
    found, todo = refused
    if with_chips:
        return Check("weights", "missing", found, todo)
    return Check("weights", "warning", f"{found}; the demo checkpoint is served", todo)


def _hub_refusal() -> tuple[str, str] | None:
    """What stands between this machine and the weights, and what to do; None where nothing does."""
    from sam3_ray.hub import PROBE_TIMEOUT_S, hub_endpoint, hub_problem
    from sam3_ray.settings import CHECKPOINT_FILE, PINNED_REVISION, REPO_ID, settings

    by_hand = f"put {CHECKPOINT_FILE} in a folder and set SAM3_WEIGHTS_DIR to it"
    problem = hub_problem()
    if problem is not None:
        return f"{REPO_ID} is not on this disk, and {problem}", by_hand
    import httpx
    from huggingface_hub import get_token

    token = get_token()
    revision = settings().weights_revision or PINNED_REVISION
    try:
        answer = httpx.head(
            f"{hub_endpoint()}/{REPO_ID}/resolve/{revision}/{CHECKPOINT_FILE}",
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=PROBE_TIMEOUT_S,
        )
    except httpx.TransportError as error:
        return f"{REPO_ID} is not on this disk, and the Hub does not answer ({error})", by_hand
    if answer.status_code < 400:
        return None
    page = f"https://huggingface.co/{REPO_ID}"
    if token is None:
        return (
            f"{REPO_ID} is gated, and there is no Hub token here",
            f"request access at {page}, then `hf auth login` once; or {by_hand}",
        )
    if answer.status_code in (401, 403):
        return (
            f"{REPO_ID} is gated, and the Hub token here may not read it ({answer.status_code})",
            f"request access at {page} with the token's account (a fine-grained token also needs the right "
            f"to read gated repositories); or {by_hand}",
        )
    return f"the Hub answers {answer.status_code} for {REPO_ID} at {revision[:8]}", by_hand


# -- machine ---------------------------------------------------------------------------------------


def _port(port: int) -> Check:
    from sam3_ray.serve.address import AddressError, PortInUseError, check_port

    try:
        check_port("127.0.0.1", port)
    except PortInUseError as error:
        status: Status = "warning" if error.service is None else "ok"
        return Check("port", status, error.found, error.todo if error.service is None else "")
    except AddressError as error:
        return Check("port", "warning", str(error), "the service can take another one: --port")
    return Check("port", "ok", f"{port} is free")


def _memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
    if memory.available < DEMO_BYTES:
        return Check(
            "memory",
            "warning",
            found,
            f"Ray and the demo checkpoint want {DEMO_BYTES / GIB:.0f} GiB",
        )
    if memory.available < FULL_MODEL_BYTES:
        return Check(
            "memory",
            "warning",
            found,
            f"enough for the demo checkpoint; SAM3 on the CPU wants {FULL_MODEL_BYTES / GIB:.0f} GiB",
        )
    return Check("memory", "ok", found)


def _shared_memory() -> Check:
    folder = "/dev/shm"
    if not os.path.isdir(folder):
        return Check("shared memory", "warning", f"there is no {folder}", "mount a tmpfs there")
    total = shutil.disk_usage(folder).total
    found = f"{folder} {total / GIB:.2f} GiB"
    if total < SHARED_MEMORY_BYTES:
        return Check(
            "shared memory", "warning", found, "in Docker: --shm-size=2g; Ray is slow without"
        )
    return Check("shared memory", "ok", found)
