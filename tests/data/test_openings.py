"""Actors that cannot open their model, as threads; tests/data/test_run.py has them on Ray."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sam3_ray.data import openings
from sam3_ray.data.openings import NothingOpensError, Openings, told
from tests.data.simulated import wait_for


def broken() -> str:
    raise OSError("no answer")


def test_one_that_fails_stays_until_the_run_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = Openings(folder, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.open, broken)
        wait_for(lambda: len(told(folder)) == 1)
        assert run.open(lambda: "a model") == "a model"
        assert not waiting.done()
        [reason] = told(folder)
        assert reason.endswith("OSError: no answer")
        shutil.rmtree(folder)  # as the end of a run does
        with pytest.raises(OSError, match="no answer"):
            waiting.result(60)


def test_all_that_fail_say_so_together(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        for failing in [pool.submit(Openings(tmp_path, 3).open, broken) for _ in range(3)]:
            with pytest.raises(NothingOpensError, match=r"(no answer.*){3}"):
                failing.result(60)


def test_others_that_never_come_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openings, "OTHERS_OPEN_S", 0.0)
    with pytest.raises(NothingOpensError, match="no answer"):
        Openings(tmp_path, 2).open(broken)


def test_one_alone_raises_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no answer"):
        Openings(tmp_path, 1).open(broken)
    assert told(tmp_path) == ()
