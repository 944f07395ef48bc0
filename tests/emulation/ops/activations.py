"""Activations that ttnn fuses into other operations, by the names and objects that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional

from tests.emulation.errors import UnknownOperationError

_BY_NAME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    # The approximation that ttnn calls approximate is its own; only a chip has it.
    "gelu_approx": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "log1p": torch.log1p,
    "square": torch.square,
}


def activate(value: torch.Tensor, activation: Any, owner: str) -> torch.Tensor:
    """Apply a fused activation to a float32 value.

    Args:
        activation: None, a name, a ``UnaryOpType`` or a ``UnaryWithParam``; owner: named in the error.

    Raises:
        UnknownOperationError: the emulation has no value for it.
    """
    if activation is None:
        return value
    name = activation if isinstance(activation, str) else getattr(activation, "op_type", activation)
    name = name if isinstance(name, str) else name.name
    function = _BY_NAME.get(name.lower())
    if function is None:
        raise UnknownOperationError(f"{owner}: no value for the fused activation {name!r}")
    return function(value)


def activate_all(value: torch.Tensor, activations: Any, owner: str) -> torch.Tensor:
    """Apply a list of fused activations, first one first."""
    for activation in activations or ():
        value = activate(value, activation, owner)
    return value
