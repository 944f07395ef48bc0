"""Whether ttnn accepts the full-size model on a mock p150: every operation of every trace, L1 and DRAM.

    python -m tests.blackhole.accept_full_size --dispatch eth

One process for one dispatch: ttnn reads the environment once. Weights are zeros and nothing is computed; what
ttnn does on the host (validation, placement, allocation, program building) is all real. Prints one JSON line
for each precision.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.emulation.mock import prepare


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
    """Run every trace's work once with the cache allocated; what it takes of the device's memory."""
    import ttnn

    from tests.blackhole.placed_model import CACHED_IMAGES, place_model
    from tests.emulation.records import launched_programs

    gc.collect()  # a model before this one and its traces know each other
    model = place_model(device, precision)
    shapes = _image(model)
    model.images.compile()
    for trace in model.prompts.traces.values():
        trace.compile()
    programs = launched_programs(lambda: _image(model)) + sum(
        launched_programs(trace.compile) for trace in model.prompts.traces.values()
    )
    dram = ttnn.get_memory_view(device, ttnn.BufferType.DRAM)
    l1 = ttnn.get_memory_view(device, ttnn.BufferType.L1)
    figures = {
        "precision": precision,
        "grid": list(model.grid),
        "programs": device.num_program_cache_entries(),
        "trace_programs": programs,
        "traces": 1 + len(model.prompts.traces),
        "shapes": shapes,
        "dram_bytes": dram.total_bytes_allocated_per_bank * dram.num_banks,
        "cached_images": CACHED_IMAGES,
        "l1_bytes_kept_a_core": l1.total_bytes_allocated_per_bank,
        "l1_bytes_a_core": l1.total_bytes_per_bank,
    }
    model.store.release()
    return figures


def _image(model: Any) -> list[list[int]]:
    """The work of the image's trace; the shapes of what it leaves."""
    import ttnn

    features = model.prompt.features(model.image(model.pixels))
    for feature, buffer in zip(features, model.images.buffers, strict=True):
        ttnn.copy(feature, buffer)
    shapes = [list(feature.shape) for feature in features]
    for feature in features:
        ttnn.deallocate(feature)
    return shapes


if __name__ == "__main__":
    main()
