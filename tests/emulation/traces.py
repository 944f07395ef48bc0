"""Traces: capture records steps and computes nothing, a replay computes them into the same buffers.

On a chip a trace is a list of commands with fixed addresses. What would go wrong there without a word is an
error here, with the operation's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.emulation.errors import TraceError
from tests.emulation.memory import Cell, DeviceMemory, Key, Place, merged
from tests.emulation.steps import Step, run_step


@dataclass
class Capture:
    """A capture in progress.

    Attributes:
        strays: buffers that appeared in the capture and are no step's output, with who made them.
        broken: why it cannot be used, once it cannot.
    """

    number: int
    device: int
    programs: int
    known: set[Key]
    steps: list[Step] = field(default_factory=list)
    strays: dict[Key, str] = field(default_factory=dict)
    broken: str = ""


@dataclass
class Trace:
    """A finished capture.

    Attributes:
        read_from: buffers of others that it reads or writes (weights, inputs, given outputs), with the step
            that needs them first.
        results: outputs that were still allocated when the capture ended, with the step that writes them.
        spans: for DRAM and L1, what its own outputs overwrite in each bank.
        own: allocations made by its steps; dead_after: intermediates that no later step needs, by step.
    """

    number: int
    device: int
    steps: list[Step]
    read_from: dict[Key, tuple[Place, str]]
    results: dict[Key, tuple[Place, str]]
    spans: dict[str, list[tuple[int, int, str]]]
    own: set[int]
    dead_after: list[list[Place]]


class Traces:
    """The traces of every open device of one process."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._traces: dict[int, Trace] = {}
        self._released: set[int] = set()
        self._broken: dict[int, str] = {}
        self._next = 0
        self.capture: Capture | None = None

    # Capture

    def begin(self, device: Any) -> int:
        """Start a capture; its number.

        Raises:
            TraceError: another one is open.
        """
        if self.capture is not None:
            raise TraceError(
                f"begin_trace_capture: the capture of trace {self.capture.number} is still open"
            )
        number, self._next = self._next, self._next + 1
        watched = self._memory.watch(device)
        self.capture = Capture(
            number, watched, device.num_program_cache_entries(), self._memory.live(watched)
        )
        return number

    def refuse_host(self, what: str) -> None:
        """Raise where a capture is open: host transfers are not part of a trace.

        Raises:
            TraceError: naming ``what``.
        """
        if self.capture is not None:
            self.capture.broken = self.capture.broken or what
            raise TraceError(
                f"{what} inside a trace capture: only operations between device buffers can be captured"
            )

    def refuse_allocation(self, what: str) -> None:
        """Raise where a capture is open: a buffer that no captured step writes does not belong in it.

        Raises:
            TraceError: naming ``what``.
        """
        if self.capture is not None:
            self.capture.broken = self.capture.broken or what
            raise TraceError(
                f"{what} inside a trace capture allocates a buffer that no captured operation writes: "
                "allocate it before"
            )

    def add(self, step: Step, device: Any) -> None:
        """Record a step, and what it did beside.

        Raises:
            TraceError: it compiled a program.
        """
        capture = self.capture
        if capture is None:
            raise TraceError(f"{step.name}: no capture is open")
        for place in step.outputs:
            # The operation has not run: a new buffer holds nothing, a given one what it held.
            self._memory.claim(
                place, f"has no data before trace {capture.number} is executed ({step.name})"
            )
        programs = device.num_program_cache_entries()
        if programs > capture.programs:
            capture.broken = f"{step.name} compiled a program"
            raise TraceError(
                f"{step.name}: {programs - capture.programs} programs were compiled inside a trace capture: "
                "run every operation once with the same shapes before"
            )
        capture.steps.append(step)
        live = self._memory.live(capture.device)
        outputs = {place.key for place in step.outputs}
        for key in live - capture.known - outputs:
            capture.strays[key] = step.name
        capture.strays = {key: name for key, name in capture.strays.items() if key in live}
        capture.known = live

    def end(self, device: Any, number: int) -> None:
        """Finish the capture.

        Raises:
            TraceError: no such capture; or a buffer outlives it that is no step's output.
        """
        capture, self.capture = self.capture, None
        if capture is None or capture.number != number:
            raise TraceError(f"end_trace_capture: no capture of trace {number} is open")
        if capture.broken:
            self._broken[number] = capture.broken
            return
        live = self._memory.live(capture.device)
        for key, name in capture.strays.items():
            if key in live:
                self._broken[number] = f"{name} left a buffer behind"
                raise TraceError(
                    f"{name}: allocated a buffer at {key[1]} {key[2]:#x} that outlives the capture of trace "
                    f"{number} and is no output of it"
                )
        self._traces[number] = _finished(capture, live)

    # Replay

    def execute(self, device: Any, number: int) -> None:
        """Run a trace.

        Raises:
            TraceError: it does not exist, or a buffer of it was freed or replaced.
            DeviceMemoryError: an input holds no data.
        """
        if self.capture is not None:
            raise TraceError(
                f"execute_trace: trace {number} inside the capture of trace {self.capture.number}"
            )
        trace = self._traces.get(number)
        if trace is None:
            raise TraceError(f"execute_trace: trace {number} {self._absence(number)}")
        if trace.device != device.id():
            raise TraceError(
                f"execute_trace: trace {number} belongs to device {trace.device}, not {device.id()}"
            )
        self._check_buffers(trace)
        lost: dict[Key, Cell] = {}
        for buffer, spans in trace.spans.items():
            lost |= self._memory.overwrite(spans, trace.device, buffer, trace.own)
        for step, dead in zip(trace.steps, trace.dead_after, strict=True):
            run_step(step, self._memory)
            for place in dead:
                if self._memory.holds(place):
                    self._memory.forget(place.key)
        self._memory.restore_lost(lost)

    def _check_buffers(self, trace: Trace) -> None:
        live = self._memory.live(trace.device)
        for role, places in (("input", trace.read_from), ("output", trace.results)):
            for key, (place, name) in places.items():
                what = (
                    f"{name}: its {role} {place.dtype} {place.shape} at {key[1]} {key[2]:#x}, a buffer of "
                    f"trace {trace.number},"
                )
                if key not in live:
                    raise TraceError(f"{what} was freed before the replay")
                if not self._memory.holds(place):
                    raise TraceError(
                        f"{what} was replaced by another tensor: write into it instead"
                    )

    def release(self, number: int) -> None:
        """Forget a trace.

        Raises:
            TraceError: it does not exist.
        """
        if self._traces.pop(number, None) is None and self._broken.pop(number, None) is None:
            raise TraceError(f"release_trace: trace {number} {self._absence(number)}")
        self._released.add(number)

    def _absence(self, number: int) -> str:
        if number in self._released:
            return "was released"
        if number in self._broken:
            return f"was not captured: {self._broken[number]}"
        return "does not exist"

    def close(self, device: int) -> None:
        """A device was closed: its traces are gone."""
        for number in [number for number, trace in self._traces.items() if trace.device == device]:
            self.release(number)
        if self.capture is not None and self.capture.device == device:
            self.capture = None

    def steps_of(self, number: int) -> int:
        """How many operations a trace has."""
        return len(self._traces[number].steps)


def _finished(capture: Capture, live: set[Key]) -> Trace:
    """Work out once what every replay needs."""
    made: dict[tuple[Key, int], str] = {}
    read_from: dict[Key, tuple[Place, str]] = {}
    last_use: dict[tuple[Key, int], int] = {}
    places: dict[tuple[Key, int], Place] = {}
    claimed: set[tuple[Key, int]] = set()
    for index, step in enumerate(capture.steps):
        for place in step.inputs:
            identity = (place.key, place.uid)
            if identity not in made:
                read_from.setdefault(place.key, (place, step.name))
                claimed.add(identity)
            last_use[identity], places[identity] = index, place
        for place in step.outputs:
            identity = (place.key, place.uid)
            if identity not in claimed:
                made.setdefault(identity, step.name)
            last_use[identity], places[identity] = index, place
    latest: dict[Key, tuple[Key, int]] = {}
    for identity in made:
        latest[identity[0]] = identity
    kept = {identity for key, identity in latest.items() if key in live}
    dead_after: list[list[Place]] = [[] for _ in capture.steps]
    for identity in made:
        if identity not in kept:
            dead_after[last_use[identity]].append(places[identity])
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for identity, name in made.items():
        place = places[identity]
        writer = f"trace {capture.number}'s {name}"
        spans.setdefault(place.key[1], []).append(
            (place.key[2], place.key[2] + place.per_bank, writer)
        )
    return Trace(
        capture.number,
        capture.device,
        capture.steps,
        read_from,
        {identity[0]: (places[identity], made[identity]) for identity in kept},
        {buffer: merged(entries) for buffer, entries in spans.items()},
        {uid for _key, uid in made},
        dead_after,
    )
