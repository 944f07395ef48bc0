"""Element-wise operations and reductions against torch, on a shape that is no multiple of the tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from tests.emulation import UnknownOperationError
from tests.emulation.samples import assert_rounds_to, down, random, up

SHAPE = (1, 2, 33, 45)
UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": torch.abs,
    "ceil": torch.ceil,
    "floor": torch.floor,
    "identity": lambda value: value,
    "logical_not": lambda value: (value == 0).float(),
    "sigmoid_accurate": torch.sigmoid,
    "sign": torch.sign,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "gelu": functional.gelu,
    "neg": torch.neg,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "sin": torch.sin,
    "square": torch.square,
    "tanh": torch.tanh,
}
POSITIVE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "log": torch.log,
    "log1p": torch.log1p,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
}
BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(chip: Any, name: str) -> None:
    import ttnn

    x = random(*SHAPE)
    assert_rounds_to(getattr(ttnn, name)(up(chip, x)), UNARY[name](x))


@pytest.mark.parametrize("name", POSITIVE)
def test_unary_of_positive_values(chip: Any, name: str) -> None:
    import ttnn

    x = (random(*SHAPE).abs() + 0.25).to(torch.bfloat16).float()
    assert_rounds_to(getattr(ttnn, name)(up(chip, x)), POSITIVE[name](x))


@pytest.mark.parametrize("name", BINARY)
def test_binary(chip: Any, name: str) -> None:
    import ttnn

    function = getattr(ttnn, name)
    x, y, row = random(*SHAPE), random(*SHAPE, seed=1), random(1, 1, 1, 45, seed=2)
    assert_rounds_to(function(up(chip, x), up(chip, y)), BINARY[name](x, y))
    assert_rounds_to(function(up(chip, x), up(chip, row)), BINARY[name](x, row))
    assert_rounds_to(function(up(chip, x), 1.5), BINARY[name](x, torch.tensor(1.5)))


def test_operators_fused_activations_and_given_outputs(chip: Any) -> None:
    import ttnn

    x, y = random(*SHAPE), random(*SHAPE, seed=1)
    a, b = up(chip, x), up(chip, y)
    assert_rounds_to(a + b, x + y)
    assert_rounds_to(a * 2.0, x * 2)
    relu = [ttnn.UnaryWithParam(ttnn.UnaryOpType.RELU)]
    assert_rounds_to(ttnn.add(a, b, activations=relu), torch.relu(x + y))
    kinds = [
        ttnn.UnaryWithParam(getattr(ttnn.UnaryOpType, name)) for name in ("ABS", "LOG1P", "SIGN")
    ]
    logarithms = ttnn.multiply(
        a, a, input_tensor_a_activations=kinds[2:], input_tensor_b_activations=kinds[:2]
    )
    assert_rounds_to(logarithms, x.sign() * x.abs().log1p())
    target = up(chip, torch.zeros(SHAPE))
    ttnn.multiply(a, b, output_tensor=target)
    assert_rounds_to(target, x * y)
    ttnn.add_(a, b)
    assert_rounds_to(a, x + y)
    blocks = up(chip, x, ttnn.bfloat8_b)
    stored = down(blocks)
    assert_rounds_to(ttnn.add(b, blocks), y + stored)


@pytest.mark.parametrize("name", ["eq", "ge", "gt", "le", "lt", "ne"])
def test_comparisons(chip: Any, name: str) -> None:
    import ttnn

    x = random(*SHAPE).round()
    y = random(*SHAPE, seed=1).round()  # many equal values
    result = getattr(ttnn, name)(up(chip, x), up(chip, y))
    assert torch.equal(down(result), getattr(torch, name)(x, y).float())


def test_logic_aliases_and_in_place_forms(chip: Any) -> None:
    import ttnn

    x, y = random(*SHAPE).round(), random(*SHAPE, seed=1).round()
    a, b = up(chip, x), up(chip, y)
    assert torch.equal(down(ttnn.logical_and(a, b)), torch.logical_and(x, y).float())
    assert torch.equal(down(ttnn.logical_or(a, b)), torch.logical_or(x, y).float())
    assert torch.equal(down(ttnn.sub(a, b)), x - y)
    assert torch.equal(down(ttnn.mul(a, b)), x * y)
    assert torch.equal(down(ttnn.rsub(a, b)), y - x)
    assert torch.equal(down(ttnn.clip(a, -1.0, 1.0)), x.clamp(-1, 1))
    assert_rounds_to(ttnn.divide(a, 3.0), x / 3)
    ttnn.mul_(a, b)
    ttnn.sub_(a, b)
    assert_rounds_to(a, x * y - y)
    ttnn.multiply_(a, 2.0)
    ttnn.subtract_(a, 1.0)
    ttnn.div_(a, 4.0)
    ttnn.divide_(a, 2.0)
    assert_rounds_to(a, (2 * (x * y - y) - 1) / 8)


def test_comparisons_where_clamp_and_pow(chip: Any) -> None:
    import ttnn

    x, y = random(*SHAPE), random(*SHAPE, seed=1)
    a, b = up(chip, x), up(chip, y)
    assert torch.equal(down(ttnn.gt(a, b)), (x > y).float())
    assert torch.equal(down(ttnn.where(ttnn.lt(a, 0.0), a, b)), torch.where(x < 0, x, y))
    assert torch.equal(down(ttnn.clamp(a, -0.5, 0.5)), x.clamp(-0.5, 0.5))
    assert_rounds_to(ttnn.pow(a, 2), x**2)
    assert_rounds_to(ttnn.addcmul(a, a, b, value=0.5), x + 0.5 * x * y)


@pytest.mark.parametrize("dim", [-1, -2, None])
def test_reductions(chip: Any, dim: int | None) -> None:
    import ttnn

    x = random(*SHAPE)
    axes = (0, 1, 2, 3) if dim is None else (dim,)
    functions = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}
    for name, function in functions.items():
        result = down(getattr(ttnn, name)(up(chip, x), dim=dim, keepdim=dim is not None))
        expected = function(x, axes, keepdim=dim is not None)
        assert result.reshape(expected.shape).allclose(expected, rtol=2**-7, atol=2**-7), name


def test_argmax_and_verified_golden_functions(chip: Any) -> None:
    import ttnn

    x = torch.randperm(64, generator=torch.Generator().manual_seed(0)).float().reshape(1, 1, 1, 64)
    x = x.repeat(1, 1, 32, 1)
    found = ttnn.argmax(ttnn.untilize(up(chip, x)), dim=-1)
    assert torch.equal(ttnn.to_torch(found).long().flatten(), x.argmax(-1).flatten())
    rows = random(1, 1, 32, 64)
    assert_rounds_to(ttnn.cumsum(up(chip, rows), dim=2), rows.cumsum(2), steps=3)
    assert_rounds_to(ttnn.softplus(up(chip, random(*SHAPE))), functional.softplus(random(*SHAPE)))
    values, places = ttnn.sort(up(chip, x), dim=-1)
    assert torch.equal(down(values), x.sort(-1).values)
    assert torch.equal(ttnn.to_torch(places).long(), x.sort(-1).indices)


def test_an_operation_without_a_value_is_an_error(chip: Any) -> None:
    import ttnn

    with pytest.raises(UnknownOperationError, match=r"ttnn\.digamma"):
        ttnn.digamma(up(chip, random(*SHAPE).abs() + 1))
