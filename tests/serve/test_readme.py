"""README and docs: their examples run against a real service, and their tables name what there is.

A ``bash`` or ``python`` block is run in a folder of its own that has ``examples/``; a ``console`` block is
only shown.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sam3_ray.cli.main import COMMANDS
from sam3_ray.serve.config import ServeConfig
from sam3_ray.serve.errors import ProblemType

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
SHOWN_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page.name, line, match[1], match[2]))
    return found


RUN = [block for block in blocks() if block.language in ("bash", "python")]


def test_readme_and_docs_have_examples_to_run() -> None:
    kinds = {(block.page, block.language) for block in RUN}
    assert {("README.md", "bash"), ("README.md", "python")} <= kinds
    assert {("http.md", "bash"), ("http.md", "python"), ("python.md", "python")} <= kinds
    ways = "".join(block.text for block in RUN if block.page == "http.md")
    for way in ("-F image=@", '"image": "%s"', "--data-binary @", '"image_digest'):
        assert way in ways.replace("\\", ""), f"docs/http.md has no example of {way}"


@pytest.mark.parametrize("block", RUN, ids=str)
def test_an_example_runs(block: Block, service: httpx.Client, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    text = block.text.replace(SHOWN_URL, str(service.base_url).rstrip("/"))
    bin_folder = Path(sys.executable).parent
    command = (
        ["bash", "-euo", "pipefail", "-c", text]
        if block.language == "bash"
        else [sys.executable, "-W", "error::RuntimeWarning", "-c", text]
    )
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"},
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
    for name in re.findall(r"overlay\.png", text):
        assert (tmp_path / name).stat().st_size > 1000


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


def table_names(page: str) -> set[str]:
    """What the first cells of the tables of a page name in code style."""
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_table_names_every_environment_variable() -> None:
    source = (ROOT / "sam3_ray" / "settings.py").read_text()
    knobs = set(re.findall(r"\"((?:SAM3|TT)_[A-Z_]+)\"", source))
    assert len(knobs) >= 11
    named = {name for name in table_names("python.md") if re.match(r"(SAM3|TT)_", name)}
    assert named == knobs


def test_the_table_names_every_key_of_the_configuration() -> None:
    assert table_names("serving.md") == set(ServeConfig.model_fields)


def test_the_table_names_every_problem_with_its_status() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| (\d{3}) \|", (ROOT / "docs" / "http.md").read_text(), re.M
    )
    assert {slug: int(status) for slug, status in rows} == {
        kind.slug: kind.status for kind in ProblemType
    }
