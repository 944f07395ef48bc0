"""The batch function, without Ray: every caller gets an answer, the gate is shut while the device works."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sam3_ray.engine import Answer
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
        return list(requests)

    def finish(self, pending):
        return [Answer(digest=str(request)) for request in pending]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def host():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def queue(engine, host) -> DeviceQueue:
    return DeviceQueue(engine, host, DeviceWatch(60), max_batch_size=8, batch_wait_s=0)


def test_answers_keep_the_order(engine, host):
    async def run():
        return await queue(engine, host).answer_batch([3, 1, 2])

    assert [answer.digest for answer in asyncio.run(run())] == ["3", "1", "2"]


def test_one_thread_owns_the_device_and_calls_take_turns(engine, host):
    async def run():
        device = queue(engine, host)
        return await asyncio.gather(*(device.answer_batch([i]) for i in range(20)))

    answers = asyncio.run(run())
    assert [a.digest for (a,) in answers] == [str(i) for i in range(20)]
    assert len(engine.threads) == 1


def test_a_failing_device_call_answers_every_caller(engine, host):
    engine.fail = OSError("the chip is gone")

    async def run():
        return await queue(engine, host).answer_batch([1, 2])

    for answer in asyncio.run(run()):
        with pytest.raises(RuntimeError, match="OSError: the chip is gone"):
            answer.unwrap()


def test_a_cancelled_batch_answers_every_caller(engine, host):
    """Ray's batch resolves its callers on an Exception only: a CancelledError must not get out."""
    engine.gate.clear()

    async def run():
        task = asyncio.create_task(queue(engine, host).answer_batch([1, 2]))
        await asyncio.to_thread(engine.entered.wait, 10)
        task.cancel()
        engine.gate.set()
        return await task

    for answer in asyncio.run(run()):
        with pytest.raises(RuntimeError, match="CancelledError"):
            answer.unwrap()


def test_requests_wait_at_the_gate_while_the_device_works(engine, host):
    engine.gate.clear()
    batches: list[int] = []

    async def run():
        device = queue(engine, host)

        async def batched(request):  # in place of Ray's, which needs a replica
            batches.append(request)
            return Answer(digest=str(request))

        device._batched = batched
        running = asyncio.create_task(device.answer_batch([0]))
        await asyncio.to_thread(engine.entered.wait, 10)
        waiting = [asyncio.create_task(device.answer(i)) for i in (1, 2, 3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert batches == []
        engine.gate.set()
        await running
        await asyncio.gather(*waiting)

    asyncio.run(run())
    assert sorted(batches) == [1, 2, 3]
