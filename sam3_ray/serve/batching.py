"""Requests into batches for one device: ``@serve.batch`` behind a gate. Nothing waits for nothing.

``@serve.batch`` takes what is there as soon as it can, also while the device is busy: under load that makes
many batches of one, which then queue. So requests wait at a gate while the device works. When it is free, the
gate lets one batch through: what waited meanwhile, or the best of it where more waited than fit. The engine
merges requests of one image and of one phrase in a batch.

A request is answered as soon as its own image is done, not when the batch is, and finishes its masks on host
threads while the device goes on.
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
from sam3_ray.serve.health import DeviceWatch

logger = logging.getLogger("sam3_ray")

MAX_PASSED = 3
"""Batches that may leave without a request though it waited; then it goes before everything younger."""


class Waiting:
    """A request on its way through the gate and the device.

    Attributes:
        request: what is asked.
        may_pass: set when it may join the batch that forms now.
        answer: what came of it.
        passed: batches that left without it while it waited.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.may_pass: asyncio.Future[None] = loop.create_future()
        self.answer: asyncio.Future[Grounded] = loop.create_future()
        self.passed = 0

    def answered(self, grounded: Grounded) -> None:
        """Its answer is here. On the event loop."""
        if not self.answer.done():
            self.answer.set_result(grounded)


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
        self._max_batch_size = max_batch_size
        self._batch_wait_s = batch_wait_s
        self._waiting: list[Waiting] = []
        self._admitted: set[Waiting] = set()
        self._device_calls = 0
        # Any: serve.batch's type hides the setters of what it returns.
        self._batched: Any = serve.batch(
            max_batch_size=max_batch_size,
            batch_wait_timeout_s=batch_wait_s,
            max_concurrent_batches=1,
        )(self.ground_batch)

    def reconfigure(self, max_batch_size: int, batch_wait_s: float) -> None:
        """Take other batch settings from now on."""
        self._max_batch_size, self._batch_wait_s = max_batch_size, batch_wait_s
        self._batched.set_max_batch_size(max_batch_size)
        self._batched.set_batch_wait_timeout_s(batch_wait_s)

    async def ground(self, request: Request) -> Grounded:
        """One request through the device; what went wrong is in ``Grounded.error``.

        Cancelling the caller drops the request from a batch that has not started, and no other request.
        """
        waiting = Waiting(request, asyncio.get_running_loop())
        self._waiting.append(waiting)
        batch = None
        try:
            self._open_gate()
            await waiting.may_pass
            batch = asyncio.ensure_future(self._batched(waiting))
            # The first of the two: the batch goes on with other images when this one's answer is here.
            await asyncio.wait((batch, waiting.answer), return_when=asyncio.FIRST_COMPLETED)
            grounded: Grounded = (
                waiting.answer.result() if waiting.answer.done() else batch.result()
            )
            return grounded
        finally:
            if batch is not None:
                batch.cancel()
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            if (
                not waiting.answer.done()
            ):  # cancelled: perhaps the only one that the gate waited for
                self._left([waiting])

    def _open_gate(self) -> None:
        """Let the next batch through, unless one is on its way to the device, or on it."""
        if self._device_calls or (self._admitted and self._batch_wait_s == 0):
            return
        # A batch may have become smaller while one forms.
        room = max(0, self._max_batch_size - len(self._admitted))
        chosen = self.choose(room)
        for waiting in chosen:
            self._waiting.remove(waiting)
            self._admitted.add(waiting)
            waiting.may_pass.set_result(None)
        if chosen:
            for waiting in self._waiting:
                waiting.passed += 1

    def choose(self, room: int) -> list[Waiting]:
        """Which of those that wait go next, ``room`` at most.

        Those that were passed over too often, then those whose image is cached, which are soon done; each in
        the order of their arrival. With W waiting and batches of B none sees more than MAX_PASSED + W / B
        batches go by.
        """
        alive = [waiting for waiting in self._waiting if not waiting.may_pass.cancelled()]
        if len(alive) <= room:
            return alive
        return sorted(alive, key=self._rank)[:room]

    def _rank(self, waiting: Waiting) -> int:
        if waiting.passed >= MAX_PASSED:
            return 0
        source = waiting.request.source
        digest = source.digest
        return 1 if digest is not None and self._engine.holds(source.namespace + digest) else 2

    def _left(self, batch: Sequence[Waiting]) -> None:
        """These are not on their way to the device any more."""
        self._admitted.difference_update(batch)
        if not self._admitted:
            self._open_gate()

    async def ground_batch(self, batch: list[Waiting]) -> list[Grounded]:
        """A batch through the device, in order. Never raises: what fails is each request's error."""
        loop = asyncio.get_running_loop()
        try:
            self._device_calls += 1
            try:
                return await loop.run_in_executor(self._device, self._ground, batch, loop)
            finally:
                self._device_calls -= 1
                self._left(batch)
        except (Exception, asyncio.CancelledError) as error:
            # A CancelledError that left this function would leave every caller waiting for ever.
            logger.exception("a batch of %d requests failed", len(batch))
            failure = RuntimeError(f"the batch failed: {type(error).__name__}: {error}")
            return [Grounded(waiting.request, error=failure) for waiting in batch]

    def _ground(self, batch: Sequence[Waiting], loop: asyncio.AbstractEventLoop) -> list[Grounded]:
        def done(index: int, grounded: Grounded) -> None:
            loop.call_soon_threadsafe(batch[index].answered, grounded)

        with self._watch.call(len(batch)):
            return self._engine.ground([waiting.request for waiting in batch], done=done)

    @property
    def idle(self) -> bool:
        """Whether the device has nothing to do."""
        return not self._device_calls

    def on_device[Value](self, step: Callable[[], Value]) -> Future[Value]:
        """Run something on the device's own thread, watched as a call of one request."""

        def watched() -> Value:
            with self._watch.call(1):
                return step()

        return self._device.submit(watched)

    def close(self) -> None:
        """Wait for the running device call and end the thread."""
        self._device.shutdown(wait=True, cancel_futures=True)
