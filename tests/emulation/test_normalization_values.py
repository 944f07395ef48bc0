"""Normalisations and softmax against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from tests.emulation.samples import assert_rounds_to, down, random, up
from tests.emulation.test_matmul_values import kernel


@pytest.mark.parametrize(("rows", "width"), [(64, 128), (33, 45)])
def test_layer_norm(chip: Any, rows: int, width: int) -> None:
    import ttnn

    x = random(1, 1, rows, width) * 3 + 1
    x = x.to(torch.bfloat16).float()
    weight, bias = random(1, width, seed=1), random(1, width, seed=2)
    residual = random(1, 1, rows, width, seed=3)
    tensors = {"weight": up(chip, weight), "bias": up(chip, bias), "epsilon": 1e-6}
    expected = functional.layer_norm(x, (width,), weight[0], bias[0], 1e-6)
    assert_rounds_to(ttnn.layer_norm(up(chip, x), **tensors), expected)
    result = ttnn.layer_norm(up(chip, x), residual_input_tensor=up(chip, residual), **tensors)
    assert_rounds_to(
        result, functional.layer_norm(x + residual, (width,), weight[0], bias[0], 1e-6)
    )
    assert_rounds_to(
        ttnn.layer_norm(up(chip, x), epsilon=1e-6), functional.layer_norm(x, (width,), eps=1e-6)
    )


def test_layer_norm_takes_weights_in_rows_of_a_tile(chip: Any) -> None:
    import ttnn

    x, weight = random(1, 1, 32, 128), random(128, seed=1)
    rows = up(chip, weight.reshape(1, 1, 4, 32), layout=ttnn.ROW_MAJOR_LAYOUT)
    result = ttnn.layer_norm(up(chip, x), weight=rows, bias=rows, epsilon=1e-5)
    assert_rounds_to(result, functional.layer_norm(x, (128,), weight, weight, 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(64, 128), (33, 45)])
def test_rms_norm(chip: Any, rows: int, width: int) -> None:
    import ttnn

    x, weight = random(1, 1, rows, width), random(1, width, seed=1)
    result = ttnn.rms_norm(up(chip, x), weight=up(chip, weight), epsilon=1e-6)
    assert_rounds_to(result, functional.rms_norm(x, (width,), weight[0], 1e-6))


def test_group_norm(chip: Any) -> None:
    import ttnn

    channels, groups, side = 64, 8, 16
    x = random(1, 1, side * side, channels)
    weight, bias = random(channels, seed=1), random(channels, seed=2)
    grid = ttnn.CoreGrid(y=1, x=1)
    mask = ttnn.create_group_norm_input_mask(channels, groups, grid.y, ttnn.DataType.BFLOAT8_B)
    parameters = [
        up(
            chip,
            ttnn.create_group_norm_weight_bias_rm(value, channels, grid.y),
            layout=ttnn.ROW_MAJOR_LAYOUT,
        )
        for value in (weight, bias)
    ]
    result = ttnn.group_norm(
        up(chip, x),
        num_groups=groups,
        epsilon=1e-5,
        input_mask=ttnn.to_device(mask, chip),
        weight=parameters[0],
        bias=parameters[1],
        memory_config=ttnn.DRAM_MEMORY_CONFIG,
        core_grid=grid,
        inplace=False,
        num_out_blocks=1,
    )
    image = x.reshape(1, side, side, channels).permute(0, 3, 1, 2)
    expected = functional.group_norm(image, groups, weight, bias, 1e-5).permute(0, 2, 3, 1)
    assert_rounds_to(result, expected.reshape(x.shape))


@pytest.mark.parametrize(("rows", "width"), [(64, 128), (33, 45)])
def test_softmax(chip: Any, rows: int, width: int) -> None:
    import ttnn

    x = random(1, 2, rows, width)
    tensor = up(chip, x)
    assert_rounds_to(ttnn.softmax(tensor, dim=-1), torch.softmax(x, -1))
    ttnn.softmax_in_place(tensor)
    assert_rounds_to(tensor, torch.softmax(x, -1))


def test_masked_softmax(chip: Any) -> None:
    import ttnn

    x, mask = random(2, 3, 64, 96), random(2, 1, 1, 96, seed=1) * 4
    tensor = up(chip, x)
    ttnn.scale_mask_softmax_in_place(tensor, 0.5, up(chip, mask), numeric_stable=True)
    mask = mask.to(torch.bfloat16).float()
    assert_rounds_to(tensor, torch.softmax(x * 0.5 + mask, -1))
    with pytest.raises(Exception, match="causal"):
        ttnn.scale_mask_softmax_in_place(tensor, 0.5, up(chip, mask), is_causal_mask=True)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "softmax"])
def test_a_low_fidelity_cuts_their_products_too(chip: Any, name: str) -> None:
    import ttnn

    x = up(chip, random(1, 1, 64, 128))
    values = [
        down(getattr(ttnn, name)(x, compute_kernel_config=kernel(fidelity)))
        for fidelity in ("HiFi4", "HiFi2", "LoFi")
    ]
    high, low = ((value - values[0]).norm() / values[0].norm() for value in values[1:])
    assert 0 < high < low / 2 < 0.04
