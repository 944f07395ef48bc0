"""The whole full-size model on a mock chip, weights of zeros: for who counts and does not compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHED_IMAGES = 16


@dataclass(frozen=True)
class PlacedModel:
    """What a backend holds, without a backend.

    Attributes:
        image, prompt: the parts; pixels: the image part's input.
        images: the cache, for ``CACHED_IMAGES``; prompts: the traces' work.
        store: the weights.
        grid: columns and rows of cores.
    """

    image: Any
    prompt: Any
    pixels: Any
    images: Any
    prompts: Any
    store: Any
    grid: tuple[int, int]


def place_model(device: Any, precision: str) -> PlacedModel:
    """Put it on an open device."""
    import torch
    import ttnn

    from sam3_ray.backends.blackhole.backend import IGNORED, OWNED
    from sam3_ray.backends.blackhole.image_cache import SlotCache, feature_shapes
    from sam3_ray.backends.blackhole.modules import WeightStore
    from sam3_ray.backends.blackhole.parts.backbone import padded_patch
    from sam3_ray.backends.blackhole.parts.image import ImagePart
    from sam3_ray.backends.blackhole.parts.prompt import PromptPart
    from sam3_ray.backends.blackhole.placement import Placement
    from sam3_ray.backends.blackhole.precision import PRECISIONS
    from sam3_ray.backends.blackhole.prompts import Prompts
    from sam3_ray.config import FULL

    place = Placement(device, PRECISIONS[precision])
    store = WeightStore(OWNED, IGNORED)
    image = ImagePart(place, store.root, FULL)
    prompt = PromptPart(place, store.root, FULL)
    zeros = {
        key: torch.zeros(1).expand(shape)
        for parameter in store.parameters.values()
        for key, shape in parameter.sources.items()
    }
    store.load(zeros, device, path=Path("zeros"))
    pixels = ttnn.allocate_tensor_on_device(
        ttnn.Shape((1, 1, FULL.grid**2, padded_patch(FULL))),
        ttnn.uint8,
        ttnn.ROW_MAJOR_LAYOUT,
        device,
    )
    images = SlotCache(device, feature_shapes(FULL), CACHED_IMAGES)
    prompts = Prompts(device, FULL, prompt, images)
    return PlacedModel(image, prompt, pixels, images, prompts, store, place.grid)
