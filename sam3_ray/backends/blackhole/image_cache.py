"""Slots for image features in the device's DRAM.

All slots are allocated before any trace is captured: what is allocated later could lie where a trace puts
its intermediate results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ttnn

from sam3_ray.backends.blackhole.parts.doubled import PHASES
from sam3_ray.backends.blackhole.placement import TILE, whole_tiles
from sam3_ray.config import Sam3Config

Shape = tuple[int, int, int, int]


def allocate(device: Any, shapes: Sequence[Shape]) -> list[Any]:
    """Uninitialised bfloat16 tensors in tiles, in DRAM."""
    return [
        ttnn.allocate_tensor_on_device(
            ttnn.Shape(shape), ttnn.bfloat16, ttnn.TILE_LAYOUT, device, ttnn.DRAM_MEMORY_CONFIG
        )
        for shape in shapes
    ]


def feature_shapes(config: Sam3Config) -> list[Shape]:
    """Of one image, as ``PromptPart.features`` gives them: four phases of the finest level, four of the next,
    the coarsest level, and the geometry token."""
    width = config.model_width
    finest, middle, coarsest = config.level_sizes
    phases: list[Shape] = [
        (1, 1, size * size // 4, width) for size in (finest, middle) for _ in PHASES
    ]
    return [*phases, (1, 1, coarsest * coarsest, width), (1, 1, TILE, width)]


def padded_nbytes(shapes: Sequence[Shape]) -> int:
    """Bytes of bfloat16 tensors in whole tiles."""
    return sum(2 * n * c * whole_tiles(h) * whole_tiles(w) for n, c, h, w in shapes)


def copy_all(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Device to device, one after the other."""
    for source, target in zip(sources, targets, strict=True):
        ttnn.copy(source, target)


@dataclass(eq=False)
class SlotFeatures:
    """One image's features: the ``ImageFeatures`` handle.

    Attributes:
        slot: index; None once released.
    """

    cache: SlotCache
    slot: int | None

    @property
    def nbytes(self) -> int:
        return self.cache.slot_nbytes

    def release(self) -> None:
        """Give the slot back."""
        slot, self.slot = self.slot, None
        if slot is not None:
            self.cache.free(slot)


class SlotCache:
    """A number of equal slots, and the buffers that the traces write to and read from.

    Args:
        device: an open ttnn device.
        shapes: of one image's features.
        slots: how many.
    """

    def __init__(self, device: Any, shapes: Sequence[Shape], slots: int) -> None:
        self.slot_nbytes = padded_nbytes(shapes)
        self.buffers = allocate(device, shapes)
        """What the image part writes and the prompt part reads."""
        self._slots = [allocate(device, shapes) for _ in range(slots)]
        self._free = list(range(slots))
        self._resident: int | None = None

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def compile(self) -> None:
        """Run both copies once, so that no program is compiled after the traces."""
        copy_all(self.buffers, self._slots[0])
        copy_all(self._slots[0], self.buffers)

    def store(self) -> SlotFeatures:
        """Copy what is in the buffers to a free slot.

        Raises:
            RuntimeError: every slot is taken: more images are held than the cache was made for.
        """
        if not self._free:
            raise RuntimeError(f"all {len(self)} slots of the image cache are taken")
        slot = self._free.pop()
        try:
            copy_all(self.buffers, self._slots[slot])
        except BaseException:
            self._free.append(slot)
            raise
        self._resident = slot
        return SlotFeatures(self, slot)

    def load(self, features: SlotFeatures) -> None:
        """Copy a slot to the buffers, unless it is there already.

        Raises:
            RuntimeError: the features were released.
        """
        if features.slot is None:
            raise RuntimeError("these image features were released")
        if features.slot == self._resident:
            return
        self.invalidate()  # until all of it is there
        copy_all(self._slots[features.slot], self.buffers)
        self._resident = features.slot

    def invalidate(self) -> None:
        """The buffers are about to be written: they hold no image until that is done."""
        self._resident = None

    def free(self, slot: int) -> None:
        self._free.append(slot)
        if self._resident == slot:
            self._resident = None
