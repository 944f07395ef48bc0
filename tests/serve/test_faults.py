"""Hangs, crashes and garbage of real replicas (demo checkpoint) behind the real ingress."""

import asyncio
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import httpx
import numpy as np
import pytest

from sam3_ray.serve.replica import Sam3Replica
from tests.serve.fakes import assert_problem, wait_until
from tests.serve.test_service import drawn

RAW = {"content-type": "image/png"}
CHIP_S = 0.2
"""The simulated chip holds its thread so long, asleep, for a device call."""


class FaultyReplica(Sam3Replica):
    """The real replica on a slow device. A phrase "hang" never returns, "die" ends the process, from "break"
    on every box is wrong, plausibly."""

    def __init__(self, config, plan) -> None:
        super().__init__(config, plan)
        backend = self._model.engine.backend
        real, real_ground, broken = backend.encode_text, backend.ground, []

        def ground(image, text):
            found = real_ground(image, text)
            if broken:
                found = replace(found, boxes_cxcywh=np.full_like(found.boxes_cxcywh, 0.25))
            return found

        backend.ground = ground

        def encode_text(phrases):
            if "hang" in phrases:
                threading.Event().wait()
            if "die" in phrases:
                os.kill(os.getpid(), signal.SIGKILL)
            if "break" in phrases:
                broken.append(True)
            time.sleep(CHIP_S)
            return real(phrases)

        backend.encode_text = encode_text

    async def info(self):
        return await super().info() | {"pid": os.getpid()}


@pytest.fixture(scope="module")
def faulty(ray_url: str) -> Iterator[httpx.Client]:
    from ray import cloudpickle, serve

    from sam3_ray.serve import app
    from sam3_ray.serve.config import ServeConfig
    from sam3_ray.serve.plan import Cluster, resolve
    from tests.serve import test_faults

    cloudpickle.register_pickle_by_value(test_faults)
    config = ServeConfig(
        checkpoint="demo",
        backend="cpu",
        replicas=2,
        cpus_per_replica=0.01,
        max_batch_size=2,
        max_ongoing_requests=4,
        max_queued_requests=4,
        chip_timeout_s=4.0,
        canary_every_s=0.5,
        deadline_s=60.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "Sam3Replica", FaultyReplica)
        application = app.deployments(config, resolve(config, Cluster(0, 2, 2)))
    serve.run(application, name="faulty", route_prefix="/faulty")
    with httpx.Client(base_url=f"{ray_url}/faulty", timeout=90) as client:
        yield client
    serve.delete("faulty")


def replicas(client: httpx.Client) -> list[dict]:
    return client.get("/info").json()["replicas"]


def whole(client: httpx.Client, but: set[int] = frozenset()) -> bool:
    pids = {replica["pid"] for replica in replicas(client)}
    return len(pids) == 2 and not pids & but


def ask(client: httpx.Client, data: bytes, prompt: str, **headers: str) -> httpx.Response:
    return client.post("/predict", content=data, headers=RAW | headers, params={"prompts": prompt})


async def ask_all(client: httpx.Client, bodies: list[tuple[bytes, str]]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=client.base_url, timeout=90, limits=limits) as web:
        return await asyncio.gather(
            *(
                web.post("/predict", content=data, headers=RAW, params={"prompts": prompt})
                for data, prompt in bodies
            )
        )


def test_work_past_its_deadline_is_dropped_before_it_starts(faulty):
    before = sum(replica["image_cache"]["misses"] for replica in replicas(faulty))
    data = drawn(9000)
    response = ask(faulty, data, "red circle", **{"x-request-timeout-ms": "1"})
    assert_problem(response, 504, "deadline-exceeded", "0.001 s")
    assert ask(faulty, drawn(9001), "red circle").status_code == 200
    after = sum(replica["image_cache"]["misses"] for replica in replicas(faulty))
    assert after - before <= 2


def test_two_hundred_aborted_requests_leave_every_place_free(faulty):
    async def abort() -> int:
        aborted = 0

        async def one(web: httpx.AsyncClient, seed: int) -> None:
            nonlocal aborted
            try:
                await web.post("/predict", content=drawn(seed), headers=RAW, timeout=0.15)
            except httpx.TimeoutException:
                aborted += 1

        async with httpx.AsyncClient(base_url=faulty.base_url) as web:
            for start in range(10_000, 10_200, 50):
                await asyncio.gather(*(one(web, seed) for seed in range(start, start + 50)))
        return aborted

    assert asyncio.run(abort()) > 50

    def normal() -> bool:
        bodies = [(drawn(11_000 + i), "red circle") for i in range(8)]
        return {r.status_code for r in asyncio.run(ask_all(faulty, bodies))} == {200}

    wait_until(normal, 30)


def test_a_replica_killed_under_load_loses_no_answer(faulty):
    victim = replicas(faulty)[0]["pid"]
    bodies = [(drawn(12_000 + i), "red circle") for i in range(6)]
    seen: Counter[int] = Counter()
    for round_number in range(4):
        if round_number == 1:
            threading.Timer(CHIP_S / 2, os.kill, (victim, signal.SIGKILL)).start()
        responses = asyncio.run(ask_all(faulty, bodies))
        seen.update(response.status_code for response in responses)
        for (data, _), response in zip(bodies, responses, strict=True):
            if response.status_code == 200:
                from sam3_ray.images import file_digest

                assert response.json()["image_digest"] == file_digest(data)
            else:
                assert response.status_code == 503, response.text
    assert seen[200] >= 12
    wait_until(lambda: whole(faulty, {victim}), 90)


def test_a_chip_that_computes_garbage_is_given_up(faulty):
    """The canary finds it while the chip is idle; Serve starts another replica in its place."""
    before = {replica["pid"] for replica in replicas(faulty)}
    broken = ask(faulty, drawn(12_500), "break")
    assert broken.status_code == 200
    wait_until(lambda: len(before & {r["pid"] for r in replicas(faulty)}) == 1, 150)
    wait_until(lambda: whole(faulty), 90)
    answers = [ask(faulty, drawn(12_500 + i), "red circle") for i in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    boxes = {tuple(i["box_xyxy"]) for a in answers for i in a.json()["results"][0]["instances"]}
    assert len(boxes) != 1, "all boxes alike: the broken chip still answers"


def test_a_chip_that_hangs_ends_its_replica_and_a_second_time_refuses_the_picture(faulty):
    before = {replica["pid"] for replica in replicas(faulty)}
    data = drawn(13_000 + uuid.uuid4().int % 1000)
    response = ask(faulty, data, "hang")
    # Two tries, two hung replicas: whichever notices first, the client gets a problem and no 500.
    assert response.status_code in (422, 503), response.text
    wait_until(lambda: whole(faulty, before) or whole(faulty), 120)
    if response.status_code == 503:
        ask(faulty, data, "hang")
        wait_until(lambda: whole(faulty), 120)
    assert_problem(ask(faulty, data, "red circle"), 422, "image-refused", "2 replicas died")
    assert ask(faulty, drawn(14_000), "red circle").status_code == 200
    incidents = [i for replica in replicas(faulty) for i in replica["incidents"]]
    assert incidents
    for incident in incidents:
        assert "has been running for" in incident["reason"]
        assert incident["outcome"] == "the process was started again"
    assert faulty.get("/info").json()["refused_images"]
