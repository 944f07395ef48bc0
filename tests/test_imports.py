"""Imports go down only, and ``import sam3_ray`` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "sam3_ray"

MAY_IMPORT = {
    # what a group is        which other groups it may import
    "bottom": (),
    "parts": ("bottom",),
    "base": ("bottom", "parts"),
    "backends": ("bottom", "parts", "base"),
    "engine": ("bottom", "parts", "base"),
    "api": ("bottom", "parts", "base", "backends", "engine"),
    "client": ("bottom", "parts"),
    "serve": ("bottom", "parts", "base", "engine", "api"),
    "data": ("bottom", "parts", "base", "engine", "api"),
    "cli": ("bottom", "parts", "base", "backends", "engine", "api", "client", "serve", "data"),
}
GROUP_OF = {
    "sam3_ray.errors": "bottom",
    "sam3_ray.settings": "bottom",
    "sam3_ray.config": "bottom",
    "sam3_ray.chips": "bottom",
    "sam3_ray.backends": "base",
    "sam3_ray.backends.base": "base",
    "sam3_ray.engine": "engine",
    "sam3_ray.api": "api",
    "sam3_ray.stream": "api",
    "sam3_ray.warmup": "api",
    "sam3_ray.client": "client",
}
"""Modules whose place is not told by their folder; any other module of the package's top is a part."""


def group_of(module: str) -> str:
    if module in GROUP_OF:
        return GROUP_OF[module]
    folder = module.split(".")[1]
    return folder if folder in MAY_IMPORT else "parts"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_by(path: Path) -> set[str]:
    """The modules of this package that a file imports anywhere, in functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in MODULES else str(node.module) for name in names)
    # `import sam3_ray` itself is how one reads __version__: it imports nothing.
    return {name for name in found if name.startswith("sam3_ray.")}


@pytest.mark.parametrize("module", [name for name in MODULES if name != "sam3_ray"])
def test_imports_go_down_only(module: str) -> None:
    group = group_of(module)
    allowed = {group, *MAY_IMPORT[group]}
    upward = {name for name in imported_by(MODULES[module]) if group_of(name) not in allowed}
    assert not upward, f"{module} ({group}) may import {sorted(allowed)} only, not {sorted(upward)}"


def test_the_walk_sees_imports() -> None:
    # Without this a broken walk would let everything pass.
    assert "sam3_ray.backends.base" in imported_by(MODULES["sam3_ray.engine"])


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import sam3_ray", {"torch", "ttnn", "ray", "numpy", "sam3"}),
        ("import sam3_ray.chips, sam3_ray.settings", {"torch", "ttnn", "ray", "numpy", "sam3"}),
        ("import sam3_ray.client", {"torch", "ttnn", "ray", "sam3"}),
        ("import sam3_ray.cli.main", {"torch", "ttnn", "ray", "numpy", "sam3"}),
        ("import sam3_ray.backends.base", {"torch", "ttnn", "ray", "sam3"}),
        ("import sam3_ray.engine", {"ttnn", "ray", "sam3"}),
    ],
)
def test_an_import_loads_nothing_heavy(statement: str, heavy: set[str]) -> None:
    code = f"{statement}\nimport sys\nprint(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
