"""What the emulated chip remembers of a run: every operation, every transfer, the memory in use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A device tensor as an operation saw it.

    Attributes:
        shape: logical shape; padded_shape: in whole tiles where the layout is TILE.
        dtype: ttnn's name in lower case, such as ``bfloat8_b``; layout: ``TILE`` or ``ROW_MAJOR``.
        buffer: where it lies.
        nbytes: bytes of all its pages, padding and alignment included.
        banks: how many hold its pages: cores for L1, of the shards' grid where it is sharded.
    """

    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]
    dtype: str
    layout: str
    buffer: Literal["DRAM", "L1"]
    sharded: bool
    nbytes: int
    banks: int

    @property
    def elements(self) -> int:
        """Logical elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One operation as it was called, eager or while a trace was captured (replays are not repeated here).

    Attributes:
        name: such as ``ttnn.linear``.
        inputs, outputs: device tensors, in the order of the arguments.
        fidelity: ``LoFi`` to ``HiFi4``, the default that ttnn uses where none was given; None where the
            operation has no multiplications of the matrix engine that the emulation knows of.
        fp32_accumulate: sums in float32 (``fp32_dest_acc_en``); None as for ``fidelity``.
        program_config: the config's class under ``kind`` and its fields, or None.
        core_grid: (columns, rows) where the call names them.
        attributes: every other argument that is no tensor, in plain Python types.
        stage: the label of ``Emulator.stage``, "" outside one.
        in_trace: captured, not run.
        is_view: the output is the input's buffer under another shape: nothing runs.
    """

    name: str
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    fidelity: str | None
    fp32_accumulate: bool | None
    program_config: dict[str, Any] | None
    core_grid: tuple[int, int] | None
    attributes: dict[str, Any]
    stage: str
    in_trace: bool
    is_view: bool


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes between host and device. ``nbytes`` counts the device tensor's pages."""

    direction: Literal["up", "down"]
    nbytes: int
    op: str
    shape: tuple[int, ...]
    dtype: str
    stage: str


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device's memory, of all banks, as ttnn's own allocator counts them.

    Attributes:
        now: in use when asked.
        peak: the most seen after any recorded operation or transfer since the last ``Records.clear``; an
            operation's own scratch (circular buffers) is not in it.
        total: what there is.
    """

    now: int
    peak: int
    total: int


@dataclass
class Records:
    """The lists that tests and ``perf/roofline.py`` count."""

    operations: list[OpRecord] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    peaks: dict[tuple[int, str], int] = field(default_factory=dict)
    replays: dict[int, int] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self.operations.clear()
        self.transfers.clear()
        self.peaks.clear()
        self.replays.clear()

    def bytes_up(self) -> int:
        """Bytes uploaded."""
        return sum(transfer.nbytes for transfer in self.transfers if transfer.direction == "up")

    def bytes_down(self) -> int:
        """Bytes read back."""
        return sum(transfer.nbytes for transfer in self.transfers if transfer.direction == "down")


_PLAIN = (bool, int, float, str, type(None))


def plain(value: Any) -> Any:
    """A ttnn argument in plain Python types: objects as a dict of their fields, with ``kind``."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(plain(item) for item in value)
    kind = type(value).__name__
    if hasattr(value, "name") and hasattr(value, "value"):  # an enum
        return value.name
    if kind in ("CoreCoord", "CoreGrid"):
        return (value.x, value.y)
    if kind == "Shape":
        return tuple(value)
    fields = {
        name: getattr(value, name)
        for name in dir(value)
        if not name.startswith("_") and not callable(getattr(value, name))
    }
    if not fields:
        return str(value)
    return {"kind": kind, **{name: plain(item) for name, item in fields.items()}}


def launched_programs(run: Callable[[], None]) -> int:
    """How many programs ttnn launches in ``run``, by its own graph capture; a call may be several."""
    import ttnn

    ttnn.graph.begin_graph_capture(ttnn.graph.RunMode.NORMAL)
    try:
        run()
    finally:
        graph = ttnn.graph.end_graph_capture()
    started = (node["params"]["name"] for node in graph if node["node_type"] == "function_start")
    return sum(name.endswith("Operation") for name in started)
