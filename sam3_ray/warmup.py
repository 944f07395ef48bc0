"""Warm-up: real calls of the shapes that will be asked for, so that the first request is no slower.

The variants and their defaults are spec/PYTHON.md's. Calls run on generated photo-like images and dummy
phrases and leave nothing in the caches, but for the text features of ``prompts``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sam3_ray.answers import finish
from sam3_ray.backends.base import Uint8Array
from sam3_ray.engine import Engine
from sam3_ray.images import ImageSource
from sam3_ray.prompt import MAX_INSTANCES_LIMIT, Prompt, Request

DEFAULT_WARMUP_VARIANTS: dict[str, tuple[Any, ...]] = {
    "prompt_counts": (1, 2, 3, 4),
    "image_sizes": ((1080, 1920), (1008, 1008)),
    "max_instances": (1, 2, 4, 8, 16, 32, 64, 200),
    "prompts": (),
}
"""What ``from_pretrained`` prepares on a chip: numbers of phrases, (height, width) in pixels, numbers of
masks read back, and phrases."""

_DUMMY_PHRASES = tuple(f"warm up phrase {i}" for i in range(64))


def checked_variants(variants: Mapping[str, Iterable[Any]]) -> dict[str, tuple[Any, ...]]:
    """Variants with their values checked.

    Raises:
        TypeError: values that are no collection.
        ValueError: an unknown key, or a value out of range, with the value.
    """
    unknown = sorted(set(variants) - set(DEFAULT_WARMUP_VARIANTS))
    if unknown:
        raise ValueError(
            f"unknown warm-up variants {unknown}; known: {sorted(DEFAULT_WARMUP_VARIANTS)}"
        )
    checked: dict[str, tuple[Any, ...]] = {}
    for key, values in variants.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"warm-up variant {key} must be a list, got {values!r}")
        checked[key] = tuple(_CHECKS[key](value) for value in values)
    return checked


class WarmUp:
    """Runs variants on an engine and remembers which are prepared."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seconds: dict[str, float] = {}

    def run(self, variants: Mapping[str, Iterable[Any]]) -> dict[str, float]:
        """Prepare what is not prepared yet.

        Returns:
            {variant: seconds} of those that ran; a variant reads ``image_sizes=(720, 1280)``.
        """
        ran: dict[str, float] = {}
        for key, values in checked_variants(variants).items():
            for value in values:
                variant = f"{key}={value!r}"
                if variant in self.seconds:
                    continue
                started = time.perf_counter()
                self._prepare(key, value)
                ran[variant] = self.seconds[variant] = time.perf_counter() - started
        return ran

    def _prepare(self, key: str, value: Any) -> None:
        if key == "prompts":
            self._engine.encode_phrases([value])
            return
        size = value if key == "image_sizes" else DEFAULT_WARMUP_VARIANTS["image_sizes"][0]
        phrases = _DUMMY_PHRASES[: value if key == "prompt_counts" else 1]
        request = Request(
            source=ImageSource.of(photo_like(*size)),
            prompts=tuple(Prompt(phrase) for phrase in phrases),
            threshold=0.0,  # every query passes: the read-back of max_instances masks runs
            max_instances=value if key == "max_instances" else 1,
        )
        for grounded in self._engine.ground([request], keep=False):
            finish(grounded).unwrap()


def photo_like(height: int, width: int) -> Uint8Array:
    """A smooth coloured gradient with noise, (height, width, 3) uint8; the same for a size."""
    generator = np.random.default_rng(height * 100_003 + width)
    y = np.linspace(0.0, 1.0, height, dtype=np.float32)[:, None, None]
    x = np.linspace(0.0, 1.0, width, dtype=np.float32)[None, :, None]
    first, second = generator.uniform(40, 215, (2, 3)).astype(np.float32)
    noise = generator.normal(0, 6, (height, width, 1)).astype(np.float32)
    image: Uint8Array = np.clip(first * (1 - y * x) + second * y * x + noise, 0, 255).astype(
        np.uint8
    )
    return image


def _checked_count(value: Any) -> int:
    return _checked_integer(value, 1, len(_DUMMY_PHRASES), "prompt_counts")


def _checked_instances(value: Any) -> int:
    return _checked_integer(value, 1, MAX_INSTANCES_LIMIT, "max_instances")


def _checked_integer(value: Any, minimum: int, maximum: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(
            f"warm-up variant {name}: {value!r} is not an integer of {minimum} to {maximum}"
        )
    return value


def _checked_size(value: Any) -> tuple[int, int]:
    sides = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(
            f"warm-up variant image_sizes: {value!r} is not a (height, width) in pixels"
        )
    return sides[0], sides[1]


def _checked_phrase(value: Any) -> str:
    return Prompt(value).text


_CHECKS = {
    "prompt_counts": _checked_count,
    "image_sizes": _checked_size,
    "max_instances": _checked_instances,
    "prompts": _checked_phrase,
}
