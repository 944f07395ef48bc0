"""The ingress: HTTP in, jobs to replicas, ready JSON back. It never decodes an image.

Other Serve applications call it without HTTP::

    answer = await serve.get_app_handle("sam3").predict.remote(image=file_bytes, prompts=["car"])
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray._private.state import actors
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.serve._private.common import ReplicaState
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

import sam3_ray
from sam3_ray.serve.access import Access
from sam3_ray.serve.bodies import make_job
from sam3_ray.serve.config import (
    IngressSettings,
    ServeConfig,
    ServeConfigError,
    live_settings,
)
from sam3_ray.serve.errors import Problem, ProblemError, ProblemType
from sam3_ray.serve.metrics import IngressMetrics
from sam3_ray.serve.parking import PARK_TIMEOUT_S
from sam3_ray.serve.plan import REPLICA_DEPLOYMENT, Plan
from sam3_ray.serve.quarantine import Quarantine
from sam3_ray.serve.routes import http_app
from sam3_ray.serve.schemas import Failure, MaskFormat, Options, PredictJob, PromptBody, Reply
from sam3_ray.serve.uploads import limits_of
from sam3_ray.settings import settings

logger = logging.getLogger("sam3_ray")

TRIES = 2
"""A request is idempotent: where a replica dies under it, another one gets it, once."""

INFO_TIMEOUT_S = 2.0
READY_FOR_S = 1.0
"""Seconds that an answer to ``ready`` holds: anyone may ask for it, and it asks every replica."""

DEATH_KNOWN_S = 2.0
"""Seconds that Ray is given to hear that a process has ended; until then it counts as out of reach."""

CLEAR_TIMEOUT_S = 30.0

_LOST = (ActorDiedError, ActorUnavailableError, ReplicaUnavailableError)


class Ingress:
    """The application's first deployment.

    Args:
        replicas: the handle of ``Sam3Replica``.
        config, plan: what is served.
    """

    def __init__(self, replicas: DeploymentHandle[Any], config: ServeConfig, plan: Plan) -> None:
        # Jobs and replies are plain data: no need of the slower cloudpickle (where messages go over gRPC).
        self._replicas = replicas.options(
            request_serialization="pickle", response_serialization="pickle"
        )
        self._config = config
        self._plan = plan
        self._limits = limits_of(config)
        self._settings = live_settings(IngressSettings, config, {})
        self._quarantine = Quarantine()
        self._access = (
            None if config.api_keys_file is None else Access.from_file(Path(config.api_keys_file))
        )
        self._last_infos: list[dict[str, Any]] = []
        self._ready, self._ready_until = False, 0.0
        self._asking_ready = asyncio.Lock()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Take other settings without a restart (``IngressSettings``); wrong ones are logged, not taken."""
        try:
            self._settings = live_settings(IngressSettings, self._config, user_config)
        except ServeConfigError as error:
            logger.error("Ingress keeps its settings: %s", error)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The HTTP application; Serve asks for it once, in the replica."""
        metrics = IngressMetrics()
        return http_app(
            self,
            self._limits,
            self._config.deadline_s,
            self._access,
            metrics.request,
            self._config.cors_origins,
            id_is_answered=True,  # by Serve's RequestIdMiddleware, in front of HTTP and behind HAProxy
        )

    async def predict(
        self,
        image: bytes | None = None,
        prompts: Sequence[str | dict[str, Any]] = (),
        *,
        image_digest: str | None = None,
        threshold: float | None = None,
        max_instances: int = 50,
        mask_format: MaskFormat = "rle",
    ) -> dict[str, Any]:
        """``POST /predict`` for other Serve applications, through a handle.

        Args:
            image: the file's bytes; None with ``image_digest``.
            prompts: phrases, or {"text": ..., "threshold": ...}.
            image_digest: of an image sent before.
            threshold, max_instances, mask_format: as over HTTP.

        Returns:
            The same as the JSON of ``POST /predict``.

        Raises:
            ProblemError: what HTTP would answer with a status of 400 or more.
            TimeoutError: no answer before the deadline.
        """
        options = Options(
            prompts=[p if isinstance(p, str) else PromptBody.model_validate(p) for p in prompts],
            max_instances=max_instances,
            mask_format=mask_format,
            image_digest=image_digest,
            **({} if threshold is None else {"threshold": threshold}),
        )
        async with asyncio.timeout(self._config.deadline_s):
            reply = await self.submit(make_job(image, options, self._limits))
        answer: dict[str, Any] = json.loads(reply.body)
        return answer

    async def submit(self, job: PredictJob) -> Reply:
        """Give a job to the replica of its image, and to another one where that one fails.

        Raises:
            ProblemError: no answer.
        """
        if job.threshold is None:
            job = replace(job, threshold=self._settings.threshold)
        tries = 0
        while True:
            self._quarantine.check(job.digest)
            async with self._quarantine.watch(job.digest):
                outcome = await self._send(job)
            if isinstance(outcome, Reply):
                return outcome
            # Until the router hears that a chip is parked it may ask there, which is no try. Where a replica
            # is asked twice there is no other one.
            tries += not outcome.parked
            if (
                not outcome.problem.retry_elsewhere
                or tries == TRIES
                or outcome.replica in job.avoid
            ):
                raise ProblemError(outcome.problem)
            job = replace(job, avoid=job.avoid | {outcome.replica})

    async def _send(self, job: PredictJob) -> Reply | Failure:
        response = self._replicas.options(session_id=job.digest).predict.remote(job)
        try:
            outcome: Reply | Failure = await response
            self._quarantine.answered(job.digest)
            return outcome
        except BackPressureError as error:
            raise ProblemError(
                Problem(
                    ProblemType.OVER_CAPACITY,
                    f"{error.args[1]} requests are waiting already",
                    retry_after_s=self._config.retry_after_s,
                )
            ) from error
        except DeploymentUnavailableError as error:
            raise ProblemError(self._lost(error.message)) from error
        except _LOST as error:
            logger.warning("a replica was lost under a request: %s", error)
            if isinstance(error, RayActorError) and await _has_died(error):
                self._quarantine.died(job.digest, str(error.actor_id))
            # Ray's router has dropped it by now: the next try goes to another one.
            return Failure(replace(self._lost("the replica was lost"), retry_elsewhere=True), "")
        except asyncio.CancelledError:
            # The deadline, or a client that hung up: the replica shall not work for nobody.
            response.cancel()  # type: ignore[no-untyped-call]
            raise

    def _lost(self, detail: str) -> Problem:
        return Problem(ProblemType.NO_REPLICA, detail, retry_after_s=self._config.retry_after_s)

    async def info(self) -> dict[str, Any]:
        """What ``GET /info`` answers."""
        replicas = await self._ask_replicas()
        return {
            "service": "sam3_ray",
            "version": sam3_ray.__version__,
            "model": "sam3",
            "checkpoint": self._plan.checkpoint.label,
            "backend": self._plan.backend,
            "input_size": next((r["input_size"] for r in replicas if "input_size" in r), None),
            "limits": {
                "max_prompts": self._limits.max_prompts,
                "max_upload_bytes": self._limits.max_upload_bytes,
                "max_image_pixels": self._config.max_image_pixels or settings().max_image_pixels,
                "max_mask_pixels": self._config.max_mask_pixels or settings().max_mask_pixels,
                "deadline_s": self._config.deadline_s,
            },
            "threshold": self._settings.threshold,
            "replicas_wanted": self._plan.replicas,
            "replicas": replicas,
            "refused_images": self._quarantine.refused,
            "chips": [
                {"chip": r["chip"], "replica": r["replica"], "parked": r["parked"]}
                for r in replicas
                if r["chip"] is not None
            ],
        }

    async def park(self, place: str) -> dict[str, Any]:
        """Take a chip out by hand: its replica finishes what it has, closes the chip, and gets no more.

        Args:
            place: a chip's number, or ``NODE/chipN`` (see ``/info``) where several hosts have that number.

        Returns:
            ``place``, ``closed`` (the chip is free), ``unfinished`` (requests that still go on).

        Raises:
            ValueError: no such place, or more than one.
        """
        return await self._tell("park", place, timeout_s=PARK_TIMEOUT_S + INFO_TIMEOUT_S)

    async def unpark(self, place: str) -> dict[str, Any]:
        """Use a parked chip again, in a new replica.

        Returns:
            ``place``, and ``was``: why it was parked; None: it was not.

        Raises:
            ValueError: no such place, or more than one.
        """
        return await self._tell("unpark", place, timeout_s=INFO_TIMEOUT_S)

    async def clear_caches(self) -> int:
        """Forget every image and phrase; how many replicas did."""
        answers = await self._replicas.broadcast("clear_caches").results_async(
            timeout_s=CLEAR_TIMEOUT_S, return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, Exception):
                logger.error("a replica did not clear its caches", exc_info=answer)
        return sum(not isinstance(answer, Exception) for answer in answers)

    async def _tell(self, method: str, place: str, timeout_s: float) -> dict[str, Any]:
        """Have the replica of one place do something: told to all of them, since a handle reaches no certain
        one."""
        full = place_of(place, [str(info["place"]) for info in await self._ask_replicas()])
        answers = await self._replicas.broadcast(method, full).results_async(
            timeout_s=timeout_s, return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, dict):
                return answer
        failed = next((a for a in answers if isinstance(a, Exception)), None)
        raise RuntimeError(f"the replica of {full} did not answer") from failed

    async def ready(self) -> bool:
        """Whether there is a replica that is not parked; one that is busy counts."""
        async with self._asking_ready:
            if time.monotonic() >= self._ready_until:
                self._ready = await self._ask_whether_ready()
                self._ready_until = time.monotonic() + READY_FOR_S
            return self._ready

    async def _ask_whether_ready(self) -> bool:
        replicas = await self._ask_replicas()
        if any(replica["parked"] is None and not replica["busy"] for replica in replicas):
            return True
        if replicas and all(replica["parked"] is not None for replica in replicas):
            return False
        # All of them are too busy to say, or dead.
        return await asyncio.to_thread(_running_replicas, serve.get_replica_context().app_name) > 0

    async def _ask_replicas(self) -> list[dict[str, Any]]:
        """``info`` of every replica, in a fixed order.

        A replica with ``max_ongoing_requests`` requests answers this one, too, only when it has room:
        then what it said last is given, marked as busy.
        """
        try:
            answers = await self._replicas.broadcast("info").results_async(
                timeout_s=INFO_TIMEOUT_S, return_exceptions=True
            )
        except TimeoutError:
            return [info | {"busy": True} for info in self._last_infos]
        except DeploymentUnavailableError:
            return []
        infos = [answer | {"busy": False} for answer in answers if isinstance(answer, dict)]
        self._last_infos = sorted(infos, key=lambda info: str(info["place"]))
        return self._last_infos


def place_of(name: str, places: Sequence[str]) -> str:
    """The place that a number or a whole name means.

    Raises:
        ValueError: none of them, or more than one.
    """
    found = [place for place in places if name in (place, place.rpartition("/chip")[2])]
    if len(found) == 1:
        return found[0]
    what = "means more than one of" if found else "is none of"
    raise ValueError(f"{name!r} {what} the places of this service: {', '.join(places) or 'none'}")


async def _has_died(error: RayActorError) -> bool:
    """Whether an actor that was lost is dead, and not only out of reach.

    Over gRPC (throughput mode) Serve cannot tell one from the other (``gRPCReplicaResult``): Ray is asked,
    which hears of a death a moment after the connection has ended.
    """
    if isinstance(error, ActorDiedError):
        return True
    deadline = time.monotonic() + DEATH_KNOWN_S
    # No thread is held between two looks: many requests may have been lost to one replica.
    while (await asyncio.to_thread(actors, error.actor_id)).get("State") != "DEAD":
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


def _running_replicas(application: str) -> int:
    """Replicas that pass Serve's health checks. Blocks."""
    deployments = serve.status().applications[application].deployments
    return int(deployments[REPLICA_DEPLOYMENT].replica_states.get(ReplicaState.RUNNING, 0))
