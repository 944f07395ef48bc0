"""Every part of the image part against upstream's float32, at the demo checkpoint's dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sam3_ray.backends.cpu.model import build_modules
from sam3_ray.checkpoint import DEMO_CHECKPOINT, load_checkpoint
from sam3_ray.config import DEMO, Sam3Config
from tests.blackhole.upstream_parts import (
    END_TO_END_BAR,
    UPDATE_BAR,
    LoadedPart,
    Recording,
    pcc,
    photo_like,
    record,
)
from tests.parity.upstream import random_state

TRUNK = "backbone.vision_backbone.trunk."


@pytest.fixture(scope="module")
def square() -> np.ndarray:
    return photo_like(DEMO.image_size)


@pytest.fixture(scope="module")
def references(square: np.ndarray) -> dict[str, tuple[dict, Recording]]:
    """Weights, and what upstream computes with them."""
    found = {}
    for name in ("demo checkpoint", "random weights"):
        modules = build_modules(DEMO)
        if name == "demo checkpoint":
            weights = {k: v.float() for k, v in load_checkpoint(DEMO_CHECKPOINT)[1].items()}
        else:
            weights = random_state(modules)
        modules.load_state_dict(weights, strict=False)
        found[name] = weights, record(modules, square)
    return found


@pytest.fixture
def reference(references: dict[str, tuple[dict, Recording]]) -> tuple[dict, Recording]:
    """Random weights, where every bias, head and rotation has its full say."""
    return references["random weights"]


@pytest.fixture
def loaded(chip: Any, reference: tuple[dict, Recording]) -> Iterator[Callable[..., LoadedPart]]:
    """The image part with these weights, or with others."""
    parts: list[LoadedPart] = []

    def load(precision: str, weights: dict[str, Tensor] | None = None) -> LoadedPart:
        parts.append(LoadedPart(chip, DEMO, weights or reference[0], precision))
        return parts[-1]

    yield load
    for part in parts:
        part.close()


@pytest.mark.parametrize("precision", ["accurate", "fast"])
@pytest.mark.parametrize("weights", ["demo checkpoint", "random weights"])
def test_every_part_meets_its_bar(
    weights: str,
    precision: str,
    loaded: Callable[..., LoadedPart],
    references: dict[str, tuple[dict, Recording]],
    square: np.ndarray,
) -> None:
    tensors, recording = references[weights]
    part = loaded(precision, tensors)
    updates = list(part.block_updates(recording))
    levels, token = part.neck_levels(recording), part.geometry(recording)
    whole = part.end_to_end(square, recording)
    print(f"{precision}: blocks {updates}, levels {levels}, token {token}, end to end {whole}")
    assert min(updates) >= UPDATE_BAR[precision]
    assert min(levels) >= UPDATE_BAR[precision]
    assert token >= UPDATE_BAR[precision]
    assert min(whole) >= END_TO_END_BAR[precision]


# -- planted mistakes: each must miss a bar, the looser one of "fast", in exact arithmetic -----------------


def test_a_dropped_bias_is_seen(
    loaded: Callable[..., LoadedPart], reference: tuple[dict, Recording]
) -> None:
    weights, recording = reference
    key = f"{TRUNK}blocks.1.attn.qkv.bias"
    updates = list(
        loaded("accurate", weights | {key: torch.zeros_like(weights[key])}).block_updates(recording)
    )
    assert updates[1] < UPDATE_BAR["fast"] <= updates[0]


def test_swapped_heads_are_seen(
    loaded: Callable[..., LoadedPart], reference: tuple[dict, Recording]
) -> None:
    weights, recording = reference
    head = DEMO.vit_width // DEMO.vit_heads
    order = torch.arange(3 * DEMO.vit_width)
    order[:head], order[head : 2 * head] = order[head : 2 * head].clone(), order[:head].clone()
    key = f"{TRUNK}blocks.3.attn.qkv"
    wrong = {f"{key}.{name}": weights[f"{key}.{name}"][order] for name in ("weight", "bias")}
    updates = list(loaded("accurate", weights | wrong).block_updates(recording))
    assert updates[3] < UPDATE_BAR["fast"] <= updates[2]


def test_a_flipped_rotation_is_seen(
    monkeypatch: pytest.MonkeyPatch,
    loaded: Callable[..., LoadedPart],
    reference: tuple[dict, Recording],
) -> None:
    from sam3_ray.backends.blackhole.parts import backbone

    right = backbone.rotations

    def flipped(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cosines, sines = right(*args, **kwargs)
        return cosines, torch.cat(
            [-sines[..., : sines.shape[-1] // 2], sines[..., sines.shape[-1] // 2 :]], -1
        )

    monkeypatch.setattr(backbone, "rotations", flipped)
    assert min(loaded("accurate").block_updates(reference[1])) < UPDATE_BAR["fast"]


def test_windows_in_another_order_are_seen(
    monkeypatch: pytest.MonkeyPatch,
    loaded: Callable[..., LoadedPart],
    reference: tuple[dict, Recording],
) -> None:
    """Columns of windows before rows: a windowed block cannot tell, the global ones can."""
    from sam3_ray.backends.blackhole.parts import backbone

    def transposed(table: Tensor, config: Sam3Config) -> Tensor:
        window, windows = config.window_size, config.grid // config.window_size
        cut = table.reshape(windows, window, windows, window, *table.shape[2:])
        return cut.permute(2, 0, 1, 3, *range(4, cut.ndim)).reshape(-1, *table.shape[2:])

    monkeypatch.setattr(backbone, "window_order", transposed)
    updates = list(loaded("accurate").block_updates(reference[1]))
    assert min(updates[i] for i in DEMO.global_blocks) < UPDATE_BAR["fast"]


# -- tables and conversions against upstream's own code ----------------------------------------------------


@pytest.mark.parametrize(("side", "window"), [(24, 24), (72, 24), (16, 8)])
def test_rotations_are_upstreams(side: int, window: int) -> None:
    from sam3.model.vitdet import apply_rotary_enc, compute_axial_cis

    from sam3_ray.backends.blackhole.parts.backbone import pair_rotation, rotations

    queries = torch.randn(1, 2, side * side, 64, generator=torch.Generator().manual_seed(1))
    scale = window / side
    table = compute_axial_cis(dim=64, end_x=side, end_y=side, scale_pos=scale)
    expected, _ = apply_rotary_enc(queries, queries, table)
    cosines, sines = (t.reshape(-1, 64) for t in rotations(side, 64, scale=scale))
    turned = (queries.reshape(1, 2, -1, 2, 32) @ pair_rotation()).reshape(queries.shape)
    torch.testing.assert_close(queries * cosines + turned * sines, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("grid", "width"), [(72, 256), (16, 64), (5, 32)])
def test_sine_positions_are_upstreams(grid: int, width: int) -> None:
    from sam3.model.position_encoding import PositionEmbeddingSine

    from sam3_ray.backends.blackhole.parts.geometry import sine_positions

    expected = PositionEmbeddingSine(width)(torch.zeros(1, width, grid, grid))
    torch.testing.assert_close(
        sine_positions(grid, width), expected[0].flatten(1).t(), atol=1e-5, rtol=0
    )


def test_patches_are_the_convolutions_windows(square: np.ndarray) -> None:
    """A product with the patches is upstream's patch embedding, in upstream's window order."""
    from sam3.model.vitdet import window_partition

    from sam3_ray.backends.blackhole.parts.backbone import patches

    kernel = torch.randn(5, 3, DEMO.patch_size, DEMO.patch_size)
    image = torch.from_numpy(square).permute(2, 0, 1)[None].float()
    tokens = torch.nn.functional.conv2d(image, kernel, stride=DEMO.patch_size).permute(0, 2, 3, 1)
    expected, _ = window_partition(tokens, DEMO.window_size)
    rows = torch.from_numpy(patches(square, DEMO)).float()
    inner = kernel.permute(2, 3, 1, 0).reshape(-1, 5)
    assert not rows[:, len(inner) :].any()
    torch.testing.assert_close(
        rows[:, : len(inner)] @ inner, expected.reshape(-1, 5), atol=0.5, rtol=1e-4
    )


@pytest.mark.parametrize("then", [False, True])
def test_an_upsampling_is_a_transposed_convolution(then: bool) -> None:
    from sam3_ray.backends.blackhole.parts.neck import upsample_weight

    generator = torch.Generator().manual_seed(2)
    upsample = torch.nn.ConvTranspose2d(6, 4, kernel_size=2, stride=2)
    project = torch.nn.Conv2d(4, 3, kernel_size=1)
    tensors = [upsample.weight, upsample.bias, *([project.weight, project.bias] if then else [])]
    x = torch.randn(1, 6, 5, 7, generator=generator)
    with torch.no_grad():
        expected = project(upsample(x)) if then else upsample(x)
        weight, bias = upsample_weight(*tensors)
        quarters = x[0].flatten(1).t() @ weight + bias
    channels = quarters.shape[1] // 4
    shuffled = (
        quarters.reshape(5, 7, 2, 2, channels).permute(4, 0, 2, 1, 3).reshape(1, channels, 10, 14)
    )
    torch.testing.assert_close(shuffled, expected, atol=1e-5, rtol=1e-5)


def test_pcc_is_numpys() -> None:
    a, b = torch.randn(50), torch.randn(50)
    assert pcc(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-6)
