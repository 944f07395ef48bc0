"""``sam3-ray chips`` on fake machines: what it lists, and how it tries ETH dispatch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sam3_ray import chips
from sam3_ray.backends.blackhole.enable import enable_eth
from sam3_ray.backends.blackhole.overlay import RUNTIME_ROOT
from sam3_ray.cli import main
from sam3_ray.cli.doctor import examine
from tests.blackhole.stock_root import LINKER_SCRIPT, make_stock_root, without_a_machine
from tests.test_chips import make_chip

PASSED = {"passed": True, "reason": "right values", "grid": [12, 10]}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty machine with a stock ttnn; ``make_chip`` adds chips to it."""
    without_a_machine(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv(RUNTIME_ROOT, str(make_stock_root(tmp_path / "stock")))
    root = tmp_path / "machine"
    root.mkdir()
    real = chips.look
    monkeypatch.setattr(chips, "look", lambda folder=root: real(folder))
    # The Ray of other tests may run; replicas are listed in tests/serve/test_chips.py.
    monkeypatch.setattr("sam3_ray.cli.running.ray_runs_here", lambda: False)
    return root


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[object], Path]:
    """Put a command that gives a report in the trial's place; it notes the chip that it was given."""

    def replace(report: object) -> Path:
        seen = tmp_path / "seen"
        code = (
            "import os\n"
            f"open({str(seen)!r}, 'a').write(os.environ['TT_VISIBLE_DEVICES'] + ' ')\n"
            f"print({json.dumps(report)!r})"
        )
        stand_in = partial(enable_eth, command=(sys.executable, "-c", code))
        monkeypatch.setattr("sam3_ray.cli.chips.enable_eth", stand_in)
        return seen

    return replace


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["chips", "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["chips"]
    return found


def test_no_chip(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys) == []
    assert main(["chips"]) == 0
    assert "no Tenstorrent chip here" in capsys.readouterr().out
    assert main(["chips", "enable-eth"]) == 1
    assert "no chip here" in capsys.readouterr().err


def test_what_is_listed(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_chip(machine, 0, pci="0000:c1:00.0", card="p150a", pids=[])
    make_chip(machine, 1, pci="0000:01:00.0", card="p100a", pids=[4242])
    (machine / "proc/4242").mkdir()
    (machine / "proc/4242/comm").write_text("tt-smi\n")
    make_chip(machine, 2)
    found = {chip["index"]: chip for chip in listed(capsys)}
    assert sorted(found) == [0, 1, 2]
    for chip in found.values():
        assert chip["dispatch"] == "worker"
        assert chip["visible"] is True
    by_board = {chip["board"]: chip for chip in found.values()}
    assert by_board["p150a"]["pci_address"] == "0000:c1:00.0"
    assert by_board["p150a"]["grid"] == [11, 10]
    assert by_board["p150a"]["in_use_by"] == []
    assert "not been tried" in by_board["p150a"]["eth_dispatch"]
    assert by_board["p100a"]["grid"] is None
    assert by_board["p100a"]["in_use_by"] == [{"pid": 4242, "name": "tt-smi"}]
    assert by_board[None]["pci_address"] is None

    assert main(["chips"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "chip"
    of_p150 = next(line for line in lines if "0000:c1:00.0" in line)
    assert of_p150.split()[2:] == ["p150a", "11x10", "worker", "-"]
    of_p100 = next(line for line in lines if "0000:01:00.0" in line)
    assert of_p100.split()[2:] == ["p100a", "unknown", "worker", "tt-smi", "(pid", "4242)"]
    assert any("sam3-ray chips enable-eth" in line for line in lines)


def test_hidden_chips_are_marked(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        make_chip(machine, number, pci=f"0000:0{number}:00.0", card="p150a", pids=[])
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "1")
    assert [chip["visible"] for chip in listed(capsys)] == [False, True]
    assert main(["chips"]) == 0
    assert capsys.readouterr().out.count("hidden by TT_VISIBLE_DEVICES") == 1
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "5")
    assert main(["chips"]) == 1
    assert "TT_VISIBLE_DEVICES='5'" in capsys.readouterr().err


def test_enable_eth_on_a_free_chip_of_each_board(
    machine: Path, trial: Callable[[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    make_chip(machine, 0, pci="0000:00:00.0", card="p150a", pids=[4242])
    make_chip(machine, 1, pci="0000:01:00.0", card="p150a", pids=[])
    make_chip(machine, 2, pci="0000:02:00.0", card="p150b", pids=[])
    seen = trial(PASSED)
    assert main(["chips", "enable-eth"]) == 0
    shown = capsys.readouterr().out
    assert seen.read_text().split() == ["1", "2"]
    assert shown.count("passed: right values") == 2
    assert [(chip["dispatch"], chip["grid"]) for chip in listed(capsys)] == [("eth", [12, 10])] * 3
    assert dispatch_checks(machine) == {"dispatch on p150a": "ok", "dispatch on p150b": "ok"}


def test_a_trial_that_fails(
    machine: Path, trial: Callable[[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    make_chip(machine, 0, pci="0000:00:00.0", card="p150a", pids=[])
    assert dispatch_checks(machine) == {"dispatch": "warning"}
    trial({"passed": False, "reason": "9 of 10 values differ", "grid": [12, 10]})
    assert main(["chips", "enable-eth"]) == 1
    assert "failed: 9 of 10 values differ" in capsys.readouterr().out
    (chip,) = listed(capsys)
    assert (chip["dispatch"], chip["grid"]) == ("worker", [11, 10])
    assert "9 of 10 values differ" in chip["eth_dispatch"]
    assert dispatch_checks(machine) == {"dispatch": "warning"}


def test_enable_eth_as_json(
    machine: Path, trial: Callable[[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    make_chip(machine, 0, pci="0000:00:00.0", card="p150a", pids=[])
    trial(PASSED)
    assert main(["chips", "enable-eth", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["trials"]
    assert (answer["board"], answer["passed"], answer["grid"]) == ("p150a", True, [12, 10])


def test_a_busy_machine_is_not_tried(
    machine: Path, trial: Callable[[object], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    make_chip(machine, 0, pci="0000:00:00.0", card="p150a", pids=[4242])
    seen = trial(PASSED)
    assert main(["chips", "enable-eth"]) == 1
    assert "pid 4242" in capsys.readouterr().err
    assert not seen.exists()


def test_files_of_another_ttnn(
    machine: Path,
    tmp_path: Path,
    trial: Callable[[object], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_chip(machine, 0, pci="0000:00:00.0", card="p150a", pids=[])
    (tmp_path / "stock" / LINKER_SCRIPT).write_text("of another version")
    seen = trial(PASSED)
    assert main(["chips", "enable-eth"]) == 1
    assert LINKER_SCRIPT in capsys.readouterr().err
    assert not seen.exists()
    assert listed(capsys)[0]["dispatch"] == "worker"


@pytest.mark.parametrize("timeout", ["0", "-1", "inf", "nan", "long"])
def test_a_time_limit_that_is_none(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chips", "enable-eth", f"--timeout={timeout}"])
    assert ended.value.code == 2
    assert "--timeout" in capsys.readouterr().err


def dispatch_checks(machine: Path) -> dict[str, str]:
    """What ``sam3-ray doctor`` says of dispatch."""
    found = {}
    for check in examine(root=machine, port=0):
        if check.name.startswith("dispatch"):
            found[check.name] = check.status
            assert bool(check.todo) == (check.status != "ok")
        if check.name == "vocabulary":
            break  # the rest is not about chips
    return found
