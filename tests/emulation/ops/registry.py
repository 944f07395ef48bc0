"""Which function gives an operation's value, and with which arithmetic.

A value function takes ttnn's own parameters by ttnn's own names, device tensors replaced by their torch
values as stored (bfloat16, float32, integers), and returns the output's value, or a list of them in the order
of the outputs. It computes in float32; the memory rounds once, to the output's data type. Parameters that do
not change a value (memory configs, grids) fall into ``**_``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.emulation.errors import EmulationError
from tests.emulation.formats import FIDELITIES, Fidelity

Value = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How an operation multiplies and sums on the matrix engine."""

    fidelity: Fidelity
    fp32_accumulate: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the arithmetic of its default may depend on it.

    Attributes:
        name: the operation's.
        input_dtypes, output_dtypes: of the device tensors, in order, as ttnn names in lower case.
        keywords: the keyword arguments.
    """

    name: str
    input_dtypes: Sequence[str]
    output_dtypes: Sequence[str]
    keywords: Mapping[str, Any]


Default = Arithmetic | Callable[[Call], Arithmetic]


@dataclass(frozen=True, slots=True)
class Entry:
    """A value function with what it asks for beside ttnn's arguments."""

    value: Value
    default: Default | None
    wants_call: bool


_ENTRIES: dict[str, Entry] = {}


def value_of(*names: str, default: Default | None = None) -> Callable[[Value], Value]:
    """Register a value function for operations.

    Args:
        names: ttnn's full names, such as ``ttnn.linear``.
        default: the arithmetic where the call's kernel config names none; the function then gets an
            ``arithmetic`` argument. A function with a ``call`` parameter gets the ``Call``.

    Raises:
        ValueError: a name has a value already.
    """

    def register(function: Value) -> Value:
        wants_call = "call" in inspect.signature(function).parameters
        for name in names:
            if name in _ENTRIES:
                raise ValueError(f"{name} has two values")
            _ENTRIES[name] = Entry(function, default, wants_call)
        return function

    return register


def entry_of(name: str) -> Entry | None:
    """The entry of an operation, or None."""
    return _ENTRIES.get(name)


def known_operations() -> tuple[str, ...]:
    """Every operation with a value of its own."""
    return tuple(sorted(_ENTRIES))


def arithmetic_of(entry: Entry, call: Call) -> Arithmetic | None:
    """The arithmetic that a call runs with: its kernel config's, or ttnn's default.

    Raises:
        EmulationError: a config without a fidelity. ttnn 0.81.1 does not complete it: it writes 255 into the
            kernel, which means nothing to a chip.
    """
    if entry.default is None:
        return None
    default = entry.default if isinstance(entry.default, Arithmetic) else entry.default(call)
    config = call.keywords.get("compute_kernel_config") or call.keywords.get("compute_config")
    if config is None:
        return default
    fidelity = config.math_fidelity.name
    if fidelity not in FIDELITIES:
        raise EmulationError(
            f"{call.name}: its kernel config has no math_fidelity ({fidelity}), and ttnn hands that to the "
            "kernel as it is: name one, or use ttnn.init_device_compute_kernel_config, whose default is LoFi"
        )
    return Arithmetic(fidelity, bool(config.fp32_dest_acc_en))
