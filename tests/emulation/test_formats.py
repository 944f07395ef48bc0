"""Rounding to data types, against ttnn's host code; fidelity, against products worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulation.formats import (
    BLOCK_BITS,
    FIDELITIES,
    cut_to_fidelity,
    high_bits_of_source_a,
    product,
    round_to,
    round_to_blocks,
)

FORMATS = sorted(BLOCK_BITS)


def packed_by_ttnn(value: torch.Tensor, dtype: str) -> torch.Tensor:
    import ttnn

    packed = ttnn.from_torch(value, dtype=getattr(ttnn, dtype), layout=ttnn.TILE_LAYOUT)
    rounded: torch.Tensor = packed.to_torch().float()
    return rounded


def wild(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Values over all exponents of float32, with zeros, denormals, ties and equal neighbours."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(*shape, generator=generator)
    spread = [0, 4, 20, 60][seed % 4]
    exponent = torch.randint(-spread, spread + 1, shape, generator=generator)
    value = value * torch.exp2(exponent.float())
    if seed % 3 == 0:
        value = torch.randint(-511, 512, shape, generator=generator) / 2.0
    if seed % 5 == 0:
        value = value * (torch.rand(*shape, generator=generator) > 0.6)
    if seed % 7 == 0:
        value = value * 1e-38  # half of them denormal
    if seed % 11 == 0:
        value = value.sign() * 1.9999
    return value


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (33, 45), (1, 3, 7, 17), (2, 5, 16)])
def test_blocks_are_rounded_as_ttnn_packs_them(
    emulator: Any, dtype: str, shape: tuple[int, ...]
) -> None:
    for seed in range(60):
        value = wild(seed, shape)
        assert torch.equal(
            round_to_blocks(value, BLOCK_BITS[dtype]), packed_by_ttnn(value, dtype)
        ), seed


@settings(max_examples=80, deadline=None, database=None)
@given(seed=st.integers(0, 2**31), low=st.integers(0, 254), spread=st.integers(0, 254))
@pytest.mark.parametrize("dtype", FORMATS)
def test_any_bits_are_rounded_as_ttnn_packs_them(
    emulator: Any, dtype: str, seed: int, low: int, spread: int
) -> None:
    # Every finite float32, between two exponents that hypothesis chooses.
    generator = torch.Generator().manual_seed(seed)
    shape = (32, 64)
    exponent = torch.randint(low, min(low + spread, 254) + 1, shape, generator=generator)
    mantissa = torch.randint(0, 1 << 23, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator)
    word = (exponent << 23 | mantissa) - (sign << 31)
    value = word.to(torch.int32).view(torch.float32)
    assert torch.equal(round_to_blocks(value, BLOCK_BITS[dtype]), packed_by_ttnn(value, dtype))


def test_block_values_fit_bfloat16() -> None:
    value = wild(3, (64, 64))
    for dtype in FORMATS:
        assert torch.equal(
            round_to(value, dtype).float(), round_to_blocks(value, BLOCK_BITS[dtype])
        )


def test_bfloat16_is_rounded_as_ttnn_packs_it(emulator: Any) -> None:
    import ttnn

    value = wild(1, (33, 45))
    packed = ttnn.from_torch(value, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT).to_torch()
    assert torch.equal(round_to(value, "bfloat16"), packed)


def test_an_unknown_type_is_an_error() -> None:
    with pytest.raises(ValueError, match="fp8"):
        round_to(torch.zeros(1), "fp8")
    with pytest.raises(ValueError, match="HiFi5"):
        cut_to_fidelity(torch.zeros(1), torch.zeros(1), "HiFi5")  # type: ignore[arg-type]


# 1 + 1/2 + 1/4 ... with 8 significant bits: 1.1111111 in binary, all of a bfloat16.
FULL = 2 - 2**-7
A_HIGH, A_LOW = 2 - 2**-4, 2**-4 - 2**-7  # SrcA: 1.1111 and 0.0000111
B_HIGH, B_LOW = 2 - 2**-6, 2**-7  # SrcB: 1.111111 and 0.0000001
BY_HAND = {
    "LoFi": B_HIGH * A_HIGH,
    "HiFi2": B_HIGH * (A_HIGH + A_LOW),
    "HiFi3": B_HIGH * (A_HIGH + A_LOW) + B_LOW * A_HIGH,
    "HiFi4": FULL * FULL,
}


@pytest.mark.parametrize("fidelity", FIDELITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_product_worked_out_by_hand(fidelity: Any, dtype: torch.dtype, sign: int) -> None:
    for power in (-20, 0, 30):
        in0 = torch.tensor([[sign * FULL * 2.0**power]], dtype=dtype)
        in1 = torch.tensor([[FULL]], dtype=dtype)
        total = sum(
            first.double() @ second.double()
            for first, second in cut_to_fidelity(in0, in1, fidelity)
        )
        assert float(total) == sign * BY_HAND[fidelity] * 2.0**power


def test_elementwise_products_have_the_first_operand_in_source_a() -> None:
    first, second = torch.tensor([FULL]), torch.tensor([1.0])
    assert float(product(first, second, "LoFi")) == A_HIGH
    assert float(product(second, first, "LoFi")) == B_HIGH
    assert float(product(first, second, "HiFi2")) == FULL


def test_float32_operands_arrive_as_tf32() -> None:
    third = torch.tensor([[1 / 3]])
    ((in0, in1),) = cut_to_fidelity(third, third, "HiFi4")
    assert (
        float(in0) == int((1 / 3) * 2**12) / 2**12
    )  # 1 + 10 bits from the leading one, at 2 ** -2
    assert float(in1) == int((1 / 3) * 2**11) / 2**11  # and one fewer in SrcA


def test_lofi_truncates_a_weight_by_its_expected_size() -> None:
    # A mantissa cut to 5 bits loses on average half of 2 ** -4 of 1..2: about 2 % of the value.
    value = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 1
    value = value.to(torch.bfloat16)
    lost = (value - high_bits_of_source_a(value)).float()
    assert bool((lost >= 0).all())
    assert float(lost.max()) == A_LOW
    # The three lost bits are uniform over 0..7 steps of 2 ** -7.
    assert float(lost.mean()) == pytest.approx(3.5 * 2**-7, rel=0.02)
