"""What must not be in the repository: places of one machine, registries, lock files, large files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MIB = 1024 * 1024

# Written in pieces, so that this file does not name them itself.
REGISTRY_HOSTS = [
    "pypi" + ".org",
    "pythonhosted" + ".org",
    "npmjs" + ".org",
    "deb.debian" + ".org",
    "archive.ubuntu" + ".com",
    "download.pytorch" + ".org",
    "crates" + ".io",
]
INDEX_OPTIONS = re.compile(r"--(extra-)?index" + r"-url|--find" + r"-links|[/]simple[/]")
MACHINE_PATHS = [
    "/" + "root/",
    "/" + "work/",
    "/" + "Users/",
    ".pye" + "nv/versions",
    "site-packages" + "/sam3_ray",
]
HOME_FOLDERS = re.compile(r"(?<![\w.~-])/" + r"home/\w")


def repository_files() -> list[Path]:
    """The files that are tracked, or would be with the next commit."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = [ROOT / name.decode() for name in done.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def texts() -> list[tuple[str, str]]:
    found = []
    for path in repository_files():
        data = path.read_bytes()
        if b"\0" not in data:
            found.append((str(path.relative_to(ROOT)), data.decode()))
    return found


def lines_with(needle: str | re.Pattern[str]) -> list[str]:
    pattern = re.compile(re.escape(needle)) if isinstance(needle, str) else needle
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_there_is_something_to_read() -> None:
    names = {name for name, _ in texts()}
    assert {"README.md", "pyproject.toml", "sam3_ray/__init__.py", "requirements.txt"} <= names


@pytest.mark.parametrize("host", REGISTRY_HOSTS)
def test_no_file_names_a_registry(host: str) -> None:
    assert lines_with(host) == []


def test_no_file_gives_an_index() -> None:
    assert lines_with(INDEX_OPTIONS) == []


@pytest.mark.parametrize("place", [*MACHINE_PATHS, HOME_FOLDERS], ids=str)
def test_no_file_names_a_place_of_one_machine(place: str | re.Pattern[str]) -> None:
    assert lines_with(place) == []


def test_no_file_names_this_checkout() -> None:
    assert lines_with(f"{ROOT}/") == []


def test_no_lock_file_is_tracked() -> None:
    locks = {
        "uv.lock",
        "poetry.lock",
        "Pipfile.lock",
        "package-lock.json",
        "yarn.lock",
        "pnpm-lock.yaml",
    }
    assert [path for path in repository_files() if path.name in locks] == []


def test_files_are_small() -> None:
    limits = {"sam3_ray/demo/sam3_demo.pt": 12 * MIB}
    too_large = {
        str(path.relative_to(ROOT)): path.stat().st_size
        for path in repository_files()
        if path.stat().st_size > limits.get(str(path.relative_to(ROOT)), MIB)
    }
    assert too_large == {}


def test_every_ray_that_is_started_says_where() -> None:
    """Without an address ``ray.init`` joins whatever Ray runs on the machine already."""
    start = re.compile(r"ray\.init\((?!\s*(address=|\)`))")
    loose = [
        f"{name}:{text[: found.start()].count(chr(10)) + 1}"
        for name, text in texts()
        if name.endswith(".py") and name != "tests/test_repository.py"
        for found in start.finditer(text)
    ]
    assert loose == []
