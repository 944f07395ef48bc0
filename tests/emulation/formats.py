"""Number formats of the Tensix core, and which bits of its operands a multiplication uses.

Sources:
    Math fidelity: tt-metal, tech_reports/matrix_engine/matrix_engine.md, "Math Fidelity" (SrcA gives 5 bits,
    SrcB 7 bits to each pass), and tt-isa-documentation, WormholeB0 SrcASrcB.md, "Fidelity phases
    (floating-point)", which its Blackhole pages share: which mantissa bits each pass takes.
    Which operand is which: tt-isa-documentation, MVMUL.md: ``Dst += SrcB @ SrcA``, so a matmul's first
    operand (in0) is SrcB and its second (in1) SrcA; ELWMUL.md, with tt-metal's mul_tiles: the first is SrcA.
    Block formats: the rounding of tt-metal's host packing, tested against it bit by bit.
"""

from __future__ import annotations

from typing import Literal

import torch

Fidelity = Literal["LoFi", "HiFi2", "HiFi3", "HiFi4"]
FIDELITIES: tuple[Fidelity, ...] = ("LoFi", "HiFi2", "HiFi3", "HiFi4")

# Sign, exponent and the leading mantissa bits of a float32: 4 of them in SrcA, 6 in SrcB.
_SRC_A_HIGH = -0x0008_0000
_SRC_B_HIGH = -0x0002_0000
# What a float32 keeps in a source register: TF32 has 10 mantissa bits; SrcA's multiplier ignores the last.
_SRC_A_TF32 = -0x0000_4000
_SRC_B_TF32 = -0x0000_2000

BLOCK = 16
"""Values along the last axis that share an exponent in bfloat8_b and bfloat4_b."""

BLOCK_BITS = {"bfloat8_b": 7, "bfloat4_b": 3}
"""Magnitude bits of each value, the leading one included."""

_INTEGERS = {
    # Wider than the device's where torch's unsigned types lack arithmetic.
    "uint32": torch.int64,
    "uint16": torch.int32,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


def round_to(value: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round a value to a device data type.

    Args:
        value: any shape; dtype: ttnn's name in lower case.

    Returns:
        bfloat16 for the three bfloat formats (which hold every value of a block format exactly), float32,
        or an integer type wide enough.

    Raises:
        ValueError: the type is unknown.
    """
    if dtype == "bfloat16":
        return value.to(torch.bfloat16)
    if dtype in BLOCK_BITS:
        return round_to_blocks(value, BLOCK_BITS[dtype]).to(torch.bfloat16)
    if dtype == "float32":
        return value.to(torch.float32)
    if dtype in _INTEGERS:
        return value.to(_INTEGERS[dtype])
    raise ValueError(f"no rounding for data type {dtype!r}")


def round_to_blocks(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Round to a block floating-point format: 16 values along the last axis share the largest exponent.

    As the host packs it: a value's 24-bit mantissa is shifted down to the shared exponent, bits that fall out
    are lost, the rest is rounded to ``bits`` bits, half to even, and saturates.

    Args:
        value: any shape, finite; bits: magnitude bits, 7 for bfloat8_b and 3 for bfloat4_b.

    Returns:
        float32 of the same shape.
    """
    shape = value.shape
    if value.numel() == 0:
        return value.to(torch.float32)
    columns = shape[-1] if value.ndim else 1
    rows = value.to(torch.float32).reshape(-1, columns)
    padding = -columns % BLOCK
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    word = rows.contiguous().view(torch.int32).reshape(-1, BLOCK)
    exponent = (word >> 23) & 0xFF
    shared = exponent.amax(1, keepdim=True)
    # Zeros and denormals are zero.
    mantissa = torch.where(exponent == 0, 0, (word & 0x007F_FFFF) | 0x0080_0000)
    mantissa = mantissa >> (shared - exponent).clamp_(max=31)
    shift = 24 - bits
    # Half to even: add just under a half, and one more where the kept part is odd.
    mantissa = (mantissa + (1 << (shift - 1)) - 1 + ((mantissa >> shift) & 1)) >> shift
    mantissa.clamp_(max=(1 << bits) - 1)
    signed = torch.where(word < 0, -mantissa, mantissa).to(torch.float32)
    # In this order no step leaves float32's range, and each is exact.
    result = torch.ldexp(torch.ldexp(signed, torch.tensor(1 - bits)), shared - 127)
    result = result.reshape(rows.shape)
    return result[:, :columns].reshape(shape) if padding else result.reshape(shape)


def _masked(value: torch.Tensor, mask: int) -> torch.Tensor:
    """Keep the bits of a float32 mask, of a bfloat16 or float32 tensor."""
    if value.dtype == torch.bfloat16:
        return (value.view(torch.int16) & (mask >> 16)).view(torch.bfloat16)
    return (value.view(torch.int32) & mask).view(torch.float32)


def high_bits_of_source_a(value: torch.Tensor) -> torch.Tensor:
    """What the first pass takes of SrcA: sign, exponent, hidden bit and 4 mantissa bits."""
    return _masked(value, _SRC_A_HIGH)


def high_bits_of_source_b(value: torch.Tensor) -> torch.Tensor:
    """What the first pass takes of SrcB: sign, exponent, hidden bit and 6 mantissa bits."""
    return _masked(value, _SRC_B_HIGH)


def cut_to_fidelity(
    in0: torch.Tensor, in1: torch.Tensor, fidelity: Fidelity
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pairs of operands whose products a matmul ``in0 @ in1`` adds up.

    SrcA (in1) splits into a_hi and a_lo, SrcB (in0) into b_hi and b_lo; the passes are, in this order,
    a_hi b_hi, a_lo b_hi, a_hi b_lo, a_lo b_lo: LoFi makes one, HiFi2 two, HiFi3 three, HiFi4 all four. Passes
    with a common factor are joined: HiFi2 is one product, of all of SrcA.

    Args:
        in0, in1: bfloat16 (as a bfloat16 or block tensor gives it) or float32, of any shapes. Of a float32
            only the bits of TF32 arrive, whatever the fidelity.

    Returns:
        One pair, or two for HiFi3.

    Raises:
        ValueError: the fidelity is unknown.
    """
    if in0.dtype == torch.float32:
        in0 = _masked(in0, _SRC_B_TF32)
    if in1.dtype == torch.float32:
        in1 = _masked(in1, _SRC_A_TF32)
    match fidelity:
        case "LoFi":
            return [(high_bits_of_source_b(in0), high_bits_of_source_a(in1))]
        case "HiFi2":
            return [(high_bits_of_source_b(in0), in1)]
        case "HiFi3":
            high = high_bits_of_source_b(in0)
            return [(high, in1), (in0 - high, high_bits_of_source_a(in1))]
        case "HiFi4":
            return [(in0, in1)]
        case _:
            raise ValueError(f"fidelity must be one of {FIDELITIES}, got {fidelity!r}")


def product(in0: torch.Tensor, in1: torch.Tensor, fidelity: Fidelity) -> torch.Tensor:
    """The element-wise product on the matrix engine, in0 in SrcA, in1 in SrcB, as float32.

    Args:
        in0, in1: float32, broadcastable. Full fidelity keeps all their bits: they are sums inside an
            operation.
    """
    if fidelity == "HiFi4":
        return in0 * in1
    return sum(
        (first * second for second, first in cut_to_fidelity(in1, in0, fidelity)),
        start=torch.zeros((), dtype=torch.float32),
    )
