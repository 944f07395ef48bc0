"""Every part of the prompt part against upstream's float32, at the demo checkpoint's dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sam3_ray.backends.cpu.backend import CpuBackend
from sam3_ray.backends.cpu.model import build_modules
from sam3_ray.checkpoint import DEMO_CHECKPOINT, load_checkpoint
from sam3_ray.config import DEMO
from tests.blackhole.upstream_parts import UPDATE_BAR, photo_like
from tests.blackhole.upstream_prompts import (
    BOX_BAR_PX,
    MASK_BAR,
    PHRASES,
    SCORE_BAR,
    LoadedPrompts,
    PromptRecording,
    record_prompts,
)
from tests.demo_scenes import scenes
from tests.parity.upstream import random_state, save_checkpoint

Reference = tuple[dict[str, Tensor], PromptRecording]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Weights, and what upstream computes with them."""
    random = tmp_path_factory.mktemp("weights") / "random.pt"
    save_checkpoint(random, random_state(build_modules(DEMO)), DEMO)
    import numpy as np

    drawn = np.asarray(next(iter(scenes(1))).image)
    found = {}
    for name, path, pixels in (
        ("demo checkpoint", DEMO_CHECKPOINT, drawn),
        ("random weights", random, photo_like(DEMO.image_size)),
    ):
        weights = {key: value.float() for key, value in load_checkpoint(Path(path))[1].items()}
        recording = record_prompts(CpuBackend(Path(path), num_threads=1), pixels, PHRASES)
        found[name] = weights, recording
    return found


@pytest.fixture
def reference(references: dict[str, Reference]) -> Reference:
    return references["random weights"]


@pytest.fixture
def loaded(chip: Any, reference: Reference) -> Iterator[Callable[..., LoadedPrompts]]:
    """The prompt part with these weights, or with others."""
    parts: list[LoadedPrompts] = []

    def load(precision: str, weights: dict[str, Tensor] | None = None) -> LoadedPrompts:
        parts.append(LoadedPrompts(chip, DEMO, weights or reference[0], precision))
        return parts[-1]

    yield load
    for part in parts:
        part.close()


@pytest.mark.parametrize("precision", ["accurate", "fast"])
@pytest.mark.parametrize("weights", ["demo checkpoint", "random weights"])
def test_every_part_meets_its_bar(
    weights: str,
    precision: str,
    loaded: Callable[..., LoadedPrompts],
    references: dict[str, Reference],
) -> None:
    tensors, recording = references[weights]
    part = loaded(precision, tensors)
    figures = {
        "text": list(part.text_updates(recording)),
        "text encoder": [part.text(recording)],
        "fusion": list(part.fusion_updates(recording)),
        "decoder": list(part.decoder_updates(recording)),
        "masks": [part.masks(recording, phrase, 8) for phrase in (0, 3)],
    }
    box_px, score, presence = part.heads(recording)
    print(precision, figures, f"box {box_px} px, score {score}, presence {presence}")
    for name in ("text", "text encoder", "fusion", "decoder"):
        assert min(figures[name]) >= UPDATE_BAR[precision], name
    assert min(figures["masks"]) >= MASK_BAR[precision]
    # Random weights move a box by several logits a layer, a trained head by a tenth of that: the products'
    # 10 bits of mantissa then show.
    assert box_px <= (BOX_BAR_PX[precision] if weights == "demo checkpoint" else BOX_BAR_PX["fast"])
    assert score <= SCORE_BAR[precision]
    assert presence <= SCORE_BAR[precision]


# -- planted mistakes, one in each part: each must miss the looser bar of "fast" ---------------------------


def flawed(
    weights: dict[str, Tensor], key: str, change: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    return weights | {key: change(weights[key])}


def test_a_dropped_text_bias_is_seen(
    loaded: Callable[..., LoadedPrompts], reference: Reference
) -> None:
    key = "backbone.language_backbone.encoder.transformer.resblocks.1.attn.in_proj_bias"
    part = loaded("accurate", flawed(reference[0], key, torch.zeros_like))
    assert list(part.text_updates(reference[1]))[1] < UPDATE_BAR["fast"]


def test_keys_for_values_in_the_fusion_are_seen(
    loaded: Callable[..., LoadedPrompts], reference: Reference
) -> None:
    width = DEMO.model_width
    key = "transformer.encoder.layers.1.cross_attn_image.in_proj_weight"
    part = loaded(
        "accurate",
        flawed(reference[0], key, lambda w: torch.cat([w[:width], w[width:].roll(width, 0)])),
    )
    assert list(part.fusion_updates(reference[1]))[1] < UPDATE_BAR["fast"]


def test_a_bias_of_swapped_axes_is_seen(
    loaded: Callable[..., LoadedPrompts], reference: Reference
) -> None:
    """The box-to-pixel bias with rows for columns."""
    weights = dict(reference[0])
    for layer in (0, 1):
        for kind in ("weight", "bias"):
            x, y = (
                f"transformer.decoder.boxRPB_embed_{axis}.layers.{layer}.{kind}" for axis in "xy"
            )
            weights[x], weights[y] = weights[y], weights[x]
    assert min(loaded("accurate", weights).decoder_updates(reference[1])) < UPDATE_BAR["fast"]


def test_a_box_head_of_another_sign_is_seen(
    loaded: Callable[..., LoadedPrompts], reference: Reference
) -> None:
    key = "transformer.decoder.bbox_embed.layers.2.weight"
    box_px, _, _ = loaded("accurate", flawed(reference[0], key, torch.neg)).heads(reference[1])
    assert box_px > BOX_BAR_PX["fast"]


def test_a_mask_head_without_its_pixel_projection_is_seen(
    loaded: Callable[..., LoadedPrompts], reference: Reference
) -> None:
    width = DEMO.model_width
    key = "segmentation_head.instance_seg_head.weight"
    part = loaded(
        "accurate",
        flawed(reference[0], key, lambda _: torch.eye(width).reshape(width, width, 1, 1)),
    )
    assert part.masks(reference[1], 0, 8) < MASK_BAR["fast"]


# -- tables against upstream's own code --------------------------------------------------------------------


def test_sines_of_boxes_are_upstreams() -> None:
    from sam3.model.model_misc import gen_sineembed_for_position

    from sam3_ray.backends.blackhole.parts.decoder import sine_matrix

    boxes = torch.rand(7, 3, 4, generator=torch.Generator().manual_seed(3))
    matrix, phase = sine_matrix(64)
    ours = (boxes @ matrix[:4] + phase).sin()
    torch.testing.assert_close(ours, gen_sineembed_for_position(boxes, 64), atol=1e-5, rtol=0)


def test_edges_of_boxes_are_upstreams() -> None:
    from sam3.model.box_ops import box_cxcywh_to_xyxy

    from sam3_ray.backends.blackhole.parts.decoder import edge_matrix

    boxes = torch.rand(7, 4)
    x0, y0, x1, y1 = (8 * box_cxcywh_to_xyxy(boxes)).unbind(-1)
    ours = boxes @ edge_matrix()[:4, :4]
    torch.testing.assert_close(ours, torch.stack([x0, x1, y0, y1], -1), atol=1e-5, rtol=0)


def test_box_logits_are_cut_as_inverse_sigmoid_cuts_boxes() -> None:
    from sam3.model.model_misc import inverse_sigmoid

    from sam3_ray.backends.blackhole.parts.decoder import BOX_LOGIT_LIMIT

    logits = torch.linspace(-20, 20, 2001)
    ours = logits.clamp(-BOX_LOGIT_LIMIT, BOX_LOGIT_LIMIT)
    upstream = inverse_sigmoid(logits.sigmoid())
    torch.testing.assert_close(ours, upstream, atol=2e-3, rtol=0)
    # in pixels of 1008: nothing
    assert (ours.sigmoid() - upstream.sigmoid()).abs().max() * 1008 < 0.003


@pytest.mark.parametrize("grid", [16, 72, 33])
def test_a_bias_is_spread_over_columns_and_rows(grid: int) -> None:
    from sam3_ray.backends.blackhole.parts.decoder import spread_matrix

    matrix = spread_matrix(grid)
    padded = len(matrix) // 2
    by_column, by_row = torch.randn(grid), torch.randn(grid)
    both = torch.zeros(2 * padded)
    both[:grid], both[padded : padded + grid] = by_column, by_row
    expected = by_row[:, None] + by_column[None, :]
    torch.testing.assert_close((both @ matrix).reshape(grid, grid), expected)


def test_the_pixels_projection_can_be_done_to_the_queries() -> None:
    from sam3_ray.backends.blackhole.parts.segmentation import mask_projection

    embed, pixel = torch.nn.Linear(16, 16), torch.nn.Conv2d(16, 16, 1)
    hidden, pixels = torch.randn(5, 16), torch.randn(1, 16, 6, 6)
    with torch.no_grad():
        expected = torch.einsum("qc,chw->qhw", embed(hidden), pixel(pixels)[0])
        weight, bias, column, constant = mask_projection(
            embed.weight, embed.bias, pixel.weight, pixel.bias
        )
        ours = torch.einsum("qc,chw->qhw", hidden @ weight + bias, pixels[0])
        ours += (hidden @ column + constant)[..., None]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
