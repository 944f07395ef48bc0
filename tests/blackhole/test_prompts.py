"""The whole model on one emulated chip: what crosses to the host, the same bits, runs of phrases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sam3_ray import Sam3
from sam3_ray.config import DEMO
from tests.blackhole.upstream_parts import photo_like
from tests.demo_scenes import scenes

SMALL_CACHE = 20_000_000
PICTURES = 20
"""Of the frozen ones, for the agreement with the CPU."""


@pytest.fixture(scope="module")
def model(emulator: Any) -> Iterator[Sam3]:
    with Sam3.from_pretrained(
        "demo", backend="blackhole", dispatch="worker", image_cache_bytes=SMALL_CACHE, warmup=0
    ) as model:
        yield model


@pytest.fixture
def backend(model: Sam3) -> Any:
    """Its backend, with every slot of the image cache free."""
    model.engine.clear_caches()
    return model.engine.backend


def test_only_what_must_crosses_to_the_host(model: Sam3, emulator: Any) -> None:
    """Pixels up once, ids of a new phrase, numbers of the kept queries; answers and kept masks down."""
    scene = next(iter(scenes(1)))
    phrase = next(phrase for phrase, indices in scene.phrases if indices)
    pixels = (1, 1, DEMO.grid**2, 608)
    emulator.records.clear()
    found = model(scene.image, phrase)
    assert 1 <= len(found) <= 32
    bucket = next(n for n in (1, 2, 4, 8, 16, 32) if n >= len(found))
    expected = [
        ("up", pixels, "uint8"),
        ("up", (1, DEMO.text_context), "uint32"),
        ("down", (1, 1, 64, 65), "float32"),
        ("up", (1, bucket), "uint32"),
        ("down", (1, 1, bucket, DEMO.mask_size**2), "bfloat16"),
    ]
    crossed = [(t.direction, t.shape, t.dtype) for t in emulator.records.transfers]
    assert crossed == expected
    assert sum(t.nbytes for t in emulator.records.transfers if t.dtype == "float32") < 30_000
    # The same again: neither pixels nor ids.
    emulator.records.clear()
    model(scene.image, phrase)
    crossed = [(t.direction, t.shape, t.dtype) for t in emulator.records.transfers]
    assert crossed == expected[2:]
    # Nothing but copies between buffers is launched outside the traces.
    assert {op.name for op in emulator.records.operations} <= {"ttnn.copy"}


def test_the_same_request_gives_the_same_bits(model: Sam3) -> None:
    """Twenty times, with other images and other numbers of phrases between."""
    image, phrases = photo_like(200, 1), ["red circle", "a star", "black ring"]
    options: dict[str, Any] = {"threshold": 0.0, "max_instances": 5, "return_mask_logits": True}
    first = model(image, phrases, **options)
    for i in range(20):
        model(photo_like(90, 10 + i), [f"phrase {j}" for j in range(i % 4 + 1)], threshold=0.0)
        again = model(image, phrases, **options)
        for a, b in zip(first, again, strict=True):
            assert np.array_equal(a.scores, b.scores)
            assert np.array_equal(a.boxes, b.boxes)
            assert np.array_equal(a.mask_logits, b.mask_logits)


def test_phrases_of_a_run_answer_as_they_do_alone(model: Sam3) -> None:
    for scene in scenes(3):
        phrases = [phrase for phrase, _ in scene.phrases[:4]]
        alone = [model(scene.image, phrase, threshold=0.3) for phrase in phrases]
        for count in (2, 4):
            for a, b in zip(
                model(scene.image, phrases[:count], threshold=0.3), alone, strict=False
            ):
                assert len(a) == len(b)
                np.testing.assert_allclose(a.scores, b.scores, atol=0.01)
                assert a.presence == pytest.approx(b.presence, abs=0.01)


def test_what_is_kept_is_what_the_cpu_keeps(model: Sam3) -> None:
    """F1 of 0.99 or more at threshold 0.5, prompts in groups of 1 to 4."""
    kept = agreed = expected = 0
    with Sam3.from_pretrained("demo", backend="cpu") as cpu:
        for i, scene in enumerate(scenes(PICTURES)):
            phrases = [phrase for phrase, _ in scene.phrases[: i % 4 + 1]]
            for a, b in zip(model(scene.image, phrases), cpu(scene.image, phrases), strict=True):
                kept, expected = kept + len(a), expected + len(b)
                agreed += sum(
                    bool((np.abs(b.boxes - box).max(axis=1) < 0.02 * max(scene.image.size)).any())
                    for box in a.boxes
                )
    assert 2 * agreed / (kept + expected) >= 0.99


def test_masks_of_an_earlier_grounding_are_refused(backend: Any) -> None:
    image = backend.encode_image(backend.prepare(photo_like(64)))
    text = backend.encode_text(["red circle"])
    earlier = backend.ground(image, text)
    backend.ground(image, text)
    with pytest.raises(RuntimeError, match="earlier ground"):
        backend.read_masks(earlier.masks, [(0, 0)])
    image.release()


def test_masks_are_of_the_image_that_was_grounded(backend: Any) -> None:
    """Though another one was encoded since, and though a step before failed."""
    images = [backend.encode_image(backend.prepare(photo_like(64, seed))) for seed in (1, 2)]
    text = backend.encode_text(["red circle", "a star"])
    grounding = backend.ground(images[0], text)
    kept = [(0, 0), (1, 3)]
    expected = backend.read_masks(grounding.masks, kept)
    images.append(backend.encode_image(backend.prepare(photo_like(64, 3))))
    assert np.array_equal(backend.read_masks(grounding.masks, kept), expected)
    other = backend.ground(images[2], text)
    assert not np.array_equal(backend.read_masks(other.masks, kept), expected)
    grounding = backend.ground(images[0], text)
    assert np.array_equal(backend.read_masks(grounding.masks, kept), expected)
    for image in images:
        image.release()
    with pytest.raises(RuntimeError, match="released"):
        backend.read_masks(grounding.masks, kept)


def test_pixels_that_failed_are_made_again(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    image = backend.encode_image(backend.prepare(photo_like(64, 4)))
    grounding = backend.ground(image, backend.encode_text(["red circle", "a star"]))
    expected = backend.read_masks(grounding.masks, [(0, 0)])

    def failing() -> None:
        raise OSError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(backend._prompts.traces["pixels"], "execute", failing)
        with pytest.raises(OSError, match="planted"):
            backend.read_masks(grounding.masks, [(1, 0)])
    assert np.array_equal(backend.read_masks(grounding.masks, [(0, 0)]), expected)
    image.release()


def test_a_phrase_that_nobody_holds_frees_its_slot(backend: Any) -> None:
    backend._prompts._resident = [None] * 4  # what is in the traces' buffers is held there
    free = len(backend._prompts._free_slots)
    text = backend.encode_text(["one", "two", "three"])
    assert len(backend._prompts._free_slots) == free - 3
    del text
    backend._prompts._resident = [None] * 4
    assert len(backend._prompts._free_slots) == free


def test_every_trace_is_named(model: Sam3) -> None:
    runs = ("1", "2", "4")
    buckets = ("1", "2", "4", "8", "16", "32", str(DEMO.queries))
    assert model.info["traces"] == [
        "image",
        *(f"text {n}" for n in runs),
        *(f"ground {n}" for n in runs),
        "pixels",
        *(f"masks {n}" for n in buckets),
    ]
