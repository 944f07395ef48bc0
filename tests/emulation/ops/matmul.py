"""Matrix products: linear, matmul, minimal_matmul and its fused forms.

in0 goes to the SrcB register and in1 (the weights) to SrcA, so LoFi cuts a weight to 5 significant bits and
an activation to 7. Sums are float32 here whatever ``fp32_dest_acc_en`` says: bfloat16 sums between the blocks
of K are not modelled. Large products of bfloat16 operands run in torch's bfloat16 kernel (float32 sums, one
rounding, after the bias), which is three times as fast; an activation is then applied to a rounded value.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.emulation.formats import BLOCK_BITS, Fidelity, cut_to_fidelity
from tests.emulation.ops.activations import activate
from tests.emulation.ops.registry import Arithmetic, Call, value_of

_LARGE = 1 << 27
"""Multiplications from which on bfloat16 is worth its overhead; measured on one core."""


def matrix_product(
    in0: torch.Tensor, in1: torch.Tensor, fidelity: Fidelity, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``in0 @ in1 + bias`` with the operands cut to a fidelity.

    Args:
        in0: (..., M, K); in1: (K, N), or batched; bias: N values.

    Returns:
        (..., M, N) float32, or bfloat16 where the product was large.
    """
    if in1.ndim > 2 and in1.shape[:-2].numel() == 1:
        in1 = in1.reshape(in1.shape[-2:])
    pairs = cut_to_fidelity(in0, in1, fidelity)
    low = in0.dtype == torch.bfloat16 and in1.dtype == torch.bfloat16 and len(pairs) == 1
    if low and in0.numel() * in1.shape[-1] >= _LARGE:
        (first, second), columns = pairs[0], in1.shape[-1]
        if in1.ndim == 2:
            rows = first.reshape(-1, first.shape[-1])
            if bias is None:
                return (rows @ second).reshape(*in0.shape[:-1], columns)
            flat = bias.reshape(-1)[-columns:].to(torch.bfloat16)
            return torch.addmm(flat, rows, second).reshape(*in0.shape[:-1], columns)
        if bias is None:
            return first @ second
    total = pairs[0][0].float() @ pairs[0][1].float()
    for first, second in pairs[1:]:
        total = total + first.float() @ second.float()
    return total if bias is None else total + _as_row(bias, total)


def _as_row(bias: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """A bias of N values as it broadcasts over rows; any other is added as it is."""
    if bias.numel() == total.shape[-1]:
        return bias.float().reshape(-1)
    return bias.float()


def matmul_default(call: Call) -> Arithmetic:
    """What ttnn 0.81.1 takes without a kernel config (matmul_device_operation.cpp, create_matmul_attributes).

    HiFi2, but LoFi where both operands are block formats or the caller chose the cores, HiFi4 where both are
    float32; sums in float32 for a float32 output only.
    """
    first, second = call.input_dtypes[0], call.input_dtypes[1]
    chosen = (
        call.keywords.get("program_config") is not None
        or call.keywords.get("core_grid") is not None
    )
    fidelity: Fidelity = (
        "LoFi" if chosen or (first in BLOCK_BITS and second in BLOCK_BITS) else "HiFi2"
    )
    if first == second == "float32":
        fidelity = "HiFi4"
    return Arithmetic(fidelity, call.output_dtypes[0] == "float32")


@value_of("ttnn.linear", "ttnn.matmul", default=matmul_default)
def linear(
    input_tensor_a: torch.Tensor,
    input_tensor_b: torch.Tensor,
    *,
    arithmetic: Arithmetic,
    bias: torch.Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: Any = None,
    program_config: Any = None,
    **_: Any,
) -> torch.Tensor:
    in0 = input_tensor_a.transpose(-1, -2) if transpose_a else input_tensor_a
    in1 = input_tensor_b.transpose(-1, -2) if transpose_b else input_tensor_b
    total = matrix_product(in0, in1, arithmetic.fidelity, bias)
    fused = getattr(program_config, "fused_activation", None) or activation
    return total if fused is None else activate(total.float(), fused, "ttnn.linear")


MINIMAL = Arithmetic("HiFi2", fp32_accumulate=True)
"""minimal_matmul.cpp's default."""


@value_of("ttnn.experimental.minimal_matmul", default=MINIMAL)
def minimal_matmul(
    input_tensor: torch.Tensor | list[torch.Tensor],
    weight_tensor: torch.Tensor,
    *,
    arithmetic: Arithmetic,
    bias_tensor: torch.Tensor | None = None,
    fused_activation: Any = None,
    **_: Any,
) -> torch.Tensor:
    in0 = (
        torch.cat(list(input_tensor), -1)
        if isinstance(input_tensor, (list, tuple))
        else input_tensor
    )
    total = matrix_product(in0, weight_tensor, arithmetic.fidelity, bias_tensor)
    if fused_activation is None:
        return total
    return activate(total.float(), fused_activation, "ttnn.experimental.minimal_matmul")


@value_of("ttnn.experimental.minimal_matmul_split", default=MINIMAL)
def minimal_matmul_split(
    input_tensor: torch.Tensor,
    weight_tensor: torch.Tensor,
    *,
    arithmetic: Arithmetic,
    chunks: int = 3,
    dim: int = -1,
    bias_tensor: torch.Tensor | None = None,
    fused_activation: Any = None,
    **_: Any,
) -> list[torch.Tensor]:
    total = minimal_matmul(
        input_tensor,
        weight_tensor,
        arithmetic=arithmetic,
        bias_tensor=bias_tensor,
        fused_activation=fused_activation,
    )
    return list(total.chunk(chunks, dim))


@value_of("ttnn.experimental.dit_minimal_matmul_addcmul_fused", default=MINIMAL)
def minimal_matmul_addcmul(
    matmul_input_tensor: torch.Tensor,
    matmul_weight_tensor: torch.Tensor,
    scalar: float,
    addcmul_input_tensor1: torch.Tensor,
    addcmul_input_tensor2: torch.Tensor,
    bias_tensor: torch.Tensor | None = None,
    *,
    arithmetic: Arithmetic,
    **_: Any,
) -> torch.Tensor:
    total = matrix_product(
        matmul_input_tensor, matmul_weight_tensor, arithmetic.fidelity, bias_tensor
    )
    return addcmul_input_tensor1.float() + scalar * total.float() * addcmul_input_tensor2.float()
