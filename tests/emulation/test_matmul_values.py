"""Matrix products against torch, and what a fidelity does to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulation import EmulationError, UnknownOperationError
from tests.emulation.samples import assert_rounds_to, down, random, up

SHAPES = [(64, 128, 96), (33, 45, 70), (1, 588, 65)]


def kernel(fidelity: str, fp32: bool = False) -> Any:
    import ttnn

    return ttnn.WormholeComputeKernelConfig(
        math_fidelity=getattr(ttnn.MathFidelity, fidelity), fp32_dest_acc_en=fp32
    )


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_linear(chip: Any, rows: int, inner: int, columns: int) -> None:
    import ttnn

    x, weight, bias = (
        random(1, 1, rows, inner),
        random(inner, columns, seed=1),
        random(1, columns, seed=2),
    )
    result = ttnn.linear(
        up(chip, x), up(chip, weight), bias=up(chip, bias), compute_kernel_config=kernel("HiFi4")
    )
    assert_rounds_to(result, x @ weight + bias)


def test_linear_with_a_fused_activation_and_blocks(chip: Any) -> None:
    import ttnn

    x, weight = random(1, 2, 40, 64), random(64, 96, seed=1)
    packed = up(chip, weight, ttnn.bfloat8_b)
    result = ttnn.linear(
        up(chip, x), packed, activation="gelu", compute_kernel_config=kernel("HiFi4")
    )
    stored = (
        ttnn.from_torch(weight, dtype=ttnn.bfloat8_b, layout=ttnn.TILE_LAYOUT).to_torch().float()
    )
    assert_rounds_to(result, torch.nn.functional.gelu(x @ stored))


def test_matmul_batched_and_transposed(chip: Any) -> None:
    import ttnn

    first, second = random(2, 3, 40, 64), random(2, 3, 50, 64, seed=1)
    result = ttnn.matmul(
        up(chip, first), up(chip, second), transpose_b=True, compute_kernel_config=kernel("HiFi4")
    )
    assert_rounds_to(result, first @ second.transpose(-1, -2))


def test_minimal_matmul(chip: Any) -> None:
    import ttnn

    x, weight, bias = random(1, 1, 64, 96), random(96, 128, seed=1), random(1, 128, seed=2)
    result = ttnn.experimental.minimal_matmul(
        up(chip, x),
        up(chip, weight),
        bias_tensor=up(chip, bias),
        fused_activation=ttnn.UnaryWithParam(ttnn.UnaryOpType.RELU),
        compute_kernel_config=kernel("HiFi4"),
    )
    assert_rounds_to(result, torch.relu(x @ weight + bias))


def test_minimal_matmul_split(chip: Any) -> None:
    import ttnn

    x, weight = random(1, 1, 64, 96), random(96, 192, seed=1)
    parts = ttnn.experimental.minimal_matmul_split(
        up(chip, x), up(chip, weight), chunks=3, dim=-1, compute_kernel_config=kernel("HiFi4")
    )
    for part, expected in zip(parts, (x @ weight).chunk(3, -1), strict=True):
        assert_rounds_to(part, expected)


def test_dit_minimal_matmul_addcmul_fused(chip: Any) -> None:
    import ttnn

    x, weight, base, gate = (random(1, 1, 64, 64, seed=seed) for seed in range(4))
    weight = weight.reshape(64, 64)
    result = ttnn.experimental.dit_minimal_matmul_addcmul_fused(
        up(chip, x),
        up(chip, weight),
        0.5,
        up(chip, base),
        up(chip, gate),
        compute_kernel_config=kernel("HiFi4"),
    )
    assert_rounds_to(result, base + 0.5 * (x @ weight) * gate)


def test_large_products_equal_small_ones(chip: Any) -> None:
    # Above a size torch's bfloat16 kernel is used: the same rounding of the same sums.
    import ttnn

    x, weight, bias = (
        random(1, 1, 1024, 512),
        random(512, 512, seed=1, scale=0.05),
        random(1, 512, seed=2),
    )
    tensors = up(chip, x), up(chip, weight)
    result = ttnn.linear(*tensors, bias=up(chip, bias), compute_kernel_config=kernel("HiFi4"))
    assert_rounds_to(result, x @ weight + bias, steps=1.1)


@pytest.mark.parametrize("operation", ["linear", "minimal_matmul"])
def test_a_fidelity_cuts_the_weight_and_the_activation(chip: Any, operation: str) -> None:
    import ttnn

    function = ttnn.linear if operation == "linear" else ttnn.experimental.minimal_matmul
    full = 2 - 2**-7
    x, weight = torch.full((1, 1, 32, 32), full), torch.eye(32) * full
    by_hand = {
        "LoFi": (2 - 2**-6) * (2 - 2**-4),
        "HiFi2": (2 - 2**-6) * full,
        "HiFi3": (2 - 2**-6) * full + 2**-7 * (2 - 2**-4),
        "HiFi4": full * full,
    }
    for fidelity, value in by_hand.items():
        result = function(up(chip, x), up(chip, weight), compute_kernel_config=kernel(fidelity))
        expected = torch.tensor(value).to(torch.bfloat16).float()
        assert torch.equal(down(result), expected.expand(1, 1, 32, 32)), fidelity


def test_fidelities_differ_by_their_expected_size(chip: Any) -> None:
    import ttnn

    x, weight = random(1, 1, 64, 256), random(256, 128, seed=1)
    exact = x @ weight
    error = {}
    for fidelity in ("LoFi", "HiFi2", "HiFi3", "HiFi4"):
        result = ttnn.linear(
            up(chip, x),
            up(chip, weight),
            dtype=ttnn.float32,
            compute_kernel_config=kernel(fidelity, fp32=True),
        )
        error[fidelity] = float((down(result) - exact).norm() / exact.norm())
    # A factor is short by 2 ** -4 steps (LoFi) or 2 ** -6 (HiFi2): mean relative errors of 2 % and 0.3 %.
    assert 0.01 < error["LoFi"] < 0.06
    assert 0.001 < error["HiFi2"] < 0.01
    assert error["HiFi3"] < error["HiFi2"] / 5
    assert error["HiFi4"] < 1e-6


def test_a_config_without_fidelity_is_refused(chip: Any) -> None:
    # ttnn 0.81.1 would write 255 into the kernel; see test_fidelity_defaults.py.
    import ttnn

    x, weight = up(chip, random(1, 1, 32, 32)), up(chip, random(32, 32, seed=1))
    with pytest.raises(EmulationError, match=r"ttnn\.linear: .* no math_fidelity"):
        ttnn.linear(x, weight, compute_kernel_config=ttnn.WormholeComputeKernelConfig())


def test_an_unknown_activation_is_named(chip: Any) -> None:
    import ttnn

    x, weight = up(chip, random(1, 1, 32, 32)), up(chip, random(32, 32, seed=1))
    with pytest.raises(UnknownOperationError, match=r"ttnn\.linear.*mish"):
        ttnn.linear(x, weight, activation="mish")
