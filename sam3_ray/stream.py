"""Many images one after another: the next one is read and decoded while the model works on this one."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sam3_ray.answers import Answer
from sam3_ray.engine import Engine
from sam3_ray.images import ImageSource
from sam3_ray.prompt import Request

if TYPE_CHECKING:
    from sam3_ray.images import ImageLike


@dataclass(frozen=True)
class _Loaded:
    """An image that is decoded, or what kept it from that."""

    source: ImageSource | None
    error: Exception | None = None


def checked_images(images: Any) -> Iterator[ImageLike]:
    """The images of a collection, none read yet.

    An array of four dimensions is one, and so is a one-dimensional array of paths. Other arrays are an image,
    or might be one: their rows would be taken for images.

    Raises:
        TypeError: one image, or no collection at all.
    """
    if isinstance(images, (str, bytes, bytearray, memoryview, os.PathLike)):
        raise TypeError(f"images must be a list or an iterator of images, got {images!r:.80}")
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    is_tensor = tensor is not None and isinstance(images, tensor)
    if isinstance(images, np.ndarray) or is_tensor:
        of_objects = images.ndim == 1 and not is_tensor and images.dtype.kind in "OUS"
        if images.ndim != 4 and not of_objects:
            raise TypeError(
                f"images must be a list or an iterator of images, got one array of shape "
                f"{tuple(images.shape)}; for one image give [image], for images along the first axis "
                "list(images)"
            )
    try:
        return iter(images)
    except TypeError:
        raise TypeError(
            f"images must be a list or an iterator of images, got a {type(images).__name__}"
        ) from None


def answer_each(
    engine: Engine,
    images: Iterator[ImageLike],
    request_of: Callable[[ImageSource], Request],
) -> Generator[Answer, None, None]:
    """The answer to each image, in order. What goes wrong with one is its answer's error, and names it.

    Args:
        engine: answers.
        images: read one ahead.
        request_of: what is asked of an image.

    Raises:
        RuntimeError: the engine is closed.
        Exception: whatever reading ``images`` itself raises.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="sam3_ray-decode") as pool:
        future = pool.submit(_load_next, engine, images)
        for index in itertools.count():
            loaded = future.result()
            if loaded is None:
                return
            future = pool.submit(_load_next, engine, images)
            engine.check_open()  # whatever that does to an image is not the image's fault
            if loaded.source is None or loaded.error is not None:
                answer = Answer(error=loaded.error)
            else:
                answer = engine.run([request_of(loaded.source)])[0]
            if answer.error is not None:
                answer = replace(answer, error=_named(answer.error, index, loaded.source))
            yield answer


def _load_next(engine: Engine, images: Iterator[ImageLike]) -> _Loaded | None:
    try:
        image = next(images)
    except StopIteration:
        return None
    source = None
    try:
        source = ImageSource.of(image)
        engine.preload(source)
    except Exception as error:  # noqa: BLE001 - it is this image's answer
        return _Loaded(source, error)
    return _Loaded(source)


def _named(error: Exception, index: int, source: ImageSource | None) -> Exception:
    """The same kind of error with the image's place and name before its message."""
    name = "" if source is None else f" ({source.name})"
    message = f"image {index}{name}: {error}"
    try:
        named = type(error)(message)
    except Exception:  # noqa: BLE001 - a constructor that takes something else
        named = RuntimeError(f"{message} ({type(error).__name__})")
    named.__cause__ = error
    return named
