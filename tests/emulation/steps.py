"""One recorded operation: its arguments with places instead of tensors, and how its value is computed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.emulation.errors import UnknownOperationError
from tests.emulation.memory import DeviceMemory, Place, Prepared
from tests.emulation.ops.golden import DROPPED, VERIFIED
from tests.emulation.ops.registry import Arithmetic, Call, Entry, arithmetic_of, entry_of


@dataclass(frozen=True, slots=True)
class Step:
    """An operation that was placed on the device.

    Attributes:
        inputs: the places among the arguments, in order.
        outputs: where the results go, in order; an output may be an input.
    """

    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    arithmetic: Arithmetic | None


_WRITTEN_NAMES = ("output_tensor", "optional_output_tensor", "output")
_WRITTEN_POSITIONS = {"ttnn.copy": 1, "ttnn.assign": 1}
"""Arguments that an operation writes to and does not read."""


def only_read(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with None where the operation only writes."""
    written = _WRITTEN_POSITIONS.get(name)
    return (
        tuple(None if i == written else item for i, item in enumerate(args)),
        {key: None if key in _WRITTEN_NAMES else item for key, item in kwargs.items()},
    )


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def places_in(item: Any) -> Iterator[Place]:
    """Every place in nested arguments."""
    if isinstance(item, Place):
        yield item
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from places_in(part)
    elif isinstance(item, dict):
        for part in item.values():
            yield from places_in(part)


def require_value(name: str, golden: Any) -> Entry | Any:
    """The entry or the verified golden function of an operation.

    Raises:
        UnknownOperationError: neither; before the operation runs.
    """
    entry = entry_of(name)
    if entry is not None:
        return entry
    if name in VERIFIED and golden is not None:
        return golden
    raise UnknownOperationError(
        f"{name}: the emulation has no value for it; write one in tests/emulation/ops/ and test it against "
        "torch"
    )


def build_step(
    name: str,
    source: Entry | Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: tuple[Place, ...],
) -> Step:
    """Bind a placed operation to its value function.

    Raises:
        UnknownOperationError: the value function does not take the call's arguments.
    """
    args, kwargs = only_read(name, args, kwargs)
    inputs = tuple(places_in((args, kwargs)))
    if not isinstance(source, Entry):  # a golden function
        kept = {key: item for key, item in kwargs.items() if key not in DROPPED}
        return Step(name, source, args, kept, inputs, outputs, None)
    call = Call(
        name,
        [place.dtype for place in inputs],
        [place.dtype for place in outputs],
        kwargs,
    )
    arithmetic = arithmetic_of(source, call)
    bound = dict(kwargs)
    if arithmetic is not None:
        bound["arithmetic"] = arithmetic
    if source.wants_call:
        bound["call"] = call
    try:
        _signature(source.value).bind(*args, **bound)
    except TypeError as error:
        raise UnknownOperationError(
            f"{name}: no value for this form of the call: {error}"
        ) from error
    return Step(name, source.value, args, bound, inputs, outputs, arithmetic)


def run_step(step: Step, memory: DeviceMemory) -> None:
    """Compute a step's value and store it.

    Raises:
        DeviceMemoryError: an input holds no data.
        UnknownOperationError: the value function gives another number of values than there are outputs.
    """

    def loaded(item: Any) -> Any:
        if isinstance(item, Place):
            return memory.read(item, step.name)
        if isinstance(item, (list, tuple)) and not hasattr(item, "_fields"):
            return [loaded(part) for part in item]
        return item

    args = [loaded(item) for item in step.args]
    kwargs = {key: loaded(item) for key, item in step.kwargs.items()}
    with torch.no_grad():
        result = step.value(*args, **kwargs)
    values = list(result) if isinstance(result, (list, tuple)) else [result]
    if len(values) != len(step.outputs):
        raise UnknownOperationError(
            f"{step.name}: {len(values)} values for {len(step.outputs)} outputs"
        )
    for place, value in zip(step.outputs, values, strict=True):
        if isinstance(value, Prepared) or not memory.is_value_of(place, value):
            memory.write(place, value, step.name)
