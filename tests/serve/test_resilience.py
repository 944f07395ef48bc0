"""Overload, deadlines, lost replicas and clients that hang up: the real ingress and router, stub replicas."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sam3_ray.serve.ingress import _running_replicas
from tests.serve.fakes import StubReplica, assert_problem, wait_until

DEADLINE_S = 10.0
REPLICAS = 2
PLACES = 2


@pytest.fixture(scope="module")
def stub(ray_url: str) -> Iterator[httpx.Client]:
    """The application under /stub, with a deadline of ten seconds and room for little."""
    from ray import serve

    from sam3_ray.serve import app
    from sam3_ray.serve.config import ServeConfig
    from sam3_ray.serve.plan import Cluster, resolve

    config = ServeConfig(
        checkpoint="demo",
        backend="cpu",
        replicas=REPLICAS,
        cpus_per_replica=0.01,
        max_batch_size=1,
        max_ongoing_requests=PLACES,
        max_queued_requests=1,
        retry_after_s=2.2,
        deadline_s=DEADLINE_S,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "Sam3Replica", StubReplica)
        application = app.deployments(config, resolve(config, Cluster(0, 2, 2)))
    serve.run(application, name="stub", route_prefix="/stub")
    with httpx.Client(base_url=f"{ray_url}/stub", timeout=60) as client:
        yield client
    serve.delete("stub")


def body(prompt: str, number: int = 0) -> dict:
    return {"json": {"image_digest": f"{number:032x}", "prompts": [prompt]}}


class Hold:
    """Requests that a replica holds until ``release``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def body(self, number: int = 0) -> dict:
        return body(f"hold {self.folder}", number)

    def count(self, what: str) -> int:
        return len(list(self.folder.glob(f"{what}-*")))

    def release(self) -> None:
        (self.folder / "release").touch()


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    hold = Hold(tmp_path)
    yield hold
    hold.release()
    wait_until(lambda: hold.count("holding") == 0)


async def fill(client: httpx.AsyncClient, hold: Hold) -> list[asyncio.Task]:
    """Requests that take every place that the replicas have."""
    tasks: list[asyncio.Task] = []
    for i in range(REPLICAS * PLACES):
        tasks.append(asyncio.create_task(client.post("/predict", **hold.body(i))))
        await asyncio.to_thread(wait_until, lambda n=i: hold.count("holding") == n + 1)
    return tasks


def test_a_failed_request_is_answered_by_another_replica(stub):
    answer = stub.post("/predict", **body("fail")).json()
    assert len(answer["avoided"]) == 1
    assert answer["replica"] not in answer["avoided"]


def test_over_capacity_is_503_with_retry_after_and_the_others_are_answered(stub, hold):
    async def burst() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=stub.base_url, timeout=60) as client:
            held = await fill(client, hold)
            more = [
                asyncio.create_task(client.post("/predict", **body("quick", i))) for i in range(8)
            ]
            # One of them waits; the others are turned away while the replicas are still full.
            done, _ = await asyncio.wait(more, return_when=asyncio.FIRST_COMPLETED, timeout=30)
            assert {task.result().status_code for task in done} == {503}
            hold.release()
            return await asyncio.gather(*held, *more)

    responses = asyncio.run(burst())
    assert {response.status_code for response in responses[: REPLICAS * PLACES]} == {200}
    refused = [response for response in responses if response.status_code != 200]
    assert refused
    for response in refused:
        assert_problem(response, 503, "over-capacity")
        assert response.headers["retry-after"] == "3"


def test_a_busy_service_is_still_healthy_and_says_that_it_is_busy(stub, hold):
    names = [replica["replica"] for replica in stub.get("/info").json()["replicas"]]

    async def run() -> None:
        async with httpx.AsyncClient(base_url=stub.base_url, timeout=60) as client:
            held = await fill(client, hold)
            assert (await client.get("/health")).json() == {"status": "ok"}
            # What /health asks where no replica has ever answered.
            assert _running_replicas("stub") == REPLICAS
            replicas = (await client.get("/info")).json()["replicas"]
            assert [(r["replica"], r["busy"]) for r in replicas] == [(name, True) for name in names]
            hold.release()
            await asyncio.gather(*held)

    asyncio.run(run())


def test_no_header_of_a_client_switches_the_deadline_off(stub, hold):
    headers = {"x-request-timeout-seconds": "0", "x-request-disconnect-disabled": "?1"}
    started = time.monotonic()
    response = stub.post("/predict", headers=headers, **hold.body())
    assert_problem(response, 504, "deadline-exceeded", "within 10 s")
    assert time.monotonic() - started >= DEADLINE_S
    # Nobody waits for it any more: the replica does not go on.
    wait_until(lambda: hold.count("cancelled") == 1)


def test_a_client_that_hangs_up_cancels_its_request(stub, hold):
    async def hang_up() -> None:
        async with httpx.AsyncClient(base_url=stub.base_url, timeout=60) as client:
            task = asyncio.create_task(client.post("/predict", **hold.body()))
            await asyncio.to_thread(wait_until, lambda: hold.count("holding") == 1)
            task.cancel()

    started = time.monotonic()
    asyncio.run(hang_up())
    wait_until(lambda: hold.count("cancelled") == 1)
    assert time.monotonic() - started < DEADLINE_S, "the deadline did it, not the disconnect"


def test_a_client_that_hangs_up_while_it_waits_gives_its_place_up(stub, hold):
    """The router forgets a request whose client has gone before a replica took it."""

    async def run() -> None:
        async with httpx.AsyncClient(base_url=stub.base_url, timeout=60) as client:
            held = await fill(client, hold)

            async def waits() -> asyncio.Task:
                """A request in the one waiting place, as soon as that is free."""
                while True:
                    task = asyncio.create_task(client.post("/predict", **body("quick")))
                    done, _ = await asyncio.wait([task], timeout=0.5)
                    if not done:
                        return task
                    assert task.result().status_code == 503

            async with asyncio.timeout(DEADLINE_S - 2):
                for _ in range(3):
                    task = await waits()
                    task.cancel()
                    await asyncio.wait([task])
                last = await waits()
            hold.release()
            responses = await asyncio.gather(last, *held)
            assert {response.status_code for response in responses} == {200}

    asyncio.run(run())


SLOW_UPLOADS = 150
"""More than the replicas take, wait for and have room for in all."""


def test_clients_that_send_slowly_take_nobodys_place(stub):
    url = httpx.URL(str(stub.base_url))
    head = (
        f"POST {url.path.rstrip('/')}/predict HTTP/1.1\r\nHost: {url.host}\r\nConnection: close\r\n"
        "Content-Type: image/png\r\nContent-Length: 5000\r\n\r\n"
    )

    async def slow() -> bytes:
        """The answer to a body of which the first bytes come, and no more."""
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(head.encode() + b"x" * 100)
        await writer.drain()
        try:
            return await reader.read()
        finally:
            writer.close()

    async def run() -> list[bytes]:
        waiting = [asyncio.create_task(slow()) for _ in range(SLOW_UPLOADS)]
        async with httpx.AsyncClient(base_url=stub.base_url, timeout=60) as client:
            for i in range(10):
                answer = await client.post("/predict", **body("quick", i))
                assert answer.status_code == 200, answer.text
        assert not any(task.done() for task in waiting), "they should still be sending"
        return await asyncio.gather(*waiting)

    for answer in asyncio.run(run()):
        # The pause that a body may make is as long as the deadline of these tests.
        assert answer.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 504 ")), answer[:200]
        assert b"slow-upload" in answer or b"deadline-exceeded" in answer


def test_a_replica_that_dies_under_a_request_costs_no_answer(stub, tmp_path):
    names = {replica["replica"] for replica in stub.get("/info").json()["replicas"]}
    response = stub.post("/predict", **body(f"die {tmp_path / 'died'}", 7))
    assert response.status_code == 200, response.text
    assert (tmp_path / "died").exists()
    assert response.json()["replica"] in names

    def restarted() -> bool:
        now = {replica["replica"] for replica in stub.get("/info").json()["replicas"]}
        return len(now) == REPLICAS and now != names

    wait_until(restarted, 90)
