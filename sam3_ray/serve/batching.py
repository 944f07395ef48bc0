"""Requests into batches for one device: ``@serve.batch`` behind a gate.

``@serve.batch`` forms batches of what arrives within its wait, also while the device is busy: under load that
makes many batches of one, which then queue. So requests wait at a gate while the device works, and go
through together when it is free: what waited becomes one batch, and the engine merges requests of one image
and of one phrase in it. A batch ends with its device call: each request then finishes its own masks, and none
waits for another's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ray import serve

from sam3_ray.answers import Grounded
from sam3_ray.engine import Engine
from sam3_ray.prompt import Request
from sam3_ray.serve.config import CONCURRENT_BATCHES
from sam3_ray.serve.health import DeviceWatch

logger = logging.getLogger("sam3_ray")


class DeviceQueue:
    """Runs requests on an engine's device, a batch at a time, all calls on one thread.

    Args:
        engine: answers the requests.
        watch: sees the device's calls.
        max_batch_size: requests of one device call.
        batch_wait_s: how long a batch waits for more, in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        watch: DeviceWatch,
        *,
        max_batch_size: int,
        batch_wait_s: float,
    ) -> None:
        self._engine = engine
        self._watch = watch
        # One thread owns the device: a chip's runtime must not be entered twice.
        self._device = ThreadPoolExecutor(1, thread_name_prefix="sam3-device")
        self._device_calls = 0
        self._device_free = asyncio.Event()
        self._device_free.set()
        # Any: serve.batch's type hides the setters of what it returns.
        self._batched: Any = serve.batch(
            max_batch_size=max_batch_size,
            batch_wait_timeout_s=batch_wait_s,
            max_concurrent_batches=CONCURRENT_BATCHES,
        )(self.ground_batch)

    def reconfigure(self, max_batch_size: int, batch_wait_s: float) -> None:
        """Take other batch settings from now on."""
        self._batched.set_max_batch_size(max_batch_size)
        self._batched.set_batch_wait_timeout_s(batch_wait_s)

    async def ground(self, request: Request) -> Grounded:
        """One request through the device; what went wrong is in ``Grounded.error``.

        Cancelling the caller drops the request from a batch that has not started, and no other request.
        """
        await self._device_free.wait()
        grounded: Grounded = await self._batched(request)
        return grounded

    async def ground_batch(self, requests: list[Request]) -> list[Grounded]:
        """A batch through the device, in order. Never raises: what fails is each request's error."""
        loop = asyncio.get_running_loop()
        try:
            self._device_calls += 1
            self._device_free.clear()
            try:
                return await loop.run_in_executor(self._device, self._ground, requests)
            finally:
                self._device_calls -= 1
                if self._device_calls == 0:
                    self._device_free.set()
        except (Exception, asyncio.CancelledError) as error:
            # A CancelledError that left this function would leave every caller waiting for ever.
            logger.exception("a batch of %d requests failed", len(requests))
            failure = RuntimeError(f"the batch failed: {type(error).__name__}: {error}")
            return [Grounded(request, error=failure) for request in requests]

    def _ground(self, requests: Sequence[Request]) -> list[Grounded]:
        with self._watch.call(len(requests)):
            return self._engine.ground(requests)

    @property
    def idle(self) -> bool:
        """Whether the device has nothing to do."""
        return self._device_free.is_set()

    def on_device[Value](self, step: Callable[[], Value]) -> Future[Value]:
        """Run something on the device's own thread, watched as a call of one request."""

        def watched() -> Value:
            with self._watch.call(1):
                return step()

        return self._device.submit(watched)

    def close(self) -> None:
        """Wait for the running device call and end the thread."""
        self._device.shutdown(wait=True, cancel_futures=True)
