"""Draws docs/images/overlay.png, the picture of a result in the README, with the demo checkpoint.

make images
"""

from __future__ import annotations

from pathlib import Path

from sam3_ray import Sam3
from sam3_ray.overlay import draw_overlay

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "examples" / "playground.png"
PHRASES = ["red circle", "star", "green square", "yellow triangle"]


def main() -> None:
    with Sam3.from_pretrained("demo", backend="cpu") as model:
        results = model(PICTURE, PHRASES)
    for result in results:
        print(result)
    target = ROOT / "docs" / "images" / "overlay.png"
    # 256 colours are plenty for drawn shapes, and a third of the bytes.
    draw_overlay(PICTURE, results).quantize(256).save(target, optimize=True)
    print(f"wrote {target.relative_to(ROOT)}, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
