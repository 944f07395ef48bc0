"""What of a replica's failures counts against its device."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from sam3_ray.answers import STAGES, Grounded, Instances
from sam3_ray.errors import ImageDecodeError
from sam3_ray.images import ImageSource
from sam3_ray.prompt import Request
from sam3_ray.serve import encoding
from sam3_ray.serve import replica as module
from sam3_ray.serve.config import ServeConfig
from sam3_ray.serve.encoding import Origin
from sam3_ray.serve.health import MAX_FAILED_IMAGES, DeviceWatch
from sam3_ray.serve.parking import Parking
from sam3_ray.serve.schemas import Failure, PredictJob, Reply

REQUEST = Request(ImageSource.from_digest("0" * 32))
ORIGIN = Origin(input_size=224, checkpoint="demo", replica="r", chip=None)


def iter_reply():
    """An answer that takes one step."""
    return Reply(b"{}")
    yield


class Parts:
    """A replica whose model, queue and encoder do what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.preload = Mock()
        self.encode = Mock(side_effect=lambda *_: iter_reply())
        self.grounded = Grounded(REQUEST)
        monkeypatch.setattr(module, "encode_answer", self.encode)
        self.watch = DeviceWatch(60)
        self.replica = object.__new__(module.Sam3Replica)
        engine = SimpleNamespace(
            is_ready=lambda source: False,
            preload=self.preload,
            stats=lambda: {"image_cache": {}},
        )
        self.host = ThreadPoolExecutor(1)
        vars(self.replica).update(
            _name="r",
            _config=ServeConfig(),
            _chip=None,
            _place="here/cpu0",
            _parking=SimpleNamespace(reason=None),
            _ongoing=0,
            _metrics=Mock(),
            _watch=self.watch,
            _host=self.host,
            _model=SimpleNamespace(engine=engine, close=lambda: None),
            _queue=SimpleNamespace(ground=self._ground, close=lambda: None),
            _origin=ORIGIN,
            _max_mask_pixels=1_000_000,
        )

    async def _ground(self, request: object) -> Grounded:
        return self.grounded

    def ask(self, number: int) -> Failure | Reply:
        job = PredictJob(digest=f"{number:032x}", image=b"x")
        return asyncio.run(self.replica.predict(job))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch):
    parts = Parts(monkeypatch)
    yield parts
    parts.host.shutdown()


def statuses(parts: Parts) -> set[int]:
    """Of as many requests as make a device count as failed, and one more."""
    outcomes = [parts.ask(i) for i in range(MAX_FAILED_IMAGES + 1)]
    return {o.problem.status if isinstance(o, Failure) else 200 for o in outcomes}


@pytest.mark.parametrize("part", ["preload", "encode"])
def test_work_of_the_host_that_fails_says_nothing_of_the_device(parts, part):
    getattr(parts, part).side_effect = RuntimeError("not the device's")
    assert statuses(parts) == {500}
    parts.watch.check()


def test_a_clients_mistake_says_nothing_of_the_device(parts):
    parts.grounded = Grounded(REQUEST, error=ImageDecodeError("junk"))
    assert statuses(parts) == {415}
    parts.watch.check()


def test_work_of_the_device_that_fails_image_after_image_gives_it_up(parts):
    parts.grounded = Grounded(REQUEST, error=RuntimeError("the device's"))
    assert statuses(parts) == {500}
    with pytest.raises(RuntimeError, match="in a row"):
        parts.watch.check()


def found(count: int, size: int = 20) -> Grounded:
    """So many instances in a picture of size x size, the masks all set."""
    instances = Instances(
        prompt="star",
        scores=np.full(count, 0.9, np.float32),
        boxes=np.zeros((count, 4), np.float32),
        presence=0.9,
        truncated=False,
        height=size,
        width=size,
        logits=np.ones((1, 4, 4), np.float32),
        rows=np.zeros(count, np.int64),
    )
    timing = dict.fromkeys(STAGES, 1.0)
    return Grounded(REQUEST, [instances], size, size, "0" * 32, timing_ms=timing)


@pytest.fixture
def stepping(parts, monkeypatch):
    """The real encoder, a mask a step; gives the parts, and a gate at which every mask waits."""
    monkeypatch.setattr(module, "encode_answer", encoding.encode_answer)
    monkeypatch.setattr(encoding, "STEP_PIXELS", 1)
    gate, made = threading.Semaphore(0), []
    real = encoding._encoded

    def waiting(mask, mask_format):
        assert gate.acquire(timeout=30)
        made.append(1)
        return real(mask, mask_format)

    monkeypatch.setattr(encoding, "_encoded", waiting)
    return parts, gate, made


def test_an_answer_too_large_is_the_clients_and_makes_no_mask(parts):
    parts.grounded = found(count=2501)  # of 400 pixels each
    outcome = parts.ask(1)
    assert isinstance(outcome, Failure)
    assert (outcome.problem.kind.slug, outcome.problem.status) == ("answer-too-large", 413)
    assert not parts.encode.called
    assert statuses(parts) == {413}
    parts.watch.check()
    parts.grounded = found(count=2500)
    assert isinstance(parts.ask(1), Reply)


def test_a_cancelled_request_makes_no_more_masks(stepping):
    parts, gate, made = stepping
    parts.grounded = found(count=50)

    async def run():
        task = asyncio.create_task(parts.replica.predict(PredictJob("1" * 32, b"x")))
        gate.release(3)
        await until(lambda: len(made) == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    gate.release(100)
    parts.host.shutdown()  # waits for the step that was running, and there is no other
    assert 3 <= len(made) <= 4
    parts.replica._metrics.request.assert_called_once_with("cancelled")


def test_a_small_answer_passes_a_large_one(stepping):
    """On one host thread: one mask of the large answer is made before the small answer, and not all."""
    parts, gate, made = stepping

    async def run():
        parts.grounded = found(count=50)
        large = asyncio.create_task(parts.replica.predict(PredictJob("1" * 32, b"x")))
        gate.release(1)
        await until(lambda: len(made) == 1)  # the thread is in the large one's second mask now
        parts.grounded = found(count=1)
        small = asyncio.create_task(parts.replica.predict(PredictJob("2" * 32, b"x")))
        await until(lambda: gate.release(1) or small.done())
        assert not large.done()
        count = len(made)
        gate.release(100)
        return count, await small, await large

    count, small, large = asyncio.run(run())
    assert count < 10
    assert len(json.loads(small.body)["results"][0]["instances"]) == 1
    assert len(json.loads(large.body)["results"][0]["instances"]) == 50
    timing = parts.replica._metrics.answer.call_args.kwargs["timing_ms"]
    assert timing["masks"] > 1.0


async def until(condition):
    """Wait, for 30 seconds at most, until a condition holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


# -- parking -----------------------------------------------------------------------------------------


@pytest.fixture
def ended(parts, tmp_path, monkeypatch):
    """The parts with a real parking, and the codes that the process would have ended with."""
    codes = []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    monkeypatch.setattr(module, "END_AFTER_S", 0.0)
    vars(parts.replica).update(_parking=Parking(tmp_path, "chip0"), _trying=False)
    return codes


def test_an_unparked_replica_ends_after_its_requests_and_takes_no_more(parts, ended):
    replica = parts.replica

    async def run():
        replica._parking.park()
        replica._ongoing = 1
        answer = await replica.unpark("here/cpu0")
        assert answer == {"place": "here/cpu0", "was": "parked by hand"}
        outcome = await replica.predict(PredictJob("1" * 32, b"x"))
        assert isinstance(outcome, Failure)
        assert outcome.parked
        assert not ended
        replica._ongoing = 0
        async with asyncio.timeout(30):
            await replica._ending

    asyncio.run(run())
    assert ended == [0]
    assert not replica._parking.by_hand, "the next replica here starts"


@pytest.mark.parametrize("then", ["park", "unpark", "nothing"])
def test_a_trial_that_succeeds_ends_the_process_unless_someone_works_on_the_chip(
    parts, ended, monkeypatch, then
):
    replica = parts.replica
    entered, release = threading.Event(), threading.Event()

    def recover(*_):
        entered.set()
        assert release.wait(30)
        return True, "it opens again"

    monkeypatch.setattr(module, "recover", recover)
    replica._park_retry_s, replica._model = 0.0, None
    replica._parking.fault("it does not open")

    async def run():
        trial = asyncio.create_task(replica._try_chip_again())
        await until(entered.is_set)
        if then == "park":
            answer = await replica.park("here/cpu0", timeout_s=0.0)
            assert answer["closed"] is False, "the trial has the chip"
        elif then == "unpark":
            await replica.unpark("here/cpu0")
            assert not ended
        release.set()
        await until(lambda: not replica._trying)
        if then == "park":
            assert (await replica.park("here/cpu0"))["closed"] is True
        else:
            await until(lambda: bool(ended))
        trial.cancel()

    asyncio.run(run())
    assert bool(ended) == (then != "park")
