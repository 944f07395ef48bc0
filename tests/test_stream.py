"""Many images one after another: order, decoding ahead, and whose error an error is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sam3_ray import Sam3, Sam3Result
from sam3_ray.errors import ImageDecodeError
from sam3_ray.images import ImageSource
from tests.demo_scenes import scenes


@pytest.fixture(scope="module")
def model() -> Iterator[Sam3]:
    with Sam3.from_pretrained("demo", backend="cpu") as model:
        yield model


def test_predict_many_keeps_order_and_takes_iterators(model: Sam3) -> None:
    pictures = list(scenes(4, seed=31))
    phrases = ["red shape", "circle"]
    expected = [model(s.image, phrases) for s in pictures]
    for images in ([s.image for s in pictures], (s.image for s in pictures)):
        results = model.predict_many(images, phrases)
        assert [[r.prompt for r in rs] for rs in results] == [phrases] * 4
        for mine, theirs in zip(results, expected, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(a.scores, b.scores)
    single = model.predict_many([pictures[0].image], "circle")
    assert isinstance(single[0], Sam3Result)
    assert model.predict_many([], "circle") == []


def test_predict_many_decodes_the_next_image_while_the_model_works(
    model: Sam3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model waits, inside its work on image 0, until image 1 was decoded on another thread."""
    decoded = threading.Event()
    threads: list[int] = []
    images = [np.full((40, 40, 3), value, np.uint8) for value in (201, 202)]
    pixels, encode = ImageSource.pixels, model.engine.backend.encode_image

    def watched_pixels(source: ImageSource) -> Any:
        result = pixels(source)
        threads.append(threading.get_ident())
        if result[0, 0, 0] == 202:
            decoded.set()
        return result

    def waiting_encode(prepared: Any) -> Any:
        assert decoded.wait(60), "image 1 was not decoded while image 0 was in the model"
        return encode(prepared)

    monkeypatch.setattr(ImageSource, "pixels", watched_pixels)
    monkeypatch.setattr(model.engine.backend, "encode_image", waiting_encode)
    assert len(model.predict_many(images, "circle")) == 2
    assert threading.get_ident() not in threads


def test_predict_many_names_the_image(model: Sam3, tmp_path: Path) -> None:
    good = np.zeros((8, 8, 3), np.uint8)
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"nothing")
    with pytest.raises(ImageDecodeError, match=r"image 1 .*bad\.jpg"):
        model.predict_many([good, bad, good], "circle")
    with pytest.raises(FileNotFoundError, match=r"image 0 .*missing\.png"):
        model.predict_many([tmp_path / "missing.png"], "circle")
    with pytest.raises(TypeError, match="image 1"):
        model.predict_many([good, 3], "circle")  # type: ignore[list-item]
    mixed = list(model.predict_iter([good, bad, good], "circle", on_error="return"))
    assert [type(r) for r in mixed] == [Sam3Result, ImageDecodeError, Sam3Result]
    with pytest.raises(TypeError, match="list"):
        model.predict_many("street.jpg", "circle")


class _Unreadable:
    """A path that fails in a way of its own."""

    def __fspath__(self) -> str:
        raise LookupError("no path today")


@pytest.mark.parametrize(
    "bad",
    [
        torch.empty(3, 4, 4, device="meta"),
        torch.zeros(3, 4, 4).to_sparse(),
        torch.zeros(3, 4, 4, dtype=torch.complex64),
        np.zeros((4, 4), object),
        np.zeros((4, 4), "datetime64[s]"),
        _Unreadable(),
        "a\0b.png",
        None,
    ],
    ids=["meta", "sparse", "complex", "objects", "dates", "path", "null byte", "nothing"],
)
def test_whatever_fails_of_an_image_costs_no_other_its_answer(model: Sam3, bad: Any) -> None:
    good = np.zeros((8, 8, 3), np.uint8)
    first, error, last = model.predict_iter([good, bad, good], "circle", on_error="return")
    assert isinstance(first, Sam3Result)
    assert isinstance(last, Sam3Result)
    assert isinstance(error, Exception)
    assert str(error).startswith("image 1")
    with pytest.raises(type(error), match="image 1"):
        model.predict_many([good, bad], "circle")


def test_a_step_of_the_model_that_fails_for_one_image_is_that_images(
    model: Sam3, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OddError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(one, two)

    prepare = model.engine.backend.prepare

    def failing(pixels: Any) -> Any:
        if pixels[0, 0, 0] == 77:
            raise OddError(1, 2)
        return prepare(pixels)

    monkeypatch.setattr(model.engine.backend, "prepare", failing)
    images = [np.full((9, 9, 3), value, np.uint8) for value in (76, 77, 78)]
    first, error, last = model.predict_iter(images, "circle", on_error="return")
    assert [type(first), type(last)] == [Sam3Result, Sam3Result]
    assert "image 1" in str(error)
    assert "OddError" in str(error)
    assert isinstance(error.__cause__, OddError)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((8, 8, 3), np.uint8),
        np.zeros((8, 8), np.uint8),
        np.zeros(8, np.uint8),
        np.zeros((), np.uint8),
        torch.zeros(3, 8, 8),
        torch.zeros(8, 8),
        Image.new("RGB", (8, 8)),
        bytearray(b"a file"),
        memoryview(b"a file"),
        Path("a.png"),
        3,
    ],
    ids=lambda images: type(images).__name__ + str(getattr(images, "shape", "")),
)
def test_one_image_is_no_list_of_images(model: Sam3, images: Any) -> None:
    with pytest.raises(TypeError, match="list or an iterator"):
        model.predict_many(images, "circle")
    with pytest.raises(TypeError, match="list or an iterator"):
        model.predict_iter(images, "circle", on_error="return")  # at once, not when it is read


def test_arrays_of_images_are(model: Sam3, tmp_path: Path) -> None:
    batch = np.zeros((2, 8, 9, 3), np.uint8)
    Image.fromarray(batch[0]).save(tmp_path / "a.png")
    paths = np.array([str(tmp_path / "a.png")] * 2)
    for images in (batch, torch.from_numpy(batch).permute(0, 3, 1, 2), paths):
        results = model.predict_many(images, "circle")  # type: ignore[arg-type]
        assert [(r.width, r.height) for r in results] == [(9, 8)] * 2


def test_a_failing_iterator_is_the_callers_error(model: Sam3) -> None:
    def images() -> Iterator[Any]:
        yield np.zeros((8, 8, 3), np.uint8)
        raise RuntimeError("my own iterator broke")

    with pytest.raises(RuntimeError, match="my own iterator broke"):
        model.predict_many(images(), "circle")


def test_an_error_ends_the_decoding_thread(model: Sam3) -> None:
    """At once, though the error is held: a thread that the garbage collector has to join can be joined where
    that never ends, inside the start of another thread."""
    before = threading.active_count()
    with pytest.raises(TypeError, match="image 0") as held:
        model.predict_many([None, None], "circle")  # type: ignore[list-item]
    assert threading.active_count() == before
    assert held.value.__traceback__ is not None
