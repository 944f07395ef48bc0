"""After a hang: watchdog, the file it leaves, reset of one chip, the trial; the canary; quarantine."""

import asyncio
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from sam3_ray import Sam3
from sam3_ray.chips import Chip
from sam3_ray.images import ImageSource
from sam3_ray.prompt import Prompt, Request
from sam3_ray.serve.canary import CENTRE, Canary, picture
from sam3_ray.serve.config import ServeConfigError, load_config
from sam3_ray.serve.errors import ProblemError
from sam3_ray.serve.health import DeviceWatch
from sam3_ray.serve.quarantine import Quarantine
from sam3_ray.serve.recovery import Incidents, recover, reset_words
from sam3_ray.serve.watchdog import EXIT_CODE, Watchdog

CHIP = Chip(index=1, device=7, pci_address="0000:41:00.0")
OPENS = [sys.executable, "-c", ""]
FAILS = [sys.executable, "-c", "import sys; sys.exit('no such luck')"]
HANGS = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_the_watchdog_ends_the_process_and_says_why(tmp_path):
    incidents = Incidents(tmp_path, "chip1")
    watch = DeviceWatch(60.0, limit_s=0.05)
    ended: list[int] = []
    done = threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        done.set()

    dog = Watchdog(watch, incidents, end=end, every_s=0.01)
    try:
        with watch.call(1):  # the first call, too, where the limit is given
            assert done.wait(30)
    finally:
        dog.close()
    assert ended == [EXIT_CODE]
    (incident,) = Incidents(tmp_path, "chip1").read()
    assert "has been running for" in incident["reason"]
    assert incidents.pending
    assert not Incidents(tmp_path, "chip2").pending
    incidents.settle("reset; it opens again")
    assert not incidents.pending
    assert incidents.read()[0]["outcome"] == "reset; it opens again"


def test_the_watchdog_ends_the_process_where_it_can_leave_no_reason(tmp_path, caplog):
    ended, done = [], threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        done.set()

    watch = DeviceWatch(60.0, limit_s=0.05)
    dog = Watchdog(watch, Incidents(tmp_path / "gone", "chip1"), end=end, every_s=0.01)
    try:
        with watch.call(1):
            assert done.wait(30)
    finally:
        dog.close()
    assert ended == [EXIT_CODE]
    assert "could not be left" in caplog.text


@pytest.mark.parametrize("content", [b"", b'[{"at": ', b"\xff\xfe"])
def test_a_file_of_incidents_that_is_none_counts_as_empty(tmp_path, content):
    incidents = Incidents(tmp_path, "chip1")
    incidents.add("hung")
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert incidents.read() == []
    assert not incidents.pending
    incidents.add("hung again")
    assert incidents.pending


@pytest.mark.parametrize("command", ["tt-smi -r", "tt-smi -r all", "tt-smi -r {chip}"])
def test_a_reset_of_every_chip_is_refused_at_once(command):
    with pytest.raises(ServeConfigError, match="names no chip"):
        load_config({"reset_command": command})
    with pytest.raises(ValueError, match="names no chip"):
        reset_words(command, CHIP)


def test_a_reset_names_that_one_chip():
    assert reset_words("tt-smi -r {device}", CHIP) == ["tt-smi", "-r", "7"]
    assert reset_words("'my tool' --pci={pci_address}", CHIP) == ["my tool", "--pci=0000:41:00.0"]
    with pytest.raises(ValueError, match="no PCI address"):
        reset_words("x {pci_address}", Chip(index=0, device=0))


def test_a_chip_that_opens_again_is_used(tmp_path):
    script = (
        f"import sys, pathlib; pathlib.Path({str(tmp_path / 'reset')!r}).write_text(sys.argv[1])"
    )
    command = f'{sys.executable} -c "{script}" {{device}}'
    assert recover(CHIP, command, open_command=OPENS) == (True, "reset; it opens again")
    assert (tmp_path / "reset").read_text() == "7"
    assert recover(CHIP, None, open_command=OPENS)[0]
    assert recover(None, command, open_command=OPENS)[0]


@pytest.mark.parametrize(
    ("command", "reason"),
    [(FAILS, "no such luck"), (HANGS, "more than"), (["/no/such"], "No such")],
)
def test_a_chip_that_does_not_open_is_not_used(command, reason):
    usable, outcome = recover(CHIP, None, open_command=command, open_timeout_s=2.0)
    assert not usable
    assert reason in outcome
    assert "not reset" in outcome


def test_a_failed_reset_is_told(tmp_path):
    usable, outcome = recover(CHIP, "/no/such/tool {device}", open_command=FAILS)
    assert not usable
    assert outcome.startswith("reset failed (/no/such/tool: No such file")


# -- the canary ------------------------------------------------------------------------------------


@pytest.fixture
def engine():
    with Sam3.from_pretrained("demo", backend="cpu", num_threads=1) as model:
        yield model.engine


def test_a_device_that_computes_answers_the_canary(engine):
    canary = Canary(engine, is_demo=True)
    assert [canary.ask() for _ in range(2)] == [None, None]
    assert engine.stats()["image_cache"]["entries"] == 0
    assert tuple(picture()[CENTRE[1], CENTRE[0]]) == (220, 30, 30)


@pytest.mark.parametrize("others", [1, 2, 3])
def test_phrases_that_were_asked_together_do_not_change_the_canarys_answer(
    engine, monkeypatch, others
):
    """A phrase encoded among others has other last bits: the canary must not find it in the cache."""
    canary = Canary(engine, is_demo=True)
    assert canary.ask() is None
    real, asked = engine.backend.encode_text, []

    def encode_text(phrases):
        asked.append(list(phrases))
        texts = real(phrases)
        return [text if len(phrases) == 1 else _nudged(text) for text in texts]

    monkeypatch.setattr(engine.backend, "encode_text", encode_text)
    phrases = ["red circle", "blue star", "green square", "dog"][: others + 1]
    request = Request(ImageSource.of(picture()), tuple(map(Prompt, phrases)))
    assert engine.ground([request])[0].error is None
    assert canary.ask() is None
    assert asked == [phrases, ["red circle"]]
    assert engine.ground([request])[0].error is None
    assert asked == [phrases, ["red circle"]], "the canary's own is not kept"


def _nudged(text):
    """As a run of more phrases may round."""
    return replace(text, tokens=text.tokens * 1.001)


@pytest.mark.parametrize(
    ("garble", "fault"),
    [
        (lambda g: {"logits": np.full_like(g.logits, np.nan)}, "no instance"),
        (lambda g: {"boxes_cxcywh": np.full_like(g.boxes_cxcywh, np.nan)}, "not finite"),
        (lambda g: {"logits": np.full_like(g.logits, -1e9)}, "zeros"),
        (lambda g: {"boxes_cxcywh": g.boxes_cxcywh * np.float32(0.8)}, "the circle is at"),
        (lambda g: {"presence_logits": g.presence_logits * np.float32(0.99)}, "another answer"),
    ],
    ids=["nan", "nan boxes", "zeros", "wrong boxes", "other scores"],
)
def test_garbage_is_found(engine, monkeypatch, garble, fault):
    canary = Canary(engine, is_demo=True)
    assert canary.ask() is None
    real = engine.backend.ground

    def ground(image, text):
        grounding = real(image, text)
        return replace(grounding, **garble(grounding))

    monkeypatch.setattr(engine.backend, "ground", ground)
    verdict = canary.ask()
    assert verdict is not None
    assert fault in verdict
    watch = DeviceWatch(60.0)
    watch.canary(verdict)
    with pytest.raises(RuntimeError, match="canary"):
        watch.check()
    watch.canary(None)
    watch.check()


def test_without_a_known_answer_the_first_one_counts(engine, monkeypatch):
    canary = Canary(engine, is_demo=False)
    assert canary.ask() is None
    real = engine.backend.ground
    monkeypatch.setattr(
        engine.backend,
        "ground",
        lambda i, t: replace(real(i, t), presence_logits=real(i, t).presence_logits * 0.99),
    )
    assert "another answer" in canary.ask()


# -- quarantine ------------------------------------------------------------------------------------


def test_two_dead_replicas_are_too_many_and_one_is_not():
    quarantine = Quarantine()
    for _ in range(5):
        quarantine.died("a", "first")  # five requests for it on one replica
    quarantine.check("a")
    quarantine.died("b", "first")
    quarantine.answered("b")
    quarantine.died("b", "second")
    quarantine.check("b")
    quarantine.died("a", "second")
    with pytest.raises(ProblemError, match=r"image-refused \(422\)"):
        quarantine.check("a")
    quarantine.answered("a")  # of a request that was under way
    assert quarantine.refused == ["a"]


def test_suspects_take_turns_and_others_do_not_wait():
    async def run() -> None:
        quarantine = Quarantine()
        for digest in "ab":
            quarantine.died(digest, "first")
        async with quarantine.watch("a"):
            second = asyncio.create_task(quarantine.watch("b").__aenter__())
            async with asyncio.timeout(30), quarantine.watch("c"):
                await asyncio.sleep(0)
            assert not second.done()
            quarantine.answered("a")
        async with asyncio.timeout(30):
            await second

    asyncio.run(run())
