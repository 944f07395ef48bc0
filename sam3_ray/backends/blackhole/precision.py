"""The two settings of the chip's arithmetic, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
        attention_fidelity: of both products inside attention, in the image part. With HiFi2 ``fast`` lost
            1.15 points of precision on 40 frozen pictures, with HiFi3 0.58 (emulated,
            tests/blackhole/evaluate.py).
        prompt_attention_fidelity: the same in the prompt part, where it made no difference.
        wide_accumulation: whether sums are kept in float32 in the core's destination registers, which
            halves the tiles that these hold.
        neck_weights, neck_fidelity: the same for the neck, whose 0.2 of the image part's 5.6 TFLOP are the
            last before the features: there bfloat16 and HiFi4 bring the scores of ``fast`` a quarter nearer
            (deviation from the CPU 0.0040, not 0.0054, over the phrases of 40 frozen pictures, emulated).
    """

    name: PrecisionName
    weights: DataTypeName
    fidelity: FidelityName
    attention_fidelity: FidelityName
    prompt_attention_fidelity: FidelityName
    wide_accumulation: bool
    neck_weights: DataTypeName
    neck_fidelity: FidelityName

    @property
    def of_neck(self) -> Precision:
        """The same with the neck's own data type and fidelity."""
        return replace(self, weights=self.neck_weights, fidelity=self.neck_fidelity)

    @property
    def of_prompt(self) -> Precision:
        """The same for the prompt part."""
        return replace(self, attention_fidelity=self.prompt_attention_fidelity)


ACCURATE = Precision(
    name="accurate",
    weights="bfloat16",
    fidelity="HiFi4",
    attention_fidelity="HiFi4",
    prompt_attention_fidelity="HiFi4",
    wide_accumulation=True,
    neck_weights="bfloat16",
    neck_fidelity="HiFi4",
)
FAST = Precision(
    name="fast",
    weights="bfloat8_b",
    fidelity="HiFi2",
    attention_fidelity="HiFi3",
    prompt_attention_fidelity="HiFi2",
    wide_accumulation=False,
    neck_weights="bfloat16",
    neck_fidelity="HiFi4",
)
PRECISIONS: dict[str, Precision] = {setting.name: setting for setting in (ACCURATE, FAST)}

DEFAULT_PRECISION: PrecisionName = "accurate"
"""``accurate``, until a chip has shown what the other costs and brings (docs/blackhole.md)."""
