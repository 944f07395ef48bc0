"""What goes to the device together, and when: Ray's own ``@serve.batch``, without a replica around it."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam3_ray.answers import Grounded
from sam3_ray.engine import Engine
from sam3_ray.images import ImageSource
from sam3_ray.prompt import Prompt, Request
from sam3_ray.serve.batching import MAX_PASSED, DeviceQueue, Waiting
from sam3_ray.serve.health import DeviceWatch
from tests.data.simulated import SimulatedChip
from tests.serve.test_service import drawn

BATCH = 8


class FakeEngine:
    """Answers with the requests themselves; a device call waits while ``gate`` is clear."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.threads: set[str] = set()
        self.inside = 0
        self.fail: Exception | None = None
        self.cached: set[str] = set()
        self.batches: list[list[str]] = []
        self.after_each: Callable[[], None] = lambda: None

    def holds(self, digest: str) -> bool:
        return digest in self.cached

    def ground(self, requests, *, done):
        self.inside += 1
        assert self.inside == 1, "two device calls at once"
        self.threads.add(threading.current_thread().name)
        self.batches.append([request.source.digest for request in requests])
        self.entered.set()
        assert self.gate.wait(30)
        try:
            if self.fail is not None:
                raise self.fail
            for index, request in enumerate(requests):
                done(index, Grounded(request))
                self.after_each()
            return [Grounded(request) for request in requests]
        finally:
            self.inside -= 1

    @property
    def first_calls(self) -> int:
        return len(self.batches)


@pytest.fixture(autouse=True)
def replica_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``@serve.batch`` asks of the replica that it runs in."""
    context = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=64))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def queue(engine, max_batch_size: int = BATCH, batch_wait_s: float = 0) -> DeviceQueue:
    return DeviceQueue(
        engine, DeviceWatch(60), max_batch_size=max_batch_size, batch_wait_s=batch_wait_s
    )


def digest(number: int) -> str:
    return f"{number:032x}"


def asking(number: int) -> Request:
    return Request(ImageSource.from_digest(digest(number)), (Prompt("star"),))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def busy(device: DeviceQueue, engine: FakeEngine, number: int = 0) -> asyncio.Task:
    """A request on the device, which stays there until ``engine.gate`` is set."""
    engine.gate.clear()
    engine.entered.clear()
    task = asyncio.create_task(device.ground(asking(number)))
    assert await asyncio.to_thread(engine.entered.wait, 30)
    return task


async def waiting(device: DeviceQueue, *numbers: int) -> list[asyncio.Task]:
    """Requests that wait for the device, in this order."""
    tasks = []
    for number in numbers:
        tasks.append(asyncio.create_task(device.ground(asking(number))))
        count = len(device._waiting)
        await until(lambda count=count: len(device._waiting) == count + 1)
    return tasks


def test_what_came_while_the_device_was_busy_is_the_next_batch(engine):
    async def run():
        device = queue(engine)
        first = await busy(device, engine)
        others = await waiting(device, 1, 2, 3)
        assert engine.first_calls == 1
        engine.gate.set()
        return await asyncio.gather(first, *others)

    answers = asyncio.run(run())
    assert [g.request.source.digest for g in answers] == [digest(i) for i in range(4)]
    assert engine.batches == [[digest(0)], [digest(1), digest(2), digest(3)]]
    assert len(engine.threads) == 1


def test_a_request_alone_waits_for_nobody(engine):
    async def run():
        device = queue(engine)
        for number in range(5):
            await device.ground(asking(number))

    asyncio.run(run())
    assert engine.batches == [[digest(number)] for number in range(5)]


def test_what_does_not_fit_waits_for_more_to_join_it(engine):
    """The rest of a full batch is no batch of its own while others have come."""

    async def run():
        device = queue(engine, max_batch_size=2)
        first = await busy(device, engine)
        others = await waiting(device, 1, 2, 3)
        engine.entered.clear()
        engine.after_each = engine.gate.clear  # the second call stays on the device, too
        engine.gate.set()
        await until(lambda: engine.first_calls == 2)
        others += await waiting(device, 4)
        engine.after_each = lambda: None
        engine.gate.set()
        await asyncio.gather(first, *others)

    asyncio.run(run())
    assert engine.batches == [[digest(0)], [digest(1), digest(2)], [digest(3), digest(4)]]


def test_cached_images_go_first_where_not_all_fit(engine):
    engine.cached = {digest(7), digest(9)}

    async def run():
        device = queue(engine, max_batch_size=2)
        first = await busy(device, engine)
        others = await waiting(device, 5, 6, 7, 8, 9)
        engine.gate.set()
        await asyncio.gather(first, *others)

    asyncio.run(run())
    assert engine.batches[1:] == [[digest(7), digest(9)], [digest(5), digest(6)], [digest(8)]]


def test_a_namespace_has_its_own_cached_images(engine):
    engine.cached = {"a" + digest(2)}

    async def run():
        device = queue(engine, max_batch_size=1)
        first = await busy(device, engine)
        others = await waiting(device, 1, 2)
        device._waiting[1].request.source.namespace = "a"
        engine.gate.set()
        await asyncio.gather(first, *others)

    asyncio.run(run())
    assert engine.batches[1:] == [[digest(2)], [digest(1)]]


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=25),
    size=st.integers(1, 4),
    room=st.integers(1, 24),
)
def test_nobody_waits_for_more_than_a_few_batches(arrivals, size, room):
    """Whatever comes, cached or not, with at most ``room`` waiting (Serve's max_ongoing_requests)."""
    engine = FakeEngine()
    loop = asyncio.new_event_loop()
    device = queue(engine, max_batch_size=size)
    device._device_calls = 1  # the gate is asked here by hand
    number, left = 0, 0
    born: dict[Waiting, int] = {}
    try:
        for round_number in range(len(arrivals) + room):
            for cached in arrivals[round_number] if round_number < len(arrivals) else ():
                if len(device._waiting) == room:
                    break
                number += 1
                one = Waiting(asking(number), loop)
                if cached:
                    engine.cached.add(digest(number))
                born[one] = round_number
                device._waiting.append(one)
            before = list(device._waiting)
            device._device_calls = 0
            device._open_gate()
            device._device_calls = 1
            gone = [one for one in before if one not in device._waiting]
            assert len(gone) == min(size, len(before))
            for one in gone:
                left += 1
                assert round_number - born[one] <= MAX_PASSED + -(-room // size)
            device._admitted.clear()
        assert left == number
    finally:
        device.close()
        loop.close()


def test_an_answer_does_not_wait_for_the_rest_of_its_batch(engine):
    async def run():
        device = queue(engine)
        first = await busy(device, engine)
        others = await waiting(device, 1, 2)
        goes_on = threading.Event()
        engine.after_each = lambda: engine.first_calls == 2 and goes_on.wait(30)
        engine.gate.set()
        await first
        await others[0]
        assert not others[1].done()
        assert not device.idle
        goes_on.set()
        await others[1]

    asyncio.run(run())
    assert engine.batches == [[digest(0)], [digest(1), digest(2)]]


def test_a_failing_device_call_answers_every_caller(engine):
    async def run():
        device = queue(engine)
        first = await busy(device, engine)
        others = await waiting(device, 1, 2)
        engine.fail = OSError("the chip is gone")
        engine.gate.set()
        failed = await asyncio.gather(first, *others)
        engine.fail = None
        return failed, await device.ground(asking(3))

    failed, after = asyncio.run(run())
    assert [g.request.source.digest for g in failed] == [digest(i) for i in range(3)]
    for grounded in failed:
        with pytest.raises(RuntimeError, match="OSError: the chip is gone"):
            raise grounded.error
    assert after.error is None


def test_a_cancelled_batch_answers_every_caller(engine):
    """Ray's batch resolves its callers on an Exception only: a CancelledError must not get out."""

    async def run():
        device = queue(engine)
        engine.gate.clear()
        loop = asyncio.get_running_loop()
        batch = [Waiting(asking(number), loop) for number in (1, 2)]
        task = asyncio.create_task(device.ground_batch(batch))
        assert await asyncio.to_thread(engine.entered.wait, 30)
        task.cancel()
        engine.gate.set()
        return await task

    outcomes = asyncio.run(run())
    assert [g.request.source.digest for g in outcomes] == [digest(1), digest(2)]
    for grounded in outcomes:
        with pytest.raises(RuntimeError, match="CancelledError"):
            raise grounded.error


@pytest.mark.parametrize("steps", range(8))
def test_a_caller_that_leaves_at_any_moment_holds_up_nobody(engine, steps):
    """Cancelled so many turns of the event loop after the gate opened for it."""

    async def run():
        device = queue(engine, max_batch_size=1)
        first = await busy(device, engine)
        leaves, stays = await waiting(device, 1, 2)
        engine.gate.set()
        await first
        for _ in range(steps):
            await asyncio.sleep(0)
        leaves.cancel()
        async with asyncio.timeout(30):
            assert (await stays).request.source.digest == digest(2)
        await asyncio.wait([leaves])
        async with asyncio.timeout(30):
            await device.ground(asking(3))
        assert not device._waiting
        await until(lambda: not device._admitted and device.idle)

    asyncio.run(run())
    assert engine.batches[-2:] == [[digest(2)], [digest(3)]]


def test_a_caller_that_leaves_while_it_waits_costs_no_device_time(engine):
    async def run():
        device = queue(engine)
        first = await busy(device, engine)
        leaves, stays = await waiting(device, 1, 2)
        leaves.cancel()
        await asyncio.wait([leaves])
        engine.gate.set()
        await asyncio.gather(first, stays)

    asyncio.run(run())
    assert engine.batches == [[digest(0)], [digest(2)]]


def test_a_wait_that_is_asked_for_lets_others_join(engine):
    """With ``batch_wait_s`` the gate stays open while the batch forms."""

    async def run():
        device = queue(engine, max_batch_size=3, batch_wait_s=30)
        tasks = [asyncio.create_task(device.ground(asking(0)))]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(device.ground(asking(number))) for number in (1, 2)]
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert engine.batches == [[digest(0), digest(1), digest(2)]]


def test_a_batch_that_becomes_smaller_while_it_forms_takes_no_more(engine):
    async def run():
        device = queue(engine, max_batch_size=4, batch_wait_s=0.2)
        tasks = [asyncio.create_task(device.ground(asking(number))) for number in range(3)]
        await asyncio.sleep(0)
        device.reconfigure(1, 0.2)
        tasks += [asyncio.create_task(device.ground(asking(number))) for number in range(3, 6)]
        await asyncio.sleep(0)
        assert len(device._admitted) == 3
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert sorted(one for batch in engine.batches for one in batch) == [
        digest(number) for number in range(6)
    ]
    assert all(len(batch) == 1 for batch in engine.batches[-3:])


class CountingChip(SimulatedChip):
    """Counts image parts and the phrases of each prompt run; an image part waits while ``gate`` is clear."""

    def __init__(self) -> None:
        super().__init__()
        self.images = 0
        self.runs: list[list[str]] = []
        self.gate = threading.Event()
        self.entered = threading.Event()

    def encode_image(self, prepared):
        self.images += 1
        self.entered.set()
        assert self.gate.wait(30)
        return super().encode_image(prepared)

    def ground(self, image, text):
        self.runs.append(list(text))
        return super().ground(image, text)


def test_four_requests_for_one_image_are_one_image_part_and_one_prompt_run():
    chip = CountingChip()
    engine = Engine(chip)
    data, phrases = drawn(1), ["car", "person", "dog", "tree"]

    async def run():
        device = queue(engine)
        other = Request(ImageSource.of(drawn(2)), (Prompt("sky"),))
        first = asyncio.create_task(device.ground(other))
        assert await asyncio.to_thread(chip.entered.wait, 30)
        together = [
            asyncio.create_task(device.ground(Request(ImageSource.of(data), (Prompt(phrase),))))
            for phrase in phrases
        ]
        await until(lambda: len(device._waiting) == len(phrases))
        chip.gate.set()
        await first
        return await asyncio.gather(*together)

    answers = asyncio.run(run())
    assert chip.images == 2
    assert chip.runs == [["sky"], phrases]
    assert [[found.prompt for found in answer.instances] for answer in answers] == [
        [phrase] for phrase in phrases
    ]
