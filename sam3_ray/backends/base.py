"""The Backend protocol: all that the engine knows of a machine.

``prepare`` may run on any thread; every other call comes from the one thread that owns the device
(the engine holds a lock). A backend imports no serving code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sam3_ray.config import Sam3Config

Float32Array = npt.NDArray[np.float32]
Uint8Array = npt.NDArray[np.uint8]


TEXT_CACHE_ENTRIES = 256
"""Phrases whose features the engine keeps (spec/PYTHON.md)."""

NEW_PHRASES = 64
"""Phrases that the engine asks for and holds at a time, beside those."""


@dataclass(frozen=True)
class Capacity:
    """What the engine plans with.

    Attributes:
        prompt_runs: the numbers of phrases that one ``ground`` call takes, ascending; the first is 1.
        image_cache_bytes: default budget of the image cache, in bytes of ``ImageFeatures.nbytes``.
        cache_is_fixed: the room for it was taken at the start, and no larger budget is possible.
    """

    prompt_runs: tuple[int, ...]
    image_cache_bytes: int
    cache_is_fixed: bool = False

    def plan(self, phrases: int) -> list[int]:
        """Split ``phrases`` into runs, largest first: 7 -> [4, 2, 1] with runs of 1, 2 and 4."""
        runs: list[int] = []
        for size in reversed(self.prompt_runs):
            while phrases >= size:
                runs.append(size)
                phrases -= size
        return runs


class ImageFeatures(Protocol):
    """A handle on one image's features; they stay where the backend keeps them and are read-only."""

    @property
    def nbytes(self) -> int:
        """Bytes held on the device (on the CPU: in memory)."""
        ...

    def release(self) -> None:
        """Give the memory back; called once, when the image leaves the cache."""
        ...


@dataclass(frozen=True)
class Grounding:
    """What one image and k phrases give, before any selection.

    Attributes:
        logits: (k, Q) float32 class logits.
        boxes_cxcywh: (k, Q, 4) float32, in units of the image's width and height.
        presence_logits: (k,) float32.
        masks: a handle for ``read_masks``; valid until the next ``ground``.
    """

    logits: Float32Array
    boxes_cxcywh: Float32Array
    presence_logits: Float32Array
    masks: Any


class Backend(Protocol):
    """One model on one device."""

    @property
    def name(self) -> str:
        """``cpu`` or ``blackhole``."""
        ...

    @property
    def config(self) -> Sam3Config: ...

    @property
    def capacity(self) -> Capacity: ...

    def prepare(self, pixels: Uint8Array) -> Any:
        """(H, W, 3) uint8 RGB -> what goes up to the device. Any thread."""
        ...

    def encode_image(self, prepared: Any) -> ImageFeatures:
        """The image part: everything that depends on the image only."""
        ...

    def encode_text(self, phrases: Sequence[str]) -> list[Any]:
        """The features of each phrase, in order."""
        ...

    def ground(self, image: ImageFeatures, text: Sequence[Any]) -> Grounding:
        """The prompt part for k phrases of one image; k is one of ``capacity.prompt_runs``."""
        ...

    def read_masks(self, masks: Any, kept: Sequence[tuple[int, int]]) -> Float32Array:
        """Mask logits of the kept (phrase, query) pairs, in order.

        Returns:
            (n, h, w) float32, h = w = ``config.mask_size``.
        """
        ...

    def info(self) -> dict[str, Any]:
        """What a person wants to know of it; JSON-friendly."""
        ...

    def close(self) -> None:
        """Release everything; safe to call more than once."""
        ...
