"""Layer, root-mean-square and group normalisation, softmax.

Their products run on the matrix engine too, so a low fidelity cuts them: the deviation times the reciprocal
of its standard deviation, and that times the weight. Statistics are float32 and uncut. The defaults
are those of the generated kernels (test_fidelity_defaults.py).
"""

from __future__ import annotations

from typing import Any

import torch

from tests.emulation.errors import EmulationError
from tests.emulation.formats import Fidelity, product
from tests.emulation.ops.registry import Arithmetic, value_of


def _row(parameter: torch.Tensor, width: int) -> torch.Tensor:
    """A weight or bias of ``width`` values, however ttnn wants it shaped."""
    return parameter.float().reshape(-1)[:width]


def _scaled(
    deviation: torch.Tensor,
    variance: torch.Tensor,
    epsilon: float,
    fidelity: Fidelity,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The last steps that all three share; weight and bias broadcast."""
    result = product(deviation, torch.rsqrt(variance + epsilon), fidelity)
    if weight is not None:
        result = product(result, weight, fidelity)
    return result if bias is None else result + bias


@value_of("ttnn.layer_norm", default=Arithmetic("HiFi4", fp32_accumulate=True))
def layer_norm(
    input_tensor: torch.Tensor,
    *,
    arithmetic: Arithmetic,
    epsilon: float = 1e-12,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual_input_tensor: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    value = input_tensor.float()
    if residual_input_tensor is not None:
        value = value + residual_input_tensor.float()
    width = value.shape[-1]
    gain = None if weight is None else _row(weight, width)
    offset = None if bias is None else _row(bias, width)
    if arithmetic.fidelity == "HiFi4":
        return torch.nn.functional.layer_norm(value, (width,), gain, offset, epsilon)
    variance, mean = torch.var_mean(value, -1, unbiased=False, keepdim=True)
    return _scaled(value - mean, variance, epsilon, arithmetic.fidelity, gain, offset)


@value_of("ttnn.rms_norm", default=Arithmetic("HiFi4", fp32_accumulate=False))
def rms_norm(
    input_tensor: torch.Tensor,
    *,
    arithmetic: Arithmetic,
    epsilon: float = 1e-12,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual_input_tensor: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    value = input_tensor.float()
    if residual_input_tensor is not None:
        value = value + residual_input_tensor.float()
    width = value.shape[-1]
    return _scaled(
        value,
        value.square().mean(-1, keepdim=True),
        epsilon,
        arithmetic.fidelity,
        None if weight is None else _row(weight, width),
        None if bias is None else _row(bias, width),
    )


@value_of("ttnn.group_norm", default=Arithmetic("HiFi4", fp32_accumulate=False))
def group_norm(
    input_tensor: torch.Tensor,
    *,
    num_groups: int,
    arithmetic: Arithmetic,
    epsilon: float = 1e-12,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Over (N, 1, H W, C), each group's channels and all of H W together."""
    images, _one, pixels, channels = input_tensor.shape
    value = input_tensor.float().reshape(images, pixels, num_groups, channels // num_groups)
    variance, mean = torch.var_mean(value, (1, 3), unbiased=False, keepdim=True)
    shape = (1, 1, num_groups, channels // num_groups)
    result = _scaled(
        value - mean,
        variance,
        epsilon,
        arithmetic.fidelity,
        None if weight is None else _row(weight, channels).reshape(shape),
        None if bias is None else _row(bias, channels).reshape(shape),
    )
    return result.reshape(input_tensor.shape)


@value_of(
    "ttnn.scale_mask_softmax_in_place",
    default=Arithmetic("HiFi4", fp32_accumulate=True),
)
def scale_mask_softmax_in_place(
    input_tensor: torch.Tensor,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    *,
    arithmetic: Arithmetic,
    is_causal_mask: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Scaled, a mask of one row for each of the batch added, and the softmax of it."""
    if is_causal_mask:
        raise EmulationError("a causal mask: only one row for each of the batch is known here")
    value = input_tensor.float()
    if scale is not None:
        value = value * scale
    if mask is not None:
        value = value + mask.float()
    return softmax(value, arithmetic=arithmetic)


@value_of(
    "ttnn.softmax", "ttnn.softmax_in_place", default=Arithmetic("HiFi4", fp32_accumulate=True)
)
def softmax(
    input_tensor: torch.Tensor, dim: int = -1, *, arithmetic: Arithmetic, **_: Any
) -> torch.Tensor:
    if arithmetic.fidelity == "HiFi4":
        return torch.softmax(input_tensor.float(), dim)
    value = input_tensor.float()
    weights = (value - value.amax(dim, keepdim=True)).exp()
    return product(weights, weights.sum(dim, keepdim=True).reciprocal(), arithmetic.fidelity)
