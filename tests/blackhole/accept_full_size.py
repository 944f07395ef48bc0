"""Whether ttnn accepts the full-size image part on a mock p150: every operation, L1 and DRAM.

    python -m tests.blackhole.accept_full_size --dispatch eth

One process for one dispatch: ttnn reads the environment once. Weights are zeros and nothing is computed; what
ttnn does on the host (validation, placement, allocation, program building) is all real. Prints one JSON line
for each precision.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.emulation.mock import prepare

CACHED_IMAGES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dispatch", choices=("worker", "eth"), default="worker")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        os.environ.update(prepare(Path(root), dispatch=arguments.dispatch))
        import ttnn

        from sam3_ray.backends.blackhole.device import open_arguments

        device = ttnn.open_device(**open_arguments(0, arguments.dispatch))
        for precision in ("accurate", "fast"):
            print(json.dumps(accept(device, precision)), flush=True)
        ttnn.close_device(device)


def accept(device: Any, precision: str) -> dict[str, Any]:
    """Run the image part once with its cache allocated; what it takes of the device's memory."""
    import torch
    import ttnn

    from sam3_ray.backends.blackhole.image_cache import SlotCache, feature_shapes
    from sam3_ray.backends.blackhole.modules import WeightStore
    from sam3_ray.backends.blackhole.parts.backbone import padded_patch
    from sam3_ray.backends.blackhole.parts.image import IGNORED, OWNED, ImagePart
    from sam3_ray.backends.blackhole.placement import Placement
    from sam3_ray.backends.blackhole.precision import PRECISIONS
    from sam3_ray.config import FULL

    place = Placement(device, PRECISIONS[precision])
    store = WeightStore(OWNED, IGNORED)
    part = ImagePart(place, store.root, FULL)
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
    slots = SlotCache(device, feature_shapes(FULL), CACHED_IMAGES)
    outputs = part(pixels)
    for output, buffer in zip(outputs, slots.buffers, strict=True):
        ttnn.copy(output, buffer)
    slots.compile()
    shapes = [list(output.shape) for output in outputs]
    dram = ttnn.get_memory_view(device, ttnn.BufferType.DRAM)
    l1 = ttnn.get_memory_view(device, ttnn.BufferType.L1)
    figures = {
        "precision": precision,
        "grid": list(place.grid),
        "programs": device.num_program_cache_entries(),
        "shapes": shapes,
        "dram_bytes": dram.total_bytes_allocated_per_bank * dram.num_banks,
        "cached_images": CACHED_IMAGES,
        "l1_bytes_kept_a_core": l1.total_bytes_allocated_per_bank,
        "l1_bytes_a_core": l1.total_bytes_per_bank,
    }
    store.release()
    for tensor in (*outputs, pixels):
        ttnn.deallocate(tensor)
    return figures


if __name__ == "__main__":
    main()
