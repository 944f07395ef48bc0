"""The two settings of the chip's arithmetic, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal["accurate", "fast"]
FidelityName = Literal["LoFi", "HiFi2", "HiFi3", "HiFi4"]
DataTypeName = Literal["bfloat16", "bfloat8_b", "float32"]


@dataclass(frozen=True)
class Precision:
    """Data types and math fidelities of one setting.

    Attributes:
        name: what the user asks for.
        weights: data type of the large matrices; biases, norms and tables are always bfloat16.
        fidelity: of matrix multiplications and convolutions: how many bits of both operands' mantissas
            the matrix engine multiplies (tt-metal, ``tech_reports/matrix_engine``).
        attention_fidelity: of both products inside attention.
        wide_accumulation: whether sums are kept in float32 in the core's destination registers, which
            halves the tiles that these hold.
    """

    name: PrecisionName
    weights: DataTypeName
    fidelity: FidelityName
    attention_fidelity: FidelityName
    wide_accumulation: bool


ACCURATE = Precision(
    name="accurate",
    weights="bfloat16",
    fidelity="HiFi4",
    attention_fidelity="HiFi4",
    wide_accumulation=True,
)
FAST = Precision(
    name="fast",
    weights="bfloat8_b",
    fidelity="HiFi2",
    attention_fidelity="HiFi2",
    wide_accumulation=False,
)
PRECISIONS: dict[str, Precision] = {setting.name: setting for setting in (ACCURATE, FAST)}

DEFAULT_PRECISION: PrecisionName = "accurate"
"""``accurate``, until a chip has shown what the other costs and brings (docs/blackhole.md)."""
