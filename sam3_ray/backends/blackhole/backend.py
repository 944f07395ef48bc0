"""The ``Backend`` protocol on one Blackhole chip.

The image part runs on the chip as one trace. The prompt part (text, fusion, decoder, masks) runs on the CPU
backend, which reads the features back.
"""

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
from sam3_ray.backends.blackhole.parts.backbone import padded_patch, patches
from sam3_ray.backends.blackhole.parts.image import IGNORED, OWNED, ImagePart
from sam3_ray.backends.blackhole.placement import Placement
from sam3_ray.backends.blackhole.precision import DEFAULT_PRECISION, PRECISIONS
from sam3_ray.backends.blackhole.traces import QUEUE, Trace
from sam3_ray.backends.cpu.backend import (
    PROMPT_RUNS,
    CpuBackend,
    CpuImageFeatures,
    CpuTextFeatures,
)
from sam3_ray.checkpoint import checkpoint_fingerprint, load_checkpoint
from sam3_ray.config import Sam3Config
from sam3_ray.images import resize_to_square
from sam3_ray.settings import cache_folder

logger = logging.getLogger("sam3_ray")

CONVERSION = 1
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
        self._open = opened
        self._prompt_part = CpuBackend(checkpoint_path, num_threads=num_threads)
        self.config: Sam3Config = self._prompt_part.config
        self._weights = WeightStore(OWNED, IGNORED)
        self._place = Placement(opened.device, PRECISIONS[precision or DEFAULT_PRECISION])
        try:
            self._load(checkpoint_path, image_cache_bytes)
        except BaseException:
            self.close()
            raise

    def _load(self, checkpoint_path: Path, image_cache_bytes: int | None) -> None:
        device = self._open.device
        part = ImagePart(self._place, self._weights.root, self.config)
        _, tensors = load_checkpoint(checkpoint_path)
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
        self._host_features: tuple[SlotFeatures, CpuImageFeatures] | None = None

        def encode() -> None:
            for output, buffer in zip(part(self._pixels), self._images.buffers, strict=True):
                ttnn.copy(output, buffer)
                ttnn.deallocate(output)

        self._upload(_grey(self.config))
        self._trace = Trace(device, "image part", encode)
        self._trace.compile()
        self._images.compile()
        self._trace.capture()
        logger.info("image part: traced on %dx%d cores", *self._place.grid)

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
        self.capacity = Capacity(prompt_runs=PROMPT_RUNS, image_cache_bytes=budget)
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

    def encode_text(self, phrases: Sequence[str]) -> list[CpuTextFeatures]:
        """On the host."""
        return self._prompt_part.encode_text(phrases)

    def ground(self, image: ImageFeatures, text: Sequence[CpuTextFeatures]) -> Grounding:
        """On the host, on features read back from the chip."""
        assert isinstance(image, SlotFeatures)
        return self._prompt_part.ground(self._read_features(image), text)

    def read_masks(self, masks: Any, kept: Sequence[tuple[int, int]]) -> Float32Array:
        """On the host."""
        return self._prompt_part.read_masks(masks, kept)

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
            "image_slots": len(self._images),
            "prompt_part": "cpu",
            **self._prompt_part.info(),
        }

    def close(self) -> None:
        """Release the trace and the weights, and close the chip unless the caller opened it."""
        if self._open.device is None:
            return
        try:
            if hasattr(self, "_trace"):
                self._trace.release()
            self._weights.release()
            self._host_features = None
        finally:
            self._open.close()
            self._prompt_part.close()

    # -- transfers -----------------------------------------------------------------------------------

    def _upload(self, prepared: Uint8Array) -> None:
        host = ttnn.from_torch(
            torch.from_numpy(prepared)[None, None],
            dtype=ttnn.uint8,
            layout=ttnn.ROW_MAJOR_LAYOUT,
        )
        ttnn.copy_host_to_device_tensor(host, self._pixels, cq_id=QUEUE)

    def _read_features(self, image: SlotFeatures) -> CpuImageFeatures:
        """The features in the CPU backend's form; those of the last image are kept for its next phrases."""
        if self._host_features is not None and self._host_features[0] is image:
            return self._host_features[1]
        self._images.load(image)
        *levels, geometry = (ttnn.to_torch(buffer).float() for buffer in self._images.buffers)
        features = self._prompt_part.features_of(levels, geometry)
        self._host_features = image, features
        return features


def _grey(config: Sam3Config) -> Uint8Array:
    return np.full((config.grid**2, padded_patch(config)), 128, np.uint8)


def _free_dram(device: Any) -> int:
    view = ttnn.get_memory_view(device, ttnn.BufferType.DRAM)
    return int(view.total_bytes_free_per_bank * view.num_banks)
