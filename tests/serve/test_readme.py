"""README and docs: their examples run against a real service, and their tables name what there is.

A ``bash`` or ``python`` block is run as a reader of the page would: in a folder that has ``examples/`` and
``.venv``, with nothing of that environment to be found but where the page has told to activate it by then. A
``console`` block is only shown.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import typing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sam3_ray import Sam3
from sam3_ray.cli.main import COMMANDS
from sam3_ray.serve.config import ServeConfig
from sam3_ray.serve.errors import ProblemType

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
SHOWN_URL = "http://127.0.0.1:8000"
ACTIVATE = ". .venv/bin/activate"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    activated: bool
    """An earlier block of the page activates the environment."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        activated = False
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page.name, line, match[1], match[2], activated))
            activated |= match[1] == "bash" and match[2].strip() == ACTIVATE
    return found


RUN = [block for block in blocks() if block.language in ("bash", "python")]


def test_readme_and_docs_have_examples_to_run() -> None:
    kinds = {(block.page, block.language) for block in RUN}
    assert {("README.md", "bash"), ("README.md", "python")} <= kinds
    assert {("http.md", "bash"), ("http.md", "python"), ("python.md", "python")} <= kinds
    ways = "".join(block.text for block in RUN if block.page == "http.md")
    for way in ("-F image=@", '"image": "%s"', "--data-binary @", '"image_digest'):
        assert way in ways.replace("\\", ""), f"docs/http.md has no example of {way}"


def without(environment: Path) -> dict[str, str]:
    """This process's variables as they were before it was in a virtual environment."""
    plain = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")}
    places = plain["PATH"].split(os.pathsep)
    own = (environment / "bin").resolve()
    plain["PATH"] = os.pathsep.join(p for p in places if p and Path(p).resolve() != own)
    return plain


@pytest.mark.parametrize("block", RUN, ids=str)
def test_an_example_runs(block: Block, service: httpx.Client, tmp_path: Path) -> None:
    environment = Path(sys.prefix)
    assert (environment / "bin" / "activate").is_file(), "the tests run in a virtual environment"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(environment)
    text = block.text.replace(SHOWN_URL, str(service.base_url).rstrip("/"))
    script = tmp_path / f"example.{block.language}"
    script.write_text(text)
    interpreter = {
        "bash": ["bash", "-euo", "pipefail"],
        "python": ["python3", "-W", "error::RuntimeWarning"],
    }[block.language]
    command = " ".join([*interpreter, script.name])
    done = subprocess.run(
        ["bash", "-euc", f"{ACTIVATE}\n{command}" if block.activated else command],
        cwd=tmp_path,
        env=without(environment),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{text}\n{done.stdout}\n{done.stderr}"
    if block.language == "bash" and "curl" in text:
        answer = json.loads(done.stdout)
        assert "results" in answer, answer
        found = {result["prompt"]: result["num_instances"] for result in answer["results"]}
        assert found.pop("car", 0) == 0
        assert all(count > 0 for count in found.values()), found
    if "sam3-ray label" in text:
        assert '"finished": true' in (tmp_path / "labels" / "manifest.json").read_text()
        assert "data:image/jpeg" in (tmp_path / "labels" / "preview.html").read_text()
    written = {path.name for path in tmp_path.iterdir()} - {"examples", ".venv", script.name}
    assert ("overlay.png" in written) == ("overlay.png" in text)
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {f"/{name}" for name in written} <= set(ignored)


def test_the_table_names_every_argument_and_its_allowed_values() -> None:
    rows = {
        name: row
        for row in section("python.md", "`Sam3.from_pretrained`").splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split(" | ")[0])
    }
    arguments = inspect.signature(Sam3.from_pretrained).parameters
    assert set(rows) == set(arguments)
    hints = typing.get_type_hints(Sam3.from_pretrained)
    for name in arguments:
        for part in (hints[name], *typing.get_args(hints[name])):
            if typing.get_origin(part) is typing.Literal:
                for value in typing.get_args(part):
                    assert str(value) in rows[name], (name, value)


def test_targets_and_commands_that_are_shown_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(page.read_text() for page in PAGES)
    code = "\n".join(re.findall(r"`[^`\n]+`", text)) + "\n".join(block.text for block in blocks())
    named = set(re.findall(r"\bmake ([a-z-]+)", code))
    assert {"serve", "test", "install"} <= named
    assert named <= targets
    assert set(re.findall(r"sam3-ray ([a-z]+)", code)) <= set(COMMANDS)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", page.read_text()):
            if target and not target.startswith("https://"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def section(page: str, title: str) -> str:
    """A page's text below one of its headings of the second level."""
    return (ROOT / "docs" / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def table_names(text: str) -> set[str]:
    """What the first cells of the tables of a text name in code style."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_table_names_every_environment_variable() -> None:
    source = (ROOT / "sam3_ray" / "settings.py").read_text()
    knobs = set(re.findall(r"\"((?:SAM3|TT)_[A-Z_]+)\"", source))
    assert len(knobs) >= 11
    assert table_names(section("python.md", "Environment variables")) == knobs


def test_the_table_names_every_key_of_the_configuration() -> None:
    assert table_names(section("serving.md", "Configuration")) == set(ServeConfig.model_fields)


def test_the_table_names_every_problem_with_its_status() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| (\d{3}) \|", (ROOT / "docs" / "http.md").read_text(), re.M
    )
    assert {slug: int(status) for slug, status in rows} == {
        kind.slug: kind.status for kind in ProblemType
    }
