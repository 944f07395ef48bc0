"""The full model, 454 M parameters of its image part, random weights, against upstream's float32.

About twenty minutes and 12 GB: behind the marker ``full`` (``make test-full``).
"""

from __future__ import annotations

from typing import Any

import pytest

from sam3_ray.backends.cpu.model import build_modules
from sam3_ray.config import FULL
from tests.blackhole.upstream_parts import (
    END_TO_END_BAR,
    UPDATE_BAR,
    LoadedPart,
    photo_like,
    record,
)
from tests.parity.upstream import random_state

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


def test_every_part_meets_its_bar_at_full_size(chip: Any) -> None:
    modules = build_modules(FULL)
    weights = random_state(modules)
    modules.load_state_dict(weights, strict=False)
    square = photo_like(FULL.image_size)
    recording = record(modules, square)
    del modules
    shortfalls = []
    for precision, bar in UPDATE_BAR.items():
        part = LoadedPart(chip, FULL, weights, precision)
        figures = {}
        for i, value in enumerate(part.block_updates(recording)):
            figures[f"block {i:2} update"] = value
            print(f"{precision:8} block {i:2} update    PCC {value:.6f}", flush=True)
        for name, value in zip(
            ("fine", "middle", "coarse"), part.neck_levels(recording), strict=True
        ):
            figures[f"neck {name}"] = value
            print(f"{precision:8} neck {name:6} level    PCC {value:.6f}", flush=True)
        figures["geometry token"] = part.geometry(recording)
        print(f"{precision:8} geometry token      PCC {figures['geometry token']:.6f}", flush=True)
        shortfalls += [(precision, k, v) for k, v in figures.items() if v < bar]
        whole = part.end_to_end(square, recording)
        print(f"{precision:8} end to end, levels fine to coarse and token: {whole}", flush=True)
        shortfalls += [(precision, "end to end", v) for v in whole if v < END_TO_END_BAR[precision]]
        part.close()
    assert not shortfalls
