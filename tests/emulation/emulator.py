"""The emulated chip: ttnn's host side as it is, values from torch, everything recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from tests.emulation import ops  # noqa: F401  (registers the values)
from tests.emulation.errors import EmulationError
from tests.emulation.memory import DeviceMemory, Place, Prepared
from tests.emulation.records import MemoryUse, OpRecord, Records, Transfer, plain
from tests.emulation.steps import build_step, places_in, require_value, run_step
from tests.emulation.traces import Traces
from tests.emulation.transfers import COMPOSITES, TRANSFERS

_COLLECT_AFTER = 1 << 30
"""Bytes of values written after which those of freed buffers are dropped."""

_HOST_TYPES = {
    # What ttnn.Tensor takes from torch for each data type; block formats are packed from float32.
    "uint32": torch.uint32,
    "uint16": torch.uint16,
    "int32": torch.int32,
    "uint8": torch.uint8,
}

VIEWS = frozenset(
    f"ttnn.{name}"
    for name in ("reshape", "view", "squeeze", "unsqueeze", "unsqueeze_to_4D", "to_memory_config")
)

_HIDDEN_ARGUMENTS = (
    "compute_kernel_config",
    "compute_config",
    "program_config",
    "core_grid",
    "device",
)


class Emulator:
    """One a process. Made by ``tests.emulation.start`` or ``worker_setup``; installed when ttnn is imported.

    Attributes:
        memory: values by address; traces: captured ones; records: what happened.
        computes: False places and records operations without computing their values, for who only counts.
    """

    def __init__(self, ttnn: Any) -> None:
        self.ttnn = ttnn
        self.memory = DeviceMemory(ttnn)
        self.traces = Traces(self.memory)
        self.records = Records()
        self.computes = True
        self._stage = ""
        self._thread = threading.local()
        self._host_values: dict[int, torch.Tensor | Prepared] = {}
        self._device_storage = ttnn.StorageType.DEVICE
        self.original_call: Callable[..., Any] = ttnn.decorators.FastOperation.__call__

    # What tests ask

    @contextmanager
    def stage(self, label: str) -> Iterator[None]:
        """Label the records made inside; the inner label of two counts."""
        outer, self._stage = self._stage, label
        try:
            yield
        finally:
            self._stage = outer

    def memory_use(self, device: Any, buffer: Literal["DRAM", "L1"]) -> MemoryUse:
        """Bytes in use of a device's memory."""
        return self.memory.use(device, buffer, self.records.peaks.get((device.id(), buffer), 0))

    def value(self, tensor: Any) -> torch.Tensor:
        """The value of a device tensor, as stored; no transfer is recorded."""
        return self.memory.read(self.memory.place_of(tensor, "Emulator.value"), "Emulator.value")

    # Tensors

    def on_device(self, tensor: Any) -> bool:
        return bool(tensor.storage_type() == self._device_storage)

    def is_ours(self, tensor: Any) -> bool:
        """True for a tensor whose value ttnn itself does not have."""
        return self.on_device(tensor) or tensor.tensor_id in self._host_values

    @property
    def inside(self) -> bool:
        """True in ttnn's own code below an operation that is being emulated, on this thread."""
        return getattr(self._thread, "inside", False)

    @contextmanager
    def within_ttnn(self) -> Iterator[None]:
        """Let ttnn's own functions run as they are."""
        outer, self._thread.inside = self.inside, True
        try:
            yield
        finally:
            self._thread.inside = outer

    def host_value(self, tensor: Any) -> torch.Tensor | Prepared:
        """The value of a host tensor, not shared with it."""
        kept = self._host_values.get(tensor.tensor_id)
        if kept is not None:
            return kept
        with self.within_ttnn():
            value: torch.Tensor = tensor.to_torch().clone()
            return value

    def keep_host_value(self, tensor: Any, value: torch.Tensor | Prepared) -> None:
        """Give a host tensor a value that ttnn does not know."""
        self._host_values[tensor.tensor_id] = value

    def upload(self, tensor: Any, value: torch.Tensor | Prepared, name: str) -> None:
        """Write a host value to a device tensor and record the transfer."""
        place = self.memory.place_of(tensor, name)
        self.memory.write(place, value, name)
        self._note_transfer("up", place, name)
        self._note_peak(place)
        if self.traces.capture is None:
            self.memory.collect_when_full(_COLLECT_AFTER)

    def download(self, tensor: Any, name: str) -> torch.Tensor:
        """Read a device tensor back and record the transfer; in the type that torch has for it."""
        self.traces.refuse_host(name)
        place = self.memory.place_of(tensor, name)
        value = self.memory.read(place, name)
        self._note_transfer("down", place, name)
        return value

    def as_host_tensor(self, tensor: Any, name: str) -> Any:
        """A host tensor of ttnn with the value of a device tensor."""
        if self.on_device(tensor):
            value: Any = self.download(tensor, name)
        else:
            value = self._host_values[tensor.tensor_id]
        if isinstance(value, Prepared):
            raise EmulationError(f"{name}: prepared convolution weights stay as ttnn laid them out")
        dtype = tensor.dtype.name.lower()
        value = value.to(_HOST_TYPES[dtype]) if dtype in _HOST_TYPES else value.float()
        with self.within_ttnn():
            return self.original_call(
                self.ttnn.from_torch, value.contiguous(), dtype=tensor.dtype, layout=tensor.layout
            )

    # Operations

    def call(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the mock, and compute or record its value."""
        name: str = operation.python_fully_qualified_name
        if self.inside or name in COMPOSITES:
            return self.original_call(operation, *args, **kwargs)

        def original(*given: Any, **named: Any) -> Any:
            with self.within_ttnn():
                return self.original_call(operation, *given, **named)

        transfer = TRANSFERS.get(name)
        if transfer is not None:
            return transfer(self, name, original, args, kwargs)
        tensors = list(self._tensors((args, kwargs)))
        hosted = [tensor for tensor in tensors if not self.on_device(tensor)]
        if len(hosted) == len(tensors):
            return self._call_on_host(name, original, args, kwargs, tensors)
        if hosted:
            self.traces.refuse_host(f"{name} (it uploads a host tensor)")
        source = require_value(name, operation.golden_function)
        placed = self._placed(args, name), self._placed(kwargs, name)
        result = original(*args, **kwargs)
        outputs = tuple(
            self.memory.place_of(tensor, name)
            for tensor in self._tensors(result)
            if self.on_device(tensor)
        )
        step = build_step(name, source, *placed, outputs)
        captured = self.traces.capture is not None
        self._note_operation(step, kwargs, captured)
        device = next(self.memory.device(place.key[0]) for place in places_in(placed))
        if captured:
            self.traces.add(step, device)
        elif self.computes:
            run_step(step, self.memory)
            self.memory.collect_when_full(_COLLECT_AFTER)
        return result

    def _call_on_host(
        self,
        name: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Any],
    ) -> Any:
        """Host tensors have real values: ttnn computes; the result may go up to the device."""
        result = original(*args, **kwargs)
        for tensor in self._tensors(result):
            if self.on_device(tensor):
                self.traces.refuse_host(f"{name} (it uploads a host tensor)")
                if len(tensors) != 1:
                    raise EmulationError(
                        f"{name}: the emulation cannot follow host tensors onto the device"
                    )
                self.upload(tensor, self.host_value(tensors[0]), name)
        return result

    def _tensors(self, item: Any) -> Iterator[Any]:
        if isinstance(item, self.ttnn.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            for part in item:
                yield from self._tensors(part)
        elif isinstance(item, dict):
            for part in item.values():
                yield from self._tensors(part)

    def _placed(self, item: Any, name: str) -> Any:
        """Arguments with places for device tensors and values for host tensors."""
        if isinstance(item, self.ttnn.Tensor):
            if self.on_device(item):
                return self.memory.place_of(item, name)
            value = self.host_value(item)
            return value.value if isinstance(value, Prepared) else value
        if isinstance(item, dict):
            return {key: self._placed(part, name) for key, part in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(self._placed(part, name) for part in item)
        return item

    # Records

    def _note_operation(self, step: Any, kwargs: dict[str, Any], captured: bool) -> None:
        grid, config = kwargs.get("core_grid"), kwargs.get("program_config")
        config = kwargs.get("config") if config is None else config
        attributes = {
            key: plain(item)
            for key, item in kwargs.items()
            if key not in _HIDDEN_ARGUMENTS and item is not config and not any(self._tensors(item))
        }
        for index, item in enumerate(step.args):
            if not any(places_in(item)) and not isinstance(item, torch.Tensor):
                attributes[f"argument_{index}"] = plain(item)
        self.records.operations.append(
            OpRecord(
                step.name,
                tuple(place.record for place in step.inputs),
                tuple(place.record for place in step.outputs),
                None if step.arithmetic is None else step.arithmetic.fidelity,
                None if step.arithmetic is None else step.arithmetic.fp32_accumulate,
                plain(config),
                None if grid is None else plain(grid),
                attributes,
                self._stage,
                captured,
                _is_view(step),
            )
        )
        for place in step.outputs[:1]:
            self._note_peak(place)

    def _note_transfer(self, direction: Literal["up", "down"], place: Place, name: str) -> None:
        record = place.record
        self.records.transfers.append(
            Transfer(direction, record.nbytes, name, record.shape, record.dtype, self._stage)
        )

    def _note_peak(self, place: Place) -> None:
        number, buffer, _address = place.key
        peaks = self.records.peaks
        known = peaks.get((number, buffer), 0)
        peaks[number, buffer] = self.memory.use(self.memory.device(number), buffer, known).peak

    # Traces, under ttnn's names

    def begin_trace_capture(self, device: Any, cq_id: int = 0, **_: Any) -> int:
        return self.traces.begin(device)

    def end_trace_capture(self, device: Any, trace_id: int, cq_id: int = 0, **_: Any) -> None:
        self.traces.end(device, trace_id)

    def execute_trace(
        self, device: Any, trace_id: int, cq_id: int = 0, blocking: bool = True, **_: Any
    ) -> None:
        self.traces.execute(device, trace_id)
        self.records.replays[trace_id] = self.records.replays.get(trace_id, 0) + 1

    def release_trace(self, device: Any, trace_id: int, **_: Any) -> None:
        self.traces.release(trace_id)

    def forget_device(self, number: int) -> None:
        """A device was closed."""
        self.traces.close(number)
        self.memory.close(number)


def _is_view(step: Any) -> bool:
    """Whether a step gives its input's buffer another shape; what works in place computes, and is none."""
    if step.name not in VIEWS or not step.inputs or not step.outputs:
        return False
    source, target = step.inputs[0], step.outputs[0]
    return bool(source.key == target.key and source.uid == target.uid)
