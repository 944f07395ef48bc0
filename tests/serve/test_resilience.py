"""Overload, deadlines, lost replicas and clients that hang up: the real ingress and router, stub replicas."""

import asyncio
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.serve.fakes import StubReplica, assert_problem

DEADLINE_S = 10.0
REPLICAS = 2


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
        max_ongoing_requests=2,
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


def total(stub: httpx.Client, key: str) -> int:
    return sum(replica[key] for replica in stub.get("/info").json()["replicas"])


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def release_all() -> None:
    from ray import serve

    handle = serve.get_deployment_handle("Sam3Replica", "stub")
    handle.broadcast("release").results(timeout_s=30)


def test_a_failed_request_is_answered_by_another_replica(stub):
    answer = stub.post("/predict", **body("fail")).json()
    assert len(answer["avoided"]) == 1
    assert answer["replica"] not in answer["avoided"]


def test_over_capacity_is_503_with_retry_after_and_the_others_are_answered(stub):
    async def burst() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=stub.base_url, timeout=60) as client:
            tasks = [
                asyncio.create_task(client.post("/predict", **body("hold", i))) for i in range(12)
            ]
            # Four are held and one waits: the others are turned away while those are still there.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=30)
            assert {task.result().status_code for task in done} == {503}
            while not all(task.done() for task in tasks):
                await asyncio.to_thread(release_all)
                await asyncio.wait(tasks, timeout=0.2)
            return [task.result() for task in tasks]

    responses = asyncio.run(burst())
    refused = [response for response in responses if response.status_code == 503]
    assert 1 <= len(refused) < 12
    for response in refused:
        assert_problem(response, 503, "over-capacity")
        assert response.headers["retry-after"] == "3"
    assert {r.status_code for r in responses if r not in refused} == {200}


def test_no_header_of_a_client_switches_the_deadline_off(stub):
    before = total(stub, "cancelled")
    headers = {"x-request-timeout-seconds": "0", "x-request-disconnect-disabled": "?1"}
    started = time.monotonic()
    response = stub.post("/predict", headers=headers, **body("hold"))
    assert_problem(response, 504, "deadline-exceeded", "within 10 s")
    assert time.monotonic() - started >= DEADLINE_S
    # Nobody waits for it any more: the replica does not go on.
    wait_until(lambda: total(stub, "cancelled") == before + 1 and total(stub, "holding") == 0)


def test_a_client_that_hangs_up_cancels_its_request(stub):
    before = total(stub, "cancelled")

    async def hang_up() -> None:
        async with httpx.AsyncClient(base_url=stub.base_url, timeout=60) as client:
            task = asyncio.create_task(client.post("/predict", **body("hold")))
            await asyncio.to_thread(wait_until, lambda: total(stub, "holding") == 1)
            task.cancel()

    started = time.monotonic()
    asyncio.run(hang_up())
    wait_until(lambda: total(stub, "cancelled") == before + 1 and total(stub, "holding") == 0)
    assert time.monotonic() - started < DEADLINE_S, "the deadline did it, not the disconnect"


def test_clients_that_hang_up_while_they_wait_give_their_place_up(stub):
    """The router forgets a request whose client has gone before a replica took it."""

    async def run() -> None:
        async with httpx.AsyncClient(base_url=stub.base_url, timeout=60) as client:
            held: list[asyncio.Task] = []
            for i in range(4):
                held.append(asyncio.create_task(client.post("/predict", **body("hold", i))))
                await asyncio.to_thread(wait_until, lambda n=i: total(stub, "holding") == n + 1)
            for _ in range(3):  # each takes the one waiting place, and gives it back
                waiting = asyncio.create_task(client.post("/predict", **body("quick")))
                done, _ = await asyncio.wait([waiting], timeout=0.5)
                assert not done, waiting.result().text
                waiting.cancel()
                await asyncio.wait([waiting])
                await asyncio.sleep(0.2)
            last = asyncio.create_task(client.post("/predict", **body("quick")))
            await asyncio.to_thread(release_all)
            assert (await last).status_code == 200
            assert {(await task).status_code for task in held} == {200}

    asyncio.run(run())


def test_a_replica_that_dies_under_a_request_costs_no_answer(stub, tmp_path):
    names = {replica["replica"] for replica in stub.get("/info").json()["replicas"]}
    response = stub.post("/predict", **body(f"die {tmp_path / 'died'}", 7))
    assert response.status_code == 200, response.text
    assert response.json()["replica"] in names

    def restarted() -> bool:
        now = {replica["replica"] for replica in stub.get("/info").json()["replicas"]}
        return len(now) == REPLICAS and now != names

    wait_until(restarted, 90)
