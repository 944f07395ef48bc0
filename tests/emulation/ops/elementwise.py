"""Element-wise operations and reductions.

ttnn 0.81.1 multiplies bfloat16 tensors on the vector unit (the kernel it generates is
``eltwise_binary_sfpu``), where no fidelity cuts anything. Sums along an axis run on the matrix engine with
the data in SrcA against ones, so LoFi cuts them and every other fidelity has all bits of a bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from tests.emulation.formats import high_bits_of_source_a
from tests.emulation.ops.activations import activate_all
from tests.emulation.ops.registry import Arithmetic, Call, value_of

Unary = Callable[[torch.Tensor], torch.Tensor]
Binary = Callable[[torch.Tensor, Any], torch.Tensor]

_UNARY: dict[str, Unary] = {
    "abs": torch.abs,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "floor": torch.floor,
    "gelu": functional.gelu,
    "identity": lambda value: value,
    "log": torch.log,
    "log1p": torch.log1p,
    "logical_not": lambda value: (value == 0).float(),
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sigmoid_accurate": torch.sigmoid,
    "sign": torch.sign,
    "silu": functional.silu,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tanh": torch.tanh,
}

_BINARY: dict[str, Binary] = {
    "add": torch.add,
    "div": torch.div,
    "divide": torch.div,
    "maximum": lambda first, second: torch.maximum(
        first, torch.as_tensor(second, dtype=first.dtype)
    ),
    "minimum": lambda first, second: torch.minimum(
        first, torch.as_tensor(second, dtype=first.dtype)
    ),
    "mul": torch.mul,
    "multiply": torch.mul,
    "rsub": lambda first, second: second - first,
    "sub": torch.sub,
    "subtract": torch.sub,
    # Comparisons and logic give 0 and 1 in the output's type.
    "eq": lambda first, second: (first == second).float(),
    "ge": lambda first, second: (first >= second).float(),
    "gt": lambda first, second: (first > second).float(),
    "le": lambda first, second: (first <= second).float(),
    "lt": lambda first, second: (first < second).float(),
    "ne": lambda first, second: (first != second).float(),
    "logical_and": lambda first, second: ((first != 0) & (torch.as_tensor(second) != 0)).float(),
    "logical_or": lambda first, second: ((first != 0) | (torch.as_tensor(second) != 0)).float(),
}
_IN_PLACE = ("add", "sub", "subtract", "mul", "multiply", "div", "divide")


def _wide(value: Any) -> Any:
    """Floats as float32; integers and numbers as they are."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return value


def _register_unary(name: str, function: Unary) -> None:
    @value_of(f"ttnn.{name}")
    def unary(input_tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        return function(_wide(input_tensor))


def _register_binary(names: Sequence[str], function: Binary) -> None:
    owner = names[0]

    @value_of(*names)
    def binary(*arguments: Any, **keywords: Any) -> torch.Tensor:
        given = list(arguments)
        for name in ("input_tensor_a", "input_a", "input_tensor_b", "input_b", "value"):
            if name in keywords:
                given.append(keywords[name])
        first, second = (_wide(operand) for operand in given[:2])
        if not isinstance(first, torch.Tensor):
            first = torch.as_tensor(first, dtype=second.dtype)
        first = activate_all(first, keywords.get("input_tensor_a_activations"), owner)
        if isinstance(second, torch.Tensor):
            second = activate_all(second, keywords.get("input_tensor_b_activations"), owner)
        return activate_all(function(first, second), keywords.get("activations"), owner)


for _name, _function in _UNARY.items():
    _register_unary(_name, _function)
for _name, _operation in _BINARY.items():
    _aliases = [f"ttnn.{_name}"] + ([f"ttnn.{_name}_"] if _name in _IN_PLACE else [])
    _register_binary(_aliases, _operation)


@value_of("ttnn.where")
def where(predicate: torch.Tensor, true_value: Any, false_value: Any, **_: Any) -> torch.Tensor:
    return torch.where(predicate != 0, _wide(true_value), _wide(false_value))


@value_of("ttnn.clamp", "ttnn.clip")
def clamp(input_tensor: torch.Tensor, min: Any = None, max: Any = None, **_: Any) -> torch.Tensor:
    return torch.clamp(_wide(input_tensor), _wide(min), _wide(max))


@value_of("ttnn.pow")
def power(input_tensor: Any, exponent: Any, **_: Any) -> torch.Tensor:
    return torch.pow(_wide(input_tensor), _wide(exponent))


@value_of("ttnn.addcmul")
def addcmul(
    input_a: torch.Tensor,
    input_b: torch.Tensor,
    input_c: torch.Tensor,
    *,
    value: float = 1.0,
    **_: Any,
) -> torch.Tensor:
    return _wide(input_a) + value * _wide(input_b) * _wide(input_c)


def _axes(value: torch.Tensor, dim: int | Sequence[int] | None) -> list[int]:
    if dim is None:
        return list(range(value.ndim))
    return [dim] if isinstance(dim, int) else list(dim)


REDUCTION = Arithmetic("HiFi4", fp32_accumulate=True)
"""Seen in the generated kernel."""


@value_of("ttnn.sum", "ttnn.mean", default=REDUCTION)
def total(
    input_tensor: torch.Tensor,
    dim: Any = None,
    keepdim: bool = False,
    *,
    arithmetic: Arithmetic,
    call: Call,
    scalar: float = 1.0,
    **_: Any,
) -> Any:
    value = _wide(input_tensor)
    if arithmetic.fidelity == "LoFi" and value.is_floating_point():
        value = high_bits_of_source_a(value)
    reduce: Any = torch.mean if call.name == "ttnn.mean" else torch.sum
    return reduce(value, _axes(value, dim), keepdim=keepdim) * scalar


@value_of("ttnn.max")
def largest(input_tensor: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    value = _wide(input_tensor)
    return value.amax(_axes(value, dim), keepdim=keepdim)


@value_of("ttnn.min")
def smallest(input_tensor: torch.Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    value = _wide(input_tensor)
    return value.amin(_axes(value, dim), keepdim=keepdim)


@value_of("ttnn.argmax")
def argmax(
    input_tensor: torch.Tensor, dim: int | None = None, keepdim: bool = False, **_: Any
) -> torch.Tensor:
    return torch.argmax(_wide(input_tensor), dim, keepdim=keepdim)
