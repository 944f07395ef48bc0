"""How many actors a machine has room for, and what a batch of theirs is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sam3_ray.data import machine
from sam3_ray.data.machine import NoSuchChipsError, plan_actors

GIB = 1 << 30


@pytest.fixture
def of(monkeypatch: pytest.MonkeyPatch):
    def set_up(cpus: float, chips: int = 0, memory: int = 64 * GIB) -> None:
        monkeypatch.setattr(machine, "_resources", lambda: (cpus, chips))
        memory_here = SimpleNamespace(available=memory)
        monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory_here)

    return set_up


@pytest.mark.parametrize(
    ("cpus", "memory", "checkpoint_bytes", "size", "threads", "batch_size"),
    [
        (2.0, 64 * GIB, 12_000_000, 2, 1, 16),  # the demo: an actor a CPU
        (32.0, 64 * GIB, 12_000_000, 32, 1, 16),
        (32.0, 64 * GIB, 3_450_000_000, 7, 4, 4),  # 9 GiB each
        (2.0, 4 * GIB, 3_450_000_000, 1, 2, 4),  # too little for one: it tries
    ],
)
def test_on_the_cpu_memory_and_cpus_decide(
    of, tmp_path: Path, cpus, memory, checkpoint_bytes, size, threads, batch_size
) -> None:
    of(cpus, memory=memory)
    file = tmp_path / "weights.pt"
    with file.open("wb") as sparse:
        sparse.truncate(checkpoint_bytes)
    actors = plan_actors(checkpoint_path=file)
    assert (actors.backend, actors.size, actors.num_threads) == ("cpu", size, threads)
    assert actors.batch_size == batch_size
    assert actors.size * actors.num_cpus <= cpus - 1, "a CPU is left to the tasks that read"
    assert actors.resources == {}


def test_on_chips_there_is_one_actor_a_chip(of) -> None:
    of(32.0, chips=4)
    actors = plan_actors()
    assert (actors.backend, actors.size, actors.num_threads) == ("blackhole", 4, 1)
    assert (actors.num_cpus, actors.resources) == (1.0, {"TTNPU": 1.0})
    assert actors.batch_size == 16
    assert plan_actors(size=2).size == 2
    with pytest.raises(NoSuchChipsError, match="5 chips are asked for, and 4 are here"):
        plan_actors("blackhole", size=5)
    assert plan_actors("cpu", size=1, repo_id="demo").backend == "cpu"
