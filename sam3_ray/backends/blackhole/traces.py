"""Recorded command sequences: the device runs a whole part without the host.

Rules that a trace lives by (tt-metal's, and strictly checked by the emulated chip in ``tests/emulation``):
every program is compiled before anything is captured; nothing is read, written or uploaded while capturing;
inputs and outputs are allocated before, written in place, and never freed while the trace lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ttnn

QUEUE = 0
"""The one command queue: a second one made others' ports slower (docs/blackhole.md)."""


class Trace:
    """One sequence.

    Args:
        device: an open ttnn device.
        name: for messages.
        run: the work, from persistent input buffers to persistent output buffers. Nothing that it
            allocates may outlive it.
    """

    def __init__(self, device: Any, name: str, run: Callable[[], None]) -> None:
        self._device, self._name, self._run = device, name, run
        self._id: Any = None

    def compile(self) -> None:
        """Run it once, so that every program exists and every lazily prepared weight is in place."""
        self._run()
        ttnn.synchronize_device(self._device)

    def capture(self) -> None:
        """Record it; what it computes meanwhile is not valid. One that fails gives its memory back.

        Raises:
            RuntimeError: it is recorded already.
        """
        if self._id is not None:
            raise RuntimeError(f"the trace {self._name!r} is captured already")
        self._id = ttnn.begin_trace_capture(self._device, cq_id=QUEUE)
        try:
            try:
                self._run()
            finally:
                ttnn.end_trace_capture(self._device, self._id, cq_id=QUEUE)
        except BaseException:
            self.release()
            raise

    def execute(self) -> None:
        """Replay it without waiting.

        Raises:
            RuntimeError: it was not captured, or was released.
        """
        if self._id is None:
            raise RuntimeError(f"the trace {self._name!r} is not captured")
        ttnn.execute_trace(self._device, self._id, cq_id=QUEUE, blocking=False)

    def release(self) -> None:
        """Give its memory back; safe to call more than once."""
        trace, self._id = self._id, None
        if trace is not None:
            ttnn.release_trace(self._device, trace)
