"""Draw docs/images/serving.svg from perf/results/serving.json: requests a second over the number of chips.

python scripts/draw_serving_plot.py [--results perf/results/serving.json] [--out docs/images/serving.svg]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 44, 60
COLORS = {"plain": "#c2571a", "throughput": "#2f6fb2", "haproxy": "#2b8a3e"}
INK, GRID = "#333333", "#dddddd"


class Axes:
    """Both scales logarithmic: what is ideal is a straight line."""

    def __init__(self, chips: list[int], most: float, least: float) -> None:
        self._x = (math.log2(chips[0]), math.log2(chips[-1]))
        self._y = (math.log10(least), math.log10(most))

    def x(self, chips: float) -> float:
        first, last = self._x
        share = (math.log2(chips) - first) / ((last - first) or 1.0)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, per_s: float) -> float:
        least, most = self._y
        return (
            HEIGHT - BOTTOM - (math.log10(per_s) - least) / (most - least) * (HEIGHT - TOP - BOTTOM)
        )


def text(
    x: float, y: float, words: str, *, anchor: str = "middle", color: str = INK, size: int = 13
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}">'
        f"{escape(words)}</text>"
    )


def line(points: list[tuple[float, float]], color: str, *, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="6 5"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'


def figure(throughput: Mapping[str, Mapping[str, Any]]) -> str:
    """The plot as SVG.

    Args:
        throughput: of the results: mode, then number of chips, then ``machine`` and ``result``.

    Raises:
        ValueError: there is nothing to draw.
    """
    measured = {
        mode: {
            int(chips): told["result"]
            for chips, told in sorted(of.items(), key=lambda i: int(i[0]))
        }
        for mode, of in throughput.items()
    }
    machine = next((told["machine"] for of in throughput.values() for told in of.values()), "")
    chips = sorted({count for of in measured.values() for count in of})
    if not chips:
        raise ValueError("the results have no throughput; run `python perf/serving.py throughput`")
    ideal = {count: of[count]["ideal_per_s"] for of in measured.values() for count in of}
    rates = [result["per_s"] for of in measured.values() for result in of.values()]
    axes = Axes(chips, 1.15 * max(*ideal.values(), *rates), 0.8 * min(*ideal.values(), *rates))
    marks = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" role="img" '
        'aria-label="Requests a second over the number of simulated chips, by proxy mode">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(
            LEFT,
            24,
            f"Requests a second on simulated chips; host: {machine}",
            anchor="start",
            size=15,
        ),
    ]
    for per_s in (5, 10, 20, 50, 100, 200, 500):
        y = axes.y(per_s)
        if TOP <= y <= HEIGHT - BOTTOM:
            marks.append(line([(LEFT, y), (WIDTH - RIGHT, y)], GRID))
            marks.append(text(LEFT - 8, y + 4, str(per_s), anchor="end"))
    for count in chips:
        marks.append(text(axes.x(count), HEIGHT - BOTTOM + 20, str(count)))
    marks.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "chips"))
    marks.append(line([(axes.x(count), axes.y(ideal[count])) for count in chips], INK, dashed=True))
    legend = [("what the chips could do", INK)]
    for mode, of in measured.items():
        points = [(axes.x(count), axes.y(result["per_s"])) for count, result in of.items()]
        marks.append(line(points, COLORS[mode]))
        marks += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLORS[mode]}"/>' for x, y in points
        ]
        legend.append((f"--proxy {mode}", COLORS[mode]))
    for row, (words, color) in enumerate(legend):
        y = TOP + 12 + 22 * row
        marks.append(
            line([(WIDTH - RIGHT + 12, y - 4), (WIDTH - RIGHT + 34, y - 4)], color, dashed=not row)
        )
        marks.append(text(WIDTH - RIGHT + 40, y, words, anchor="start", size=11))
    return "\n".join([*marks, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "perf/results/serving.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/serving.svg")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text())
    arguments.out.write_text(figure(results.get("throughput", {})), encoding="utf-8")


if __name__ == "__main__":
    main()
