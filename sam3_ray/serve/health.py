"""Whether a replica's device still works: the age of the running call, and calls that fail.

A health check never touches the device. It looks at how long the call that runs now has been running,
measured against what calls took before; the first call, which may compile kernels for minutes, is exempt.
A client's mistake never counts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

LIMIT_FACTOR = 10.0
"""A call may take this many times as long, a request, as the 99th percentile of those before."""

RECENT_CALLS = 512
"""Calls whose times are remembered."""

MAX_FAILED_IMAGES = 3
"""So many different images in a row: one image that the model cannot take is no reason to restart."""


class DeviceWatch:
    """Watches one device's calls.

    Args:
        floor_s: a call of one request may always take this long, in seconds.
        limit_s: a call never may take longer, whatever it is; None leaves it to what was measured.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        floor_s: float,
        *,
        limit_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._verdict: str | None = None
        self._floor_s = floor_s
        self._clock = clock
        self._lock = threading.Lock()
        self._running: tuple[float, int] | None = None
        self._recent_s: deque[float] = deque(maxlen=RECENT_CALLS)
        self._calls = 0
        self._requests = 0
        self._seconds = 0.0
        self._failed_images: set[str] = set()

    @contextmanager
    def call(self, requests: int) -> Iterator[None]:
        """Around one device call for so many requests; on the device's thread."""
        started = self._clock()
        with self._lock:
            self._running = (started, max(1, requests))
        try:
            yield
        finally:
            with self._lock:
                self._running = None
                self._calls += 1
                self._requests += max(1, requests)
                self._seconds += self._clock() - started
                if self._calls > 1:  # the first one compiles
                    self._recent_s.append((self._clock() - started) / max(1, requests))

    def succeeded(self) -> None:
        """A request got its answer."""
        with self._lock:
            self._failed_images.clear()

    def failed(self, digest: str) -> None:
        """A request for this image failed, and not by the client's fault."""
        with self._lock:
            if len(self._failed_images) < MAX_FAILED_IMAGES:
                self._failed_images.add(digest)

    @property
    def running_s(self) -> float:
        """Age of the running call in seconds; 0 when the device is idle."""
        with self._lock:
            return 0.0 if self._running is None else self._clock() - self._running[0]

    @property
    def totals(self) -> tuple[int, int, float]:
        """Calls that have ended, their requests, and the seconds they took."""
        with self._lock:
            return self._calls, self._requests, self._seconds

    def canary(self, verdict: str | None) -> None:
        """What was wrong with the device's last answer to the canary; None where it was right."""
        with self._lock:
            self._verdict = verdict

    def check(self) -> None:
        """Raise RuntimeError, with the reason, where the device should be given up."""
        with self._lock:
            if self._verdict is not None:
                raise RuntimeError(self._verdict)
            if len(self._failed_images) >= MAX_FAILED_IMAGES:
                raise RuntimeError(f"the model failed on {MAX_FAILED_IMAGES} images in a row")
        hung = self.hung()
        if hung is not None:
            raise RuntimeError(hung)

    def hung(self) -> str | None:
        """What to say of the running call where it takes longer than any should; else None."""
        with self._lock:
            if self._running is None:
                return None
            started, requests = self._running
            age = self._clock() - started
            if self._limit_s is not None:
                limit = self._limit_s
            elif self._calls == 0:
                return None
            else:
                limit = requests * max(self._floor_s, LIMIT_FACTOR * _p99(self._recent_s))
        if age <= limit:
            return None
        return (
            f"a device call for {requests} requests has been running for {age:.0f} s "
            f"(limit {limit:.0f} s)"
        )


def _p99(values: Collection[float]) -> float:
    """The 99th percentile, the slowest of fewer than a hundred; 0 of none."""
    return sorted(values)[int(0.99 * (len(values) - 1) + 0.999)] if values else 0.0
