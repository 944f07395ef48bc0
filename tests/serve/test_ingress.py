"""What the ingress knows of its replicas, with a handle that says what a test wants."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from sam3_ray.serve import ingress as module


class Handle:
    """Answers a broadcast with these infos; None does not answer in time."""

    def __init__(self, infos):
        self.infos, self.asked = infos, 0

    def broadcast(self, method):
        self.asked += 1
        return self

    async def results_async(self, **_):
        if self.infos is None:
            raise TimeoutError
        return self.infos


@pytest.fixture
def ingress(monkeypatch):
    """One that is asked for a time that stands still; ``running``: what Serve says."""
    found = object.__new__(module.Ingress)
    found.now, found.running = 100.0, 0
    monkeypatch.setattr(module.time, "monotonic", lambda: found.now)
    monkeypatch.setattr(module, "_running_replicas", lambda application: found.running)
    context = SimpleNamespace(app_name="sam3")
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    found._last_infos, found._ready, found._ready_until = [], False, 0.0
    found._asking_ready = asyncio.Lock()
    return found


def info(parked):
    return {"place": "here/chip0", "parked": parked}


@pytest.mark.parametrize(
    ("infos", "running", "ready"),
    [
        ([info(None)], 0, True),
        ([info("by hand"), info(None)], 0, True),
        ([info("by hand"), info("does not open")], 2, False),
        ([], 0, False),
        ([], 1, True),
        (None, 0, False),
        (None, 1, True),
        ([RuntimeError("it died")], 0, False),
    ],
)
def test_ready_is_a_replica_that_is_not_parked(ingress, infos, running, ready):
    ingress._replicas, ingress.running = Handle(infos), running
    assert asyncio.run(ingress.ready()) is ready


def test_replicas_that_were_ready_and_are_gone_are_not(ingress):
    ingress._replicas = Handle([info(None)])
    assert asyncio.run(ingress.ready())
    ingress._replicas.infos = None
    ingress.now += module.READY_FOR_S
    assert not asyncio.run(ingress.ready())


def test_many_who_ask_at_once_are_one_question(ingress):
    ingress._replicas = Handle([info(None)])

    async def ask():
        return await asyncio.gather(*(ingress.ready() for _ in range(20)))

    assert asyncio.run(ask()) == [True] * 20
    assert ingress._replicas.asked == 1
    ingress.now += module.READY_FOR_S
    assert asyncio.run(ask()) == [True] * 20
    assert ingress._replicas.asked == 2


ACTOR = b"\x01" * 16


@pytest.mark.parametrize(
    ("states", "died"),
    [(["DEAD"], True), (["ALIVE", "ALIVE", "DEAD"], True), (["ALIVE", "RESTARTING"], False)],
)
def test_ray_says_whether_a_lost_replica_is_dead(monkeypatch, states, died):
    """It is asked until it says so, for ``DEATH_KNOWN_S`` at most."""
    monkeypatch.setattr(module, "DEATH_KNOWN_S", 2.0 if died else 0.0)
    told = iter(states)
    asked = []

    def actors(actor_id):
        asked.append(actor_id)
        return {"State": next(told)}

    monkeypatch.setattr(module, "actors", actors)
    lost = ActorUnavailableError("the connection ended", ACTOR)
    assert asyncio.run(module._has_died(lost)) is died
    assert set(asked) == {ACTOR.hex()}


def test_a_death_that_ray_tells_is_one(monkeypatch):
    monkeypatch.setattr(module, "actors", None)
    assert asyncio.run(module._has_died(ActorDiedError()))
