"""The full model, 840 M parameters, random weights, against upstream's float32.

About ten minutes and 12 GB: behind the marker ``full`` (``make test-full``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sam3_ray.backends.cpu.backend import CpuBackend
from sam3_ray.backends.cpu.model import build_modules
from sam3_ray.config import FULL
from tests.blackhole.upstream_parts import (
    END_TO_END_BAR,
    UPDATE_BAR,
    LoadedPart,
    photo_like,
    record,
)
from tests.blackhole.upstream_prompts import (
    BOX_BAR_PX,
    MASK_BAR,
    SCORE_BAR,
    LoadedPrompts,
    record_prompts,
)
from tests.parity.upstream import random_state, save_checkpoint

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


def test_every_prompt_part_meets_its_bar_at_full_size(chip: Any, tmp_path: Path) -> None:
    modules = build_modules(FULL)
    weights = random_state(modules)
    del modules
    save_checkpoint(tmp_path / "sam3.pt", weights, FULL)
    cpu = CpuBackend(tmp_path / "sam3.pt")
    recording = record_prompts(
        cpu, photo_like(FULL.image_size), ["red circle", "a small blue star"]
    )
    del cpu
    shortfalls = []
    for precision, bar in UPDATE_BAR.items():
        part = LoadedPrompts(chip, FULL, weights, precision)
        for name, updates in (
            ("text block", part.text_updates(recording)),
            ("fusion layer", part.fusion_updates(recording)),
            ("decoder layer", part.decoder_updates(recording)),
        ):
            for i, value in enumerate(updates):
                print(f"{precision:8} {name} {i:2} update PCC {value:.6f}", flush=True)
                shortfalls += [(precision, name, i, value)] if value < bar else []
        masks = part.masks(recording, 0, 8)
        box_px, score, presence = part.heads(recording)
        print(
            f"{precision:8} text PCC {part.text(recording):.6f}, masks PCC {masks:.6f}, "
            f"box {box_px:.3f} px, score {score:.5f}, presence {presence:.5f}",
            flush=True,
        )
        shortfalls += [(precision, "masks", masks)] if masks < MASK_BAR[precision] else []
        # Random weights move a box by several logits a layer: see test_prompt_parts.py.
        shortfalls += [(precision, "box", box_px)] if box_px > BOX_BAR_PX["fast"] else []
        for name, value in (("score", score), ("presence", presence)):
            shortfalls += [(precision, name, value)] if value > SCORE_BAR[precision] else []
        part.close()
    assert not shortfalls
