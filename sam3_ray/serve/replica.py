"""A replica: one actor, one device, one model. The ingress sends it jobs, it replies with ready JSON."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from ray import serve

from sam3_ray import chips
from sam3_ray.answers import Grounded
from sam3_ray.api import Sam3
from sam3_ray.errors import ChipUnavailableError
from sam3_ray.images import ImageSource
from sam3_ray.prompt import Request
from sam3_ray.serve.batching import DeviceQueue
from sam3_ray.serve.canary import Canary
from sam3_ray.serve.config import (
    ReplicaSettings,
    ServeConfig,
    ServeConfigError,
    live_settings,
)
from sam3_ray.serve.encoding import Origin, check_mask_pixels, encode_answer, next_step
from sam3_ray.serve.errors import Problem, ProblemType, problem_of
from sam3_ray.serve.health import DeviceWatch
from sam3_ray.serve.hosts import node_name, pinned_chip, session_folder
from sam3_ray.serve.metrics import ReplicaMetrics
from sam3_ray.serve.parking import PARK_TIMEOUT_S, Parking
from sam3_ray.serve.plan import Plan
from sam3_ray.serve.recovery import Incidents, recover
from sam3_ray.serve.schemas import Failure, PredictJob, Reply
from sam3_ray.serve.watchdog import Watchdog
from sam3_ray.settings import settings
from sam3_ray.text import load_tokenizer

logger = logging.getLogger("sam3_ray")

HOST_THREADS = 4
"""Threads that decode images and encode masks; they wait on C libraries that release the GIL."""


END_AFTER_S = 0.5
"""The reply that says so has to leave the process first."""


class Sam3Replica:
    """The deployment behind the ingress.

    Args:
        config: limits, batching, health.
        plan: backend and checkpoint.
    """

    _watchdog: Watchdog | None = None
    _task: asyncio.Task[None] | None = None
    _ending: asyncio.Task[None] | None = None

    def __init__(self, config: ServeConfig, plan: Plan) -> None:
        context = serve.get_replica_context()
        self._config = config
        self._name = context.replica_tag
        self._chip = (
            pinned_chip(os.environ.get(chips.VISIBLE_DEVICES)) if plan.chips_per_replica else None
        )
        # Stable over a restart: Serve gives a new replica the rank of the one it replaces.
        slot = f"chip{self._chip}" if self._chip is not None else f"cpu{context.rank.local_rank}"
        node = node_name()
        self._place = f"{node}/{slot}"
        if config.max_image_pixels is not None:
            # The image module asks the environment; this process is this replica's alone.
            os.environ["SAM3_MAX_IMAGE_PIXELS"] = str(config.max_image_pixels)
        self._metrics = ReplicaMetrics(self._chip)
        self._max_mask_pixels = config.max_mask_pixels or settings().max_mask_pixels
        self._watch = DeviceWatch(config.device_call_limit_s, limit_s=config.chip_timeout_s)
        # Of this application: two of them may have a CPU replica each of the same name on a host.
        file_slot = quote(f"{context.app_name}-{node}-{slot}", safe="")
        self._incidents = Incidents(session_folder(), file_slot)
        self._parking = Parking(session_folder(), file_slot)
        self._park_retry_s = config.park_retry_s
        self._ongoing = 0
        self._trying = False
        self._host = ThreadPoolExecutor(HOST_THREADS, thread_name_prefix="sam3-host")
        self._model: Sam3 | None = None
        load_tokenizer()
        if self._parking.by_hand:
            return
        self._look_after_chip(config.reset_command)
        if self._parking.reason is not None:
            return
        try:
            self._model = Sam3.from_pretrained(
                plan.repo_id,
                revision=plan.revision,
                checkpoint_path=plan.checkpoint_path,
                backend=plan.backend,
                num_threads=plan.num_threads,
                image_cache_bytes=config.image_cache_bytes,
            )
        except ChipUnavailableError as error:
            self._fault(str(error))
            return
        self._origin = Origin(
            input_size=self._model.engine.backend.config.image_size,
            checkpoint=plan.checkpoint.label,
            replica=self._name,
            chip=self._chip,
        )
        self._queue = DeviceQueue(
            self._model.engine,
            self._watch,
            max_batch_size=config.max_batch_size,
            batch_wait_s=config.batch_wait_s,
        )
        # Whichever of these hangs or is wrong: Serve sends no request before the constructor is done.
        self._watchdog = Watchdog(self._watch, self._incidents)
        self._canary = Canary(self._model.engine, is_demo=plan.checkpoint.is_demo)
        self._canary_every_s = config.canary_every_s
        fault = self._queue.on_device(self._canary.ask).result()
        if fault is not None and self._chip is None:
            raise RuntimeError(fault)
        if fault is not None:
            self._fault(fault)

    def _fault(self, reason: str) -> None:
        self._parking.fault(reason)
        logger.error("chip %s is parked: %s", self._chip, reason)

    def _look_after_chip(self, reset_command: str | None) -> None:
        """Where the last replica here ended over a hang: reset the chip, try it, park it if need be."""
        if not self._incidents.pending:
            return
        if self._chip is None:
            self._incidents.settle("the process was started again")
            return
        chip = next((c for c in chips.look().chips if c.index == self._chip), None)
        usable, outcome = recover(chip, reset_command)
        self._incidents.settle(outcome)
        if not usable:
            self._fault(f"a call hung; {outcome}")

    async def _ask_canary(self) -> None:
        """Ask whenever the device is idle; ``check_health`` reads the verdict."""
        while True:
            await asyncio.sleep(self._canary_every_s)
            if self._queue.idle and self._parking.reason is None:
                future = self._queue.on_device(self._canary.ask)
                self._watch.canary(await asyncio.wrap_future(future))

    async def _try_chip_again(self) -> None:
        """Open a chip that is parked for a fault now and then; where it opens, the next replica has it."""
        while True:
            await asyncio.sleep(self._park_retry_s)
            if self._parking.by_hand:
                continue
            self._trying = True
            try:
                usable, outcome = await asyncio.get_running_loop().run_in_executor(
                    self._host, recover, None, None
                )
            finally:
                self._trying = False
            # Parked or unparked meanwhile: that has its own end, after its reply.
            if usable and not self._parking.by_hand and self._ending is None:
                logger.warning("chip %s: %s; the replica ends for a new one", self._chip, outcome)
                os._exit(0)

    async def park(self, place: str, timeout_s: float = PARK_TIMEOUT_S) -> dict[str, Any] | None:
        """Take no more requests, finish those that there are, and close the device.

        Args:
            place: whom this is for; None is answered where it is another one's.
            timeout_s: how long the requests may take.

        Returns:
            ``place``, ``closed`` (whether the device is free), ``unfinished`` (requests that go on).
        """
        if place != self._place:
            return None
        self._parking.park()
        logger.warning("%s is parked by hand", self._place)
        await self._finish(timeout_s)
        closed = self._ongoing == 0 and not self._trying
        if closed and self._model is not None:
            self._stop_watching()
            model, self._model = self._model, None
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._host, self._queue.close)
            await loop.run_in_executor(self._host, model.close)
        return {"place": self._place, "closed": closed, "unfinished": self._ongoing}

    async def _finish(self, timeout_s: float) -> None:
        """Wait until nothing uses the device, but not for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._ongoing or self._trying:
                    await asyncio.sleep(0.05)

    async def unpark(self, place: str) -> dict[str, Any] | None:
        """End this replica, parked by hand or for a fault; Serve starts another one, with the same chip.
        Requests that it still works on are finished first.

        Returns:
            ``place`` and ``was``, the reason (None: it was not parked, and stays); None for other places.
        """
        if place != self._place:
            return None
        was = self._parking.reason
        self._parking.unpark()
        if was is not None:
            logger.warning("%s is unparked: the replica ends for a new one", self._place)
            # A process that has had the device, or has failed to open it, is not the one to try again.
            self._parking.fault("unparked; a new replica comes")
            self._ending = asyncio.create_task(self._end())
        return {"place": self._place, "was": was}

    async def _end(self) -> None:
        await self._finish(PARK_TIMEOUT_S)
        await asyncio.sleep(END_AFTER_S)
        os._exit(0)

    async def predict(self, job: PredictJob) -> Reply | Failure:
        """Answer one job; whatever goes wrong is a ``Failure``."""
        arrived = time.time()
        if self._model is None or self._parking.reason is not None:
            return Failure(
                Problem(
                    ProblemType.NO_REPLICA,
                    f"{self._place} is parked: {self._parking.reason}",
                    retry_after_s=60,
                    retry_elsewhere=True,
                ),
                self._name,
                parked=True,
            )
        self._ongoing += 1
        try:
            outcome = await self._answer(job, arrived)
        except asyncio.CancelledError:
            self._metrics.request("cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - a Failure carries it on
            outcome = self._failure(error)
        finally:
            self._ongoing -= 1
        if isinstance(outcome, Failure):
            self._metrics.request("failed" if outcome.problem.status >= 500 else "client_error")
        else:
            self._metrics.request("ok")
            self._watch.succeeded()
        return outcome

    async def _answer(self, job: PredictJob, arrived: float) -> Reply | Failure:
        assert self._model is not None
        engine = self._model.engine
        loop = asyncio.get_running_loop()
        source = (
            ImageSource.from_digest(job.digest) if job.image is None else ImageSource.of(job.image)
        )
        source.namespace = job.namespace
        waited_ms = max(0.0, (arrived - job.sent_at) * 1000.0)
        # Decoded before it joins the batch: the device works on others meanwhile.
        if not engine.is_ready(source):
            await loop.run_in_executor(self._host, engine.preload, source)
        queued = time.perf_counter()
        threshold = self._config.threshold if job.threshold is None else job.threshold
        grounded = await self._queue.ground(
            Request(source, job.prompts, threshold=threshold, max_instances=job.max_instances)
        )
        if grounded.error is not None:
            failure = self._failure(grounded.error)
            # Only what the device's work ends in says anything of the device: not decoding, not encoding.
            if failure.problem.status >= 500:
                self._watch.failed(job.digest)
            return failure
        check_mask_pixels(grounded, self._max_mask_pixels)
        waited_ms += _waited_ms(grounded, (time.perf_counter() - queued) * 1000.0)
        timing = {"queue": waited_ms, **grounded.timing_ms}
        steps = encode_answer(grounded, job, self._origin, timing)
        reply = None
        # A step at a time: requests with few masks pass between, and a cancelled one makes no more.
        while reply is None:
            reply = await loop.run_in_executor(self._host, next_step, steps)
        self._metrics.answer(
            cached=grounded.cached,
            instances=sum(map(len, grounded.instances)),
            timing_ms=timing,
        )
        return reply

    def _failure(self, error: Exception) -> Failure:
        problem = problem_of(error)
        if problem.status >= 500:
            logger.error("a request failed", exc_info=error)
        return Failure(problem, self._name)

    async def info(self) -> dict[str, Any]:
        """What ``/info`` says of this replica."""
        info: dict[str, Any] = {
            "replica": self._name,
            "place": self._place,
            "host": socket.gethostname(),
            "chip": self._chip,
            "parked": self._parking.reason,
            "incidents": self._incidents.read(),
            "device_call_s": round(self._watch.running_s, 3),
        }
        if self._model is not None:
            info |= {
                "backend": self._model.engine.backend.name,
                "checkpoint": self._origin.checkpoint,
                "input_size": self._origin.input_size,
                **self._model.engine.stats(),
            }
        return info

    async def clear_caches(self) -> None:
        """Forget every image and phrase."""
        if self._model is not None:
            engine = self._model.engine
            await asyncio.get_running_loop().run_in_executor(self._host, engine.clear_caches)

    def check_health(self) -> None:
        """Serve restarts the replica when this raises three times in a row."""
        self._watch.check()

    def record_replica_metadata(self) -> dict[str, Any]:
        """For the router, once: where this replica is."""
        return {"place": self._place, "chip": self._chip, "parked": self._is_parked}

    def record_routing_stats(self) -> dict[str, Any]:
        """For the router, every ten seconds."""
        self._metrics.parked(self._is_parked)
        self._metrics.device(*self._watch.totals)
        if self._model is None:
            return {"parked": self._is_parked}
        stats = self._model.engine.stats()
        cache, texts = stats["image_cache"], stats["text_cache"]
        self._metrics.phrases(texts["hits"], texts["misses"])
        # Ray drops a gauge that is not set again within two of its reports.
        self._metrics.cache(cache)
        return {
            "parked": self._is_parked,
            "device_call_s": self._watch.running_s,
            "image_cache": cache,
        }

    @property
    def _is_parked(self) -> bool:
        return self._parking.reason is not None

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Take other settings without a restart (``ReplicaSettings``); wrong ones are logged, not taken."""
        # Here first: a constructor has no running loop.
        if self._is_parked:
            if self._task is None and self._chip is not None:
                self._task = asyncio.create_task(self._try_chip_again())
            return
        try:
            asked = live_settings(ReplicaSettings, self._config, user_config)
        except ServeConfigError as error:
            logger.error("Sam3Replica keeps its settings: %s", error)
        else:
            self._queue.reconfigure(asked.max_batch_size, asked.batch_wait_s)
            if self._model is not None:
                resize = self._model.engine.resize_image_cache
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._host, resize, asked.image_cache_bytes)
        if self._task is None:
            self._task = asyncio.create_task(self._ask_canary())

    def _stop_watching(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._watchdog is not None:
            self._watchdog.close()

    def __del__(self) -> None:
        model = getattr(self, "_model", None)
        if model is not None:
            self._stop_watching()
            self._queue.close()
            self._host.shutdown(wait=False, cancel_futures=True)
            model.close()


def _waited_ms(grounded: Grounded, elapsed_ms: float) -> float:
    """What of the time in the queue and on the device was not work (decoding was before)."""
    work = sum(ms for stage, ms in grounded.timing_ms.items() if stage != "decode")
    return max(0.0, elapsed_ms - work)
