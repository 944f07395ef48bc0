"""The batch function, without Ray: every caller gets its own, the gate is shut while the device works."""

import asyncio
import threading

import pytest

from sam3_ray.answers import Grounded
from sam3_ray.serve.batching import DeviceQueue
from sam3_ray.serve.health import DeviceWatch


class FakeEngine:
    """Answers with the requests themselves; blocks on the device while ``gate`` is clear."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.threads: set[str] = set()
        self.inside = 0
        self.fail: Exception | None = None

    def ground(self, requests):
        self.inside += 1
        assert self.inside == 1, "two device calls at once"
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        assert self.gate.wait(10)
        self.inside -= 1
        if self.fail is not None:
            raise self.fail
        return [Grounded(request) for request in requests]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def queue(engine) -> DeviceQueue:
    return DeviceQueue(engine, DeviceWatch(60), max_batch_size=8, batch_wait_s=0)


def test_answers_keep_the_order(engine):
    async def run():
        return await queue(engine).ground_batch([3, 1, 2])

    assert [grounded.request for grounded in asyncio.run(run())] == [3, 1, 2]


def test_one_thread_owns_the_device_and_calls_take_turns(engine):
    async def run():
        device = queue(engine)
        return await asyncio.gather(*(device.ground_batch([i]) for i in range(20)))

    batches = asyncio.run(run())
    assert [g.request for (g,) in batches] == list(range(20))
    assert len(engine.threads) == 1


def test_a_failing_device_call_answers_every_caller(engine):
    engine.fail = OSError("the chip is gone")

    async def run():
        return await queue(engine).ground_batch([1, 2])

    outcomes = asyncio.run(run())
    assert [g.request for g in outcomes] == [1, 2]
    for grounded in outcomes:
        with pytest.raises(RuntimeError, match="OSError: the chip is gone"):
            raise grounded.error


def test_a_cancelled_batch_answers_every_caller(engine):
    """Ray's batch resolves its callers on an Exception only: a CancelledError must not get out."""
    engine.gate.clear()

    async def run():
        task = asyncio.create_task(queue(engine).ground_batch([1, 2]))
        await asyncio.to_thread(engine.entered.wait, 10)
        task.cancel()
        engine.gate.set()
        return await task

    outcomes = asyncio.run(run())
    assert [g.request for g in outcomes] == [1, 2]
    for grounded in outcomes:
        with pytest.raises(RuntimeError, match="CancelledError"):
            raise grounded.error


def test_requests_wait_at_the_gate_while_the_device_works(engine):
    engine.gate.clear()
    batches: list[int] = []

    async def run():
        device = queue(engine)

        async def batched(request):  # in place of Ray's, which needs a replica
            batches.append(request)
            return Grounded(request)

        device._batched = batched
        running = asyncio.create_task(device.ground_batch([0]))
        await asyncio.to_thread(engine.entered.wait, 10)
        waiting = [asyncio.create_task(device.ground(i)) for i in (1, 2, 3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert batches == []
        engine.gate.set()
        await running
        await asyncio.gather(*waiting)

    asyncio.run(run())
    assert sorted(batches) == [1, 2, 3]
