"""The pictures of ``examples/`` are what their script draws, and are listed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from sam3_ray import Sam3

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
LISTING = json.loads((EXAMPLES / "examples.json").read_text())


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_examples", ROOT / "scripts" / "make_examples.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_each_picture_is_listed_as_it_is() -> None:
    files = {path.name for path in EXAMPLES.iterdir()} - {"examples.json"}
    assert {entry["file"] for entry in LISTING} == files
    for entry in LISTING:
        with Image.open(EXAMPLES / entry["file"]) as picture:
            assert picture.size == (entry["width"], entry["height"])
        assert entry["alt"]
        assert 3 <= len(entry["prompts"]) <= 4
    kinds = [entry["kind"] for entry in LISTING]
    assert kinds.count("shapes") >= 5
    assert kinds.count("photo") >= 4
    assert sum(path.stat().st_size for path in EXAMPLES.iterdir()) < 2 * 1024 * 1024


@pytest.mark.parametrize("file", [e["file"] for e in LISTING if e["kind"] == "shapes"])
def test_the_script_draws_the_shapes_again(script: ModuleType, file: str) -> None:
    drawn, masks = script.draw_shapes(script.example(file).source)
    with Image.open(EXAMPLES / file) as saved:
        np.testing.assert_array_equal(np.asarray(drawn), np.asarray(saved))
    assert masks.any((1, 2)).all()  # each shape can be seen


def test_the_script_renders_a_photo_again(script: ModuleType) -> None:
    drawn = script.picture_of(script.example("harbour"))
    with Image.open(EXAMPLES / "harbour.jpg") as saved:
        difference = np.abs(np.asarray(drawn, np.float32) - np.asarray(saved, np.float32))
    assert difference.mean() < 4  # what JPEG leaves out of the grain


@pytest.fixture(scope="module")
def demo_model() -> Iterator[Sam3]:
    with Sam3.from_pretrained("demo", backend="cpu") as model:
        yield model


@pytest.mark.parametrize("file", [e["file"] for e in LISTING if e["kind"] == "shapes"])
def test_the_demo_checkpoint_finds_what_each_suggestion_names(
    script: ModuleType, demo_model: Sam3, file: str
) -> None:
    """As many instances as there are, each of them on its shape; with room on both sides of the threshold."""
    example = script.example(file)
    _, masks = script.draw_shapes(example.source)
    for result in demo_model(EXAMPLES / file, list(example.prompts), threshold=0.35):
        words = result.prompt.split()
        named = [
            mask
            for shape, mask in zip(example.source.shapes, masks, strict=True)
            if words in ([shape.kind], [shape.colour, shape.kind])
        ]
        assert len(result) == len(named), (result.prompt, result.scores)
        assert (result.scores > 0.6).all(), (result.prompt, result.scores)
        for shape in named:
            overlap = [(shape & found).sum() / (shape | found).sum() for found in result.masks]
            assert max(overlap) > 0.75, result.prompt
