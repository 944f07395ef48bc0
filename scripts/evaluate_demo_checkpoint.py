"""Measure a demo checkpoint on the frozen evaluation pictures, through sam3_ray's public API.

    python scripts/evaluate_demo_checkpoint.py                        # the shipped checkpoint
    python scripts/evaluate_demo_checkpoint.py --checkpoint my.pt --backend cpu --write metrics.json

Exits with 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

ROOT = Path(__file__).resolve().parent.parent

Prediction = NDArray[np.bool_]
"""The masks found for one phrase, (n, H, W)."""
Case = tuple[Any, NDArray[np.bool_], Sequence[tuple[str, tuple[int, ...]]]]
"""A PIL image, the mask of each shape, and phrases with the indices of the shapes they name."""

BARS = {
    "presence_accuracy": 0.97,
    "recall": 0.94,
    "precision": 0.94,
    "mean_mask_iou": 0.85,
    "worst_size_recall": 0.88,
    "worst_size_precision": 0.88,
}


@dataclass
class Tally:
    """Counts over some phrases."""

    phrases: int = 0
    presence_right: int = 0
    named: int = 0
    found: int = 0
    matched: int = 0
    ious: list[float] = field(default_factory=list)

    def add(self, found: Prediction, named: NDArray[np.bool_]) -> None:
        """Count one phrase: a found mask is right if its IoU with a mask of its own is 0.5 or more."""
        self.phrases += 1
        self.presence_right += (len(found) > 0) == (len(named) > 0)
        self.named += len(named)
        self.found += len(found)
        if not len(found) or not len(named):
            return
        a = found.reshape(len(found), -1).astype(np.float32)
        b = named.reshape(len(named), -1).astype(np.float32)
        shared = a @ b.T
        iou = shared / np.maximum(a.sum(1)[:, None] + b.sum(1)[None] - shared, 1)
        matched = iou[linear_sum_assignment(-iou)]
        matched = matched[matched >= 0.5]
        self.matched += len(matched)
        self.ious += matched.tolist()

    def figures(self) -> dict[str, float | int]:
        return {
            "presence_accuracy": round(self.presence_right / max(self.phrases, 1), 4),
            "recall": round(self.matched / max(self.named, 1), 4),
            "precision": round(self.matched / max(self.found, 1), 4),
            "mean_mask_iou": round(float(np.mean(self.ious)) if self.ious else 0.0, 4),
            "phrases": self.phrases,
            "named_instances": self.named,
        }


@dataclass
class Measured:
    """Figures over all pictures and for each picture size."""

    overall: Tally = field(default_factory=Tally)
    sizes: dict[str, Tally] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        sizes = {name: tally.figures() for name, tally in sorted(self.sizes.items())}
        return {**self.overall.figures(), "sizes": sizes}

    def shortfalls(self) -> list[str]:
        """The bars that are not met, in words."""
        figures = dict(self.overall.figures())
        sizes = [tally.figures() for tally in self.sizes.values()]
        for name in ("recall", "precision"):
            figures[f"worst_size_{name}"] = min((f[name] for f in sizes), default=0.0)
        return [f"{k} {figures[k]} < {bar}" for k, bar in BARS.items() if figures[k] < bar]


def size_name(image: Any) -> str:
    """The group of a picture: its size."""
    return f"{image.width}x{image.height}"


def measure(
    cases: Iterable[Case],
    find: Callable[[Any, Sequence[str]], Sequence[Prediction]],
    group: Callable[[Any], str] = size_name,
) -> Measured:
    """Compare what ``find(image, phrases)`` finds with what is there, overall and for each group."""
    measured = Measured()
    for image, masks, phrases in cases:
        size = measured.sizes.setdefault(group(image), Tally())
        predictions = find(image, [text for text, _ in phrases])
        for (_, matches), found in zip(phrases, predictions, strict=True):
            for tally in (measured.overall, size):
                tally.add(found, masks[list(matches)])
    return measured


def frozen_cases(count: int) -> Iterator[Case]:
    """The frozen pictures, the same ones every time."""
    sys.path.insert(0, str(ROOT / "tests"))
    from demo_scenes import scenes

    for scene in scenes(count):
        yield scene.image, scene.masks, scene.phrases


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--checkpoint", type=Path, default=ROOT / "sam3_ray" / "demo" / "sam3_demo.pt"
    )
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--write", type=Path, help="metrics file to put the figures into")
    arguments = parser.parse_args()

    from sam3_ray import Sam3

    model = Sam3.from_pretrained(checkpoint_path=arguments.checkpoint, backend=arguments.backend)

    def find(image: Any, phrases: Sequence[str]) -> list[Prediction]:
        results = model(image, list(phrases), threshold=arguments.threshold)
        return [np.asarray(result.masks, dtype=bool) for result in results]

    measured = measure(frozen_cases(arguments.pictures), find)
    figures = measured.figures()
    print(json.dumps(figures, indent=2))
    if arguments.write:
        path: Path = arguments.write
        metrics = json.loads(path.read_text()) if path.exists() else {}
        metrics["frozen"] = {**figures, "backend": arguments.backend}
        path.write_text(json.dumps(metrics, indent=2) + "\n")
    shortfalls = measured.shortfalls()
    for line in shortfalls:
        print("below the bar:", line)
    return 1 if shortfalls else 0


if __name__ == "__main__":
    raise SystemExit(main())
