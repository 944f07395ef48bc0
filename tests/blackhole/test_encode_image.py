"""The image part as a trace: replays equal untraced runs, hits equal misses, nothing else moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sam3_ray.checkpoint import DEMO_CHECKPOINT
from sam3_ray.config import DEMO
from tests.blackhole.upstream_parts import photo_like

PICTURES = 100
SMALL_CACHE = 20_000_000
"""Bytes: 28 of the demo checkpoint's images."""


@pytest.fixture(scope="module")
def backend(emulator: Any) -> Iterator[Any]:
    """The demo checkpoint on one emulated chip, with the stock dispatch."""
    from sam3_ray.backends.blackhole import open_backend

    backend = open_backend(
        DEMO_CHECKPOINT, dispatch="worker", image_cache_bytes=SMALL_CACHE, num_threads=1
    )
    yield backend
    backend.close()


def features(backend: Any, image: Any) -> list[np.ndarray]:
    """What the prompt part reads of an image."""
    import ttnn

    backend._images.load(image)
    return [ttnn.to_torch(buffer).float().numpy() for buffer in backend._images.buffers]


def same_bits(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_hundred_pictures_through_one_trace_equal_untraced_runs(backend: Any) -> None:
    """And each hit equals its miss: bit for bit."""
    squares = [photo_like(DEMO.image_size, seed) for seed in range(PICTURES)]
    distinct = set()
    for square in squares:
        image = backend.encode_image(backend.prepare(square))
        traced = features(backend, image)
        backend._trace._run()  # the same work, eagerly, on the pixels that are still there
        eager = features(backend, image)
        backend._images.invalidate()
        hit = features(backend, image)
        assert same_bits(traced, eager)
        assert same_bits(traced, hit)
        distinct.add(traced[2].tobytes())
        image.release()
    assert len(distinct) == PICTURES


def test_a_stale_input_is_seen(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth planted mistake: pixels that do not reach the buffer give the last image's features."""
    first, second = (backend.prepare(photo_like(DEMO.image_size, seed)) for seed in (1, 2))
    images = [backend.encode_image(first)]
    right = features(backend, images[0])
    monkeypatch.setattr(backend, "_upload", lambda _: None)
    images.append(backend.encode_image(second))
    stale = features(backend, images[1])
    monkeypatch.undo()
    images.append(backend.encode_image(second))
    fresh = features(backend, images[2])
    for image in images:
        image.release()
    assert same_bits(stale, right)
    correlation = np.corrcoef(stale[0].ravel(), fresh[0].ravel())[0, 1]
    assert correlation < 0.99  # the looser end-to-end bar


def test_nothing_but_pixels_goes_up_and_only_features_come_down(
    backend: Any, emulator: Any
) -> None:
    prepared = backend.prepare(photo_like(DEMO.image_size))
    emulator.records.clear()
    image = backend.encode_image(prepared)
    up = [t for t in emulator.records.transfers if t.direction == "up"]
    assert [(t.shape, t.dtype) for t in up] == [((1, 1, *prepared.shape), "uint8")]
    assert not [t for t in emulator.records.transfers if t.direction == "down"]
    assert len(emulator.records.replays) == 1
    # Beside the replay only the copies into the cache's slot.
    assert {op.name for op in emulator.records.operations} == {"ttnn.copy"}
    image.release()
