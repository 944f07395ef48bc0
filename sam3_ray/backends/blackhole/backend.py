"""The ``Backend`` protocol on one Blackhole chip: every stage is a trace, weights and buffers stay there."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import ttnn

from sam3_ray.backends.base import Capacity, Float32Array, Grounding, ImageFeatures, Uint8Array
from sam3_ray.backends.blackhole.image_cache import (
    SlotCache,
    SlotFeatures,
    feature_shapes,
    padded_nbytes,
)
from sam3_ray.backends.blackhole.modules import ConvertedWeights, WeightStore
from sam3_ray.backends.blackhole.opening import OpenDevice
from sam3_ray.backends.blackhole.overlay import ttnn_version
from sam3_ray.backends.blackhole.parts import image as image_part
from sam3_ray.backends.blackhole.parts import prompt as prompt_part
from sam3_ray.backends.blackhole.parts.backbone import padded_patch, patches
from sam3_ray.backends.blackhole.placement import Placement
from sam3_ray.backends.blackhole.precision import DEFAULT_PRECISION, PRECISIONS
from sam3_ray.backends.blackhole.prompts import PROMPT_RUNS, MaskInputs, Prompts, TextSlot
from sam3_ray.backends.blackhole.traces import QUEUE, Trace
from sam3_ray.checkpoint import checkpoint_fingerprint, load_checkpoint
from sam3_ray.config import Sam3Config
from sam3_ray.images import resize_to_square
from sam3_ray.settings import cache_folder

logger = logging.getLogger("sam3_ray")

OWNED = (*image_part.OWNED, *prompt_part.OWNED)
IGNORED = (*image_part.IGNORED, *prompt_part.IGNORED)

CONVERSION = 4
"""Raised when a conversion of weights changes, so that files of an older one are not read."""

CACHE_SHARE = 0.25
"""Share of the free DRAM that the image cache takes where nobody says how much."""

MOST_SLOTS = 256


class BlackholeBackend:
    """One chip. ``open_backend`` opens it and makes one of these.

    Args:
        checkpoint_path: a file in ``sam3.pt``'s layout.
        opened: the device; ``close`` closes it.
        precision: ``accurate`` or ``fast``; None takes the default.
        image_cache_bytes: DRAM for images' features; None takes a share of what is free.
        num_threads: torch's host threads.

    Raises:
        CheckpointError: the file is broken or does not fit its configuration.
        ValueError: ``image_cache_bytes`` do not fit.
    """

    name = "blackhole"

    def __init__(
        self,
        checkpoint_path: Path,
        opened: OpenDevice,
        *,
        precision: str | None = None,
        image_cache_bytes: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._open = opened
        self._weights = WeightStore(OWNED, IGNORED)
        self._place = Placement(opened.device, PRECISIONS[precision or DEFAULT_PRECISION])
        self._traces: dict[str, Trace] = {}
        try:
            self._load(checkpoint_path, image_cache_bytes)
        except BaseException:
            self.close()
            raise

    def _load(self, checkpoint_path: Path, image_cache_bytes: int | None) -> None:
        device, root = self._open.device, self._weights.root
        self.config: Sam3Config
        self.config, tensors = load_checkpoint(checkpoint_path)
        image = image_part.ImagePart(self._place, root, self.config)
        prompt = prompt_part.PromptPart(self._place, root, self.config)
        self._weights.load(
            tensors,
            device,
            path=checkpoint_path,
            cache=ConvertedWeights(self._conversion_folder(checkpoint_path)),
        )
        self._pixels = ttnn.allocate_tensor_on_device(
            ttnn.Shape((1, 1, self.config.grid**2, padded_patch(self.config))),
            ttnn.uint8,
            ttnn.ROW_MAJOR_LAYOUT,
            device,
            ttnn.DRAM_MEMORY_CONFIG,
        )
        self._images = self._make_slots(image_cache_bytes)
        self._prompts = Prompts(device, self.config, prompt, self._images)

        def encode() -> None:
            features = prompt.features(image(self._pixels))
            for output, buffer in zip(features, self._images.buffers, strict=True):
                ttnn.copy(output, buffer)
                ttnn.deallocate(output)

        self._trace = Trace(device, "image", encode)
        self._traces = {"image": self._trace, **self._prompts.traces}
        # Everything is compiled before anything is captured: a later compilation could take the memory of
        # an earlier trace.
        self._upload(_grey(self.config))
        self._trace.compile()
        self._images.compile()
        self._prompts.compile()
        self._trace.capture()
        self._prompts.capture()
        logger.info("%d traces on %dx%d cores", len(self._traces), *self._place.grid)

    def _conversion_folder(self, checkpoint_path: Path) -> Path:
        """Converted weights of one checkpoint, ttnn version, precision and grid."""
        columns, rows = self._place.grid
        name = "-".join(
            (
                checkpoint_fingerprint(checkpoint_path)[:16],
                f"ttnn{ttnn_version()}",
                self._place.precision.name,
                f"{columns}x{rows}",
                f"v{CONVERSION}",
            )
        )
        return cache_folder() / "weights" / name

    def _make_slots(self, budget: int | None) -> SlotCache:
        device, shapes = self._open.device, feature_shapes(self.config)
        nbytes = padded_nbytes(shapes)
        free = _free_dram(device)
        if budget is None:
            budget = min(int(free * CACHE_SHARE), MOST_SLOTS * nbytes)
        # One more than the cache holds: the next image is encoded before the oldest leaves.
        slots = budget // nbytes + 1
        if slots * nbytes > free:
            raise ValueError(
                f"image_cache_bytes={budget} does not fit in the chip's free DRAM ({free} bytes)"
            )
        self.capacity = Capacity(
            prompt_runs=PROMPT_RUNS, image_cache_bytes=budget, cache_is_fixed=True
        )
        return SlotCache(device, shapes, slots)

    # -- the Backend protocol ------------------------------------------------------------------------

    def prepare(self, pixels: Uint8Array) -> Uint8Array:
        """(H, W, 3) uint8 -> (tokens, padded) uint8 patches, what goes up to the chip."""
        return patches(resize_to_square(pixels, self.config.image_size), self.config)

    def encode_image(self, prepared: Uint8Array) -> SlotFeatures:
        """Upload, one trace, and a copy into a slot; nothing is waited for."""
        self._images.invalidate()
        self._upload(prepared)
        self._trace.execute()
        return self._images.store()

    def encode_text(self, phrases: Sequence[str]) -> list[TextSlot]:
        """Token ids up, one trace for each run of 4, 2 or 1 phrases; the features stay on the chip."""
        slots: list[TextSlot] = []
        for run in self.capacity.plan(len(phrases)):
            slots += self._prompts.encode(phrases[len(slots) : len(slots) + run])
        return slots

    def ground(self, image: ImageFeatures, text: Sequence[TextSlot]) -> Grounding:
        """One trace, and one read of scores, boxes and presence."""
        assert isinstance(image, SlotFeatures)
        return self._prompts.ground(image, text)

    def read_masks(self, masks: MaskInputs, kept: Sequence[tuple[int, int]]) -> Float32Array:
        """For each phrase that kept something: its pixels, then one read of a bucket of masks."""
        return self._prompts.read_masks(masks, kept)

    def info(self) -> dict[str, Any]:
        device = self._open.device
        if device is None:
            return {"closed": True}
        dram = ttnn.get_memory_view(device, ttnn.BufferType.DRAM)
        trace = ttnn.get_memory_view(device, ttnn.BufferType.TRACE)
        return {
            "ttnn": ttnn_version(),
            "grid": list(self._place.grid),
            "dispatch": self._open.dispatch,
            "precision": self._place.precision.name,
            "dram_bytes": dram.total_bytes_allocated_per_bank * dram.num_banks,
            "dram_free_bytes": _free_dram(device),
            "trace_bytes": trace.total_bytes_allocated_per_bank * trace.num_banks,
            "traces": list(self._traces),
            "image_slots": len(self._images),
            "num_threads": torch.get_num_threads(),
        }

    def close(self) -> None:
        """Give everything back, and close the chip unless the caller opened it."""
        if self._open.device is None:
            return
        try:
            for trace in self._traces.values():
                trace.release()
            self._weights.release()
        finally:
            # Buffers and tables go with the last that knows them.
            self._traces.clear()
            for name in ("_trace", "_prompts", "_images", "_pixels"):
                self.__dict__.pop(name, None)
            self._open.close()

    def _upload(self, prepared: Uint8Array) -> None:
        host = ttnn.from_torch(
            torch.from_numpy(prepared)[None, None],
            dtype=ttnn.uint8,
            layout=ttnn.ROW_MAJOR_LAYOUT,
        )
        ttnn.copy_host_to_device_tensor(host, self._pixels, cq_id=QUEUE)


def _grey(config: Sam3Config) -> Uint8Array:
    return np.full((config.grid**2, padded_patch(config)), 128, np.uint8)


def _free_dram(device: Any) -> int:
    view = ttnn.get_memory_view(device, ttnn.BufferType.DRAM)
    return int(view.total_bytes_free_per_bank * view.num_banks)
