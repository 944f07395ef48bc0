"""Whether a replica's device still works: the age of the running call, and calls that fail.

A health check never touches the device. It looks at how long the call that runs now has been running,
measured against what calls took before; the first call, which may compile kernels for minutes, is exempt.
A client's mistake never counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LIMIT_FACTOR = 10.0
"""A call may take this many times as long, a request, as the slowest so far."""

MAX_FAILED_IMAGES = 3
"""So many different images in a row: one image that the model cannot take is no reason to restart."""


class DeviceWatch:
    """Watches one device's calls.

    Args:
        floor_s: a call of one request may always take this long, in seconds.
        clock: seconds, monotonic.
    """

    def __init__(self, floor_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._floor_s = floor_s
        self._clock = clock
        self._lock = threading.Lock()
        self._running: tuple[float, int] | None = None
        self._slowest_s = 0.0
        self._calls = 0
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
                if self._calls > 1:  # the first one compiles
                    took = (self._clock() - started) / max(1, requests)
                    self._slowest_s = max(self._slowest_s, took)

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

    def check(self) -> None:
        """Raise RuntimeError, with the reason, where the device should be given up."""
        with self._lock:
            if len(self._failed_images) >= MAX_FAILED_IMAGES:
                raise RuntimeError(f"the model failed on {MAX_FAILED_IMAGES} images in a row")
            if self._running is None or self._calls == 0:
                return
            started, requests = self._running
            age = self._clock() - started
            limit = requests * max(self._floor_s, LIMIT_FACTOR * self._slowest_s)
        if age > limit:
            raise RuntimeError(
                f"a device call for {requests} requests has been running for {age:.0f} s "
                f"(limit {limit:.0f} s)"
            )
