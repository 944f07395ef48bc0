"""What ``perf/serving.py`` serves: the real application on simulated chips, and an empty one beside it.

No ``from __future__ import annotations`` here: FastAPI reads the annotations of the empty one where names
are not known.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from fastapi import FastAPI, Request, Response
from ray import serve

from sam3_ray.api import Sam3
from sam3_ray.backends.base import Grounding
from sam3_ray.checkpoint import Checkpoint
from sam3_ray.engine import Engine
from sam3_ray.serve import app as service
from sam3_ray.serve import replica as replica_module
from sam3_ray.serve.config import ServeConfig
from sam3_ray.serve.plan import Cluster, resolve
from sam3_ray.serve.replica import Sam3Replica
from tests.data.simulated import SimulatedChip

IMAGE_S, PROMPT_S = 0.060, 0.020
IMAGE_SIZE = 1008
"""Of the full model: what an image is resized to on the host, and so the size of its masks, 288."""


class CountingChip(SimulatedChip):
    """Counts image parts, and prompt runs by their number of phrases.

    A chip takes no CPU time: what it finds for a phrase is worked out once, the same in each image.
    """

    def __init__(self, image_s: float, prompt_s: float) -> None:
        super().__init__(
            image_s=image_s, prompt_s=prompt_s, image_size=IMAGE_SIZE, upstreams_resize=True
        )
        self.images = 0
        self.runs: Counter[int] = Counter()
        self._phrase_s = self._prompt_s
        self._grounded: dict[str, Grounding] = {}
        self._masks: dict[bytes, Any] = {}

    def encode_image(self, prepared: Any) -> Any:
        self.images += 1
        return super().encode_image(prepared)

    def ground(self, image: Any, text: Any) -> Any:
        start, phrases = time.monotonic(), tuple(text)
        self.runs[len(phrases)] += 1
        self._prompt_s = 0.0
        for phrase in phrases:
            if phrase not in self._grounded:
                self._grounded[phrase] = super().ground(image, [phrase])
        found = [self._grounded[phrase] for phrase in phrases]
        boxes = np.concatenate([one.boxes_cxcywh for one in found])
        logits = np.concatenate([one.logits for one in found])
        presence = np.concatenate([one.presence_logits for one in found])
        self._work(start, self._phrase_s * len(phrases))
        return Grounding(logits, boxes, presence, boxes)

    def read_masks(self, masks: Any, kept: Any) -> Any:
        # One by one: of the runs that phrases can share there is no end, and each would be kept.
        found = [np.empty((0, self.config.mask_size, self.config.mask_size), np.float32)]
        for pair in kept:
            key = masks[pair].tobytes()
            if key not in self._masks:
                self._masks[key] = super().read_masks(masks, [pair])
            found.append(self._masks[key])
        return np.concatenate(found)

    def _work(self, start: float, seconds: float) -> None:
        if seconds:
            super()._work(start, seconds)


class SimulatedReplica(Sam3Replica):
    """The real replica on a simulated chip; ``info`` also tells what the chip and the host's threads did."""

    image_s, prompt_s = IMAGE_S, PROMPT_S

    def __init__(self, config: Any, plan: Any) -> None:
        import torch

        torch.set_num_threads(1)
        self.simulated = CountingChip(self.image_s, self.prompt_s)
        engine = Engine(self.simulated, image_cache_bytes=config.image_cache_bytes)
        with mock.patch.object(Sam3, "from_pretrained", return_value=Sam3(engine, {})):
            super().__init__(config, plan)
        self.spent: Counter[str] = Counter()
        self._spent_lock = threading.Lock()
        engine.preload = partial(self._timed, "decode", engine.preload)  # type: ignore[method-assign]
        replica_module.next_step = partial(self._timed, "masks", replica_module.next_step)  # type: ignore[assignment]
        self._queue._ground = partial(self._timed, "device", self._queue._ground)  # type: ignore[method-assign]

    def _timed(self, stage: str, step: Callable[..., Any], *arguments: Any) -> Any:
        """Adds the CPU seconds of a step, on whichever thread, to its stage's."""
        started = time.thread_time()
        try:
            return step(*arguments)
        finally:
            with self._spent_lock:
                self.spent[stage] += time.thread_time() - started  # type: ignore[assignment]

    async def info(self) -> dict[str, Any]:
        return await super().info() | {
            "pid": os.getpid(),
            "image_parts": self.simulated.images,
            "prompt_runs": {str(size): count for size, count in self.simulated.runs.items()},
            "busy_s": self.simulated._counts["busy_s"],
            "cpu_s": dict(self.spent),
        }


class InstantReplica(SimulatedReplica):
    """Its chip takes no time: what is left is the host's."""

    image_s, prompt_s = 0.0, 0.0


def simulated(
    replica: type[SimulatedReplica], chips: int, *, cache: bool, max_queued_requests: int = 1000
) -> Any:
    """The real application, with ``chips`` replicas."""
    config = ServeConfig(
        checkpoint="demo",
        backend="cpu",
        replicas=chips,
        cpus_per_replica=0.01,
        image_cache_bytes=1 << 30 if cache else 0,
        max_queued_requests=max_queued_requests,
        max_prompts=64,
    )
    plan = resolve(config, Cluster(0, 64, 64))
    # The canary knows the demo checkpoint's answer, which this chip does not give.
    plan = replace(plan, checkpoint=Checkpoint(plan.checkpoint.path, "simulated"))
    with mock.patch.object(service, "Sam3Replica", replica):
        return service.deployments(config, plan)


ANSWER = b'{"results": [' + b"0.123456," * 60 + b"0]}"
"""About as long as an answer without instances."""


class EmptyReplica:
    """Takes a body, answers in a batch."""

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0, max_concurrent_batches=1)
    async def answer(self, bodies: list[bytes]) -> list[bytes]:
        return [ANSWER] * len(bodies)

    async def predict(self, body: bytes) -> bytes:
        return await self.answer(body)


web = FastAPI()


@serve.deployment(name="Ingress", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=10_000)
@serve.ingress(web)
class EmptyIngress:
    """Reads a body, hands it on, answers."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    @web.post("/predict")
    async def predict(self, request: Request) -> Response:
        reply = await self._replicas.predict.remote(await request.body())
        return Response(reply, media_type="application/json")


def empty() -> Any:
    """Proxy, FastAPI ingress, handle, batch, and nothing in them."""
    replicas = serve.deployment(
        name="EmptyReplica",
        ray_actor_options={"num_cpus": 0.01},
        max_ongoing_requests=24,
        max_queued_requests=1000,
    )(EmptyReplica)
    return EmptyIngress.bind(replicas.bind())
