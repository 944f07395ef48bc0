"""The demo checkpoint's figures on the frozen pictures: the CPU backend and the emulated chip, side by side.

python -m tests.blackhole.evaluate --pictures 200
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
METRICS = ("presence_accuracy", "recall", "precision", "mean_mask_iou")
MOST_APART = {"accurate": 0.005, "fast": 0.010}
"""How far each of ``METRICS`` may be from the CPU backend's."""


def figures(pictures: int) -> dict[str, dict[str, Any]]:
    """Of ``cpu``, ``accurate`` and ``fast``, by the script that measures the shipped checkpoint."""
    from sam3_ray import Sam3

    script = _script()
    found = {}
    for name in ("cpu", *MOST_APART):
        options = (
            {"backend": "cpu"}
            if name == "cpu"
            else {"backend": "blackhole", "dispatch": "worker", "precision": name, "warmup": 0}
        )
        with Sam3.from_pretrained("demo", image_cache_bytes=20_000_000, **options) as model:
            measured = script.measure(
                script.frozen_cases(pictures),
                lambda image, phrases, model=model: [
                    np.asarray(result.masks) for result in model(image, list(phrases))
                ],
            )
        found[name] = {metric: measured.figures()[metric] for metric in METRICS}
    return found


def _script() -> Any:
    path = ROOT / "scripts/evaluate_demo_checkpoint.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=int, default=200)
    arguments = parser.parse_args()
    from tests import emulation

    emulation.start()
    print(json.dumps(figures(arguments.pictures), indent=2))


if __name__ == "__main__":
    main()
