"""The trial of ETH dispatch: commands that fail in every way, and the real one on an emulated p150."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sam3_ray.backends.blackhole.dispatch import choose_dispatch, eth_state
from sam3_ray.backends.blackhole.enable import enable_eth
from sam3_ray.backends.blackhole.overlay import (
    RUNTIME_ROOT,
    UnknownTtnnFilesError,
    overlay_root,
    tree_key,
)
from sam3_ray.backends.blackhole.trial import run_trial
from tests.blackhole.stock_root import (
    LINKER_SCRIPT,
    make_stock_root,
    patch_linker_script,
    without_a_machine,
)
from tests.emulation.mock import prepare

ROOT = Path(__file__).resolve().parents[2]
BOARD = "p150a"
TIMEOUT = 120


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def saying(report: object) -> tuple[str, ...]:
    return python(f"print({json.dumps(report)!r})")


PASSED = {"passed": True, "reason": "right", "grid": [12, 10]}

FAILING: dict[str, tuple[tuple[str, ...], str]] = {
    "signal": (python("import os; os.kill(os.getpid(), 11)"), "died by SIGSEGV"),
    "abort": (python("import os; os.abort()"), "died by SIGABRT"),
    "exit code": (python("import sys; sys.exit('no hugepages')"), "exit code 1: no hugepages"),
    "exit code after a pass": (
        python(f"import sys; print({json.dumps(PASSED)!r}); sys.exit(3)"),
        "exit code 3",
    ),
    "nothing": (python(""), "not one JSON object"),
    "rubbish": (python("print('grid 12x10, all well')"), "not one JSON object.*all well"),
    "rubbish around": (python(f"print('log'); print({json.dumps(PASSED)!r})"), "not one JSON"),
    "bytes": (python("import sys; sys.stdout.buffer.write(bytes(range(256)))"), "not one JSON"),
    "a list": (saying([True]), "not one JSON object"),
    "no grid": (saying(PASSED | {"grid": None}), "no grid"),
    "a grid of words": (saying(PASSED | {"grid": ["x", "y"]}), "not one JSON object"),
    "wrong values": (
        saying({"passed": False, "reason": "3 of 9 values differ", "grid": [12, 10]}),
        "3 of 9 values differ",
    ),
    "passed is a word": (saying(PASSED | {"passed": "yes"}), "right"),
}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    without_a_machine(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def stock(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = make_stock_root(tmp_path / "stock")
    monkeypatch.setenv(RUNTIME_ROOT, str(root))
    return root


# -- commands in place of the real one -------------------------------------------------------------


@pytest.mark.parametrize("kind", FAILING)
def test_what_fails_leaves_worker(kind: str, stock: Path) -> None:
    command, reason = FAILING[kind]
    answer = enable_eth(BOARD, command=command, timeout_s=60)
    assert not answer.passed
    with pytest.warns(RuntimeWarning, match=f"(?s){reason}.*sam3-ray chips enable-eth"):
        assert choose_dispatch("auto", board=BOARD).mode == "worker"


def test_a_hang_ends_with_its_children(stock: Path, tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    sleeper = "import time; time.sleep(600)"
    code = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {sleeper!r}])\n"
        f"open({str(noted)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)"
    )
    began = time.monotonic()
    answer = enable_eth(BOARD, command=python(code), timeout_s=3)
    assert time.monotonic() - began < 60
    assert not answer.passed
    assert "no answer within 3 s" in answer.reason
    for pid in map(int, noted.read_text().split()):
        assert not is_running(pid)
    with pytest.warns(RuntimeWarning, match="no answer within 3 s"):
        assert choose_dispatch("auto", board=BOARD).mode == "worker"


def is_running(pid: int) -> bool:
    """Whether a process still runs, 10 s after it was killed at the latest."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state in "ZX":  # dead, and nobody has asked
            return False
        time.sleep(0.05)
    return True


def test_what_passes_is_used_and_a_later_failure_holds(stock: Path) -> None:
    answer = enable_eth(BOARD, command=saying(PASSED))
    assert (answer.passed, answer.grid, answer.board) == (True, (12, 10), BOARD)
    chosen = choose_dispatch("auto", board=BOARD)
    assert (chosen.mode, chosen.root) == ("eth", overlay_root(stock))
    enable_eth(BOARD, command=FAILING["signal"][0])
    with pytest.warns(RuntimeWarning, match="SIGSEGV"):
        assert choose_dispatch("auto", board=BOARD).mode == "worker"


def test_the_trial_runs_on_the_overlay_and_on_one_chip(stock: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    code = (
        "import json, os\n"
        f"json.dump(dict(os.environ), open({str(seen)!r}, 'w'))\n"
        f"print({json.dumps(PASSED)!r})"
    )
    before = dict(os.environ)
    enable_eth(BOARD, environment={"TT_VISIBLE_DEVICES": "2"}, command=python(code))
    assert dict(os.environ) == before
    environment = json.loads(seen.read_text())
    assert environment[RUNTIME_ROOT] == str(overlay_root(stock))
    assert environment["TT_VISIBLE_DEVICES"] == "2"


def test_a_patched_tree_is_tried_itself(stock: Path, cache: Path) -> None:
    patch_linker_script(stock)
    answer = enable_eth(BOARD, command=FAILING["signal"][0])
    assert answer.tree == tree_key(stock)
    assert not list((cache / "eth-dispatch").glob("ttnn-*"))
    with pytest.warns(RuntimeWarning, match="SIGSEGV"):
        assert choose_dispatch("auto", board=BOARD).mode == "worker"


def test_from_a_process_that_uses_the_overlay(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enable_eth(BOARD, command=saying(PASSED))
    root = overlay_root(stock)
    monkeypatch.setenv(RUNTIME_ROOT, str(root))
    answer = enable_eth(BOARD, command=FAILING["signal"][0])
    assert answer.tree == tree_key(root)
    assert not eth_state(BOARD).usable


def test_unknown_files_are_not_tried(stock: Path, cache: Path, tmp_path: Path) -> None:
    (stock / LINKER_SCRIPT).write_text("another")
    started = tmp_path / "started"
    with pytest.raises(UnknownTtnnFilesError):
        enable_eth(BOARD, command=python(f"open({str(started)!r}, 'w')"))
    assert not started.exists()
    assert not cache.exists()


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        run_trial({}, command=("/nowhere/python",))


# -- on an emulated p150: what ttnn accepts, and values of the emulation -----------------------------


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a mock p150 with the stock data files."""
    folder = tmp_path_factory.mktemp("machine")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TT_")}
    return {
        **kept,
        **prepare(folder / "mock", chips=1, dispatch="worker"),
        "SAM3_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def on_machine(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This process's environment is the machine's."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in machine.items():
        monkeypatch.setenv(name, value)
    return machine


def answered(code: str, machine: dict[str, str], folder: Path) -> Sequence[str]:
    """The lines that a Python process prints which start with ``=``."""
    done = subprocess.run(
        python(code),
        env=machine,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("=")]


def test_the_stock_wheel_cannot_open_it_and_auto_falls_back(
    machine: dict[str, str], tmp_path: Path
) -> None:
    code = """
import warnings
from sam3_ray.backends.blackhole.device import device_open_kwargs, open_arguments
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    arguments = device_open_kwargs()
print("=", *[f"{w.category.__name__}: {w.message}" for w in warned if "ETH" in str(w.message)])
import ttnn
device = ttnn.open_device(**arguments)
size = device.compute_with_storage_grid_size()
print("=", size.x, size.y)
ttnn.close_device(device)
try:
    ttnn.open_device(**open_arguments(0, "eth"))
except RuntimeError as error:
    print("=", str(error).splitlines()[0])
"""
    warning, grid, error = answered(code, machine, tmp_path)
    assert warning.startswith("RuntimeWarning: ")
    assert "sam3-ray chips enable-eth" in warning
    assert grid == "11 10"
    assert error == "No core coordinate found at location: (0, 12, ETH, LOGICAL)"


TRIAL_WITH_VALUES = """
from tests.emulation import worker_setup
worker_setup()
from sam3_ray.backends.blackhole import trial
"""


def test_the_trial_passes(on_machine: dict[str, str]) -> None:
    answer = enable_eth(
        "mock", command=python(TRIAL_WITH_VALUES + "raise SystemExit(trial.main())")
    )
    assert answer.passed, answer.reason
    assert answer.grid == (12, 10)
    assert "12x10" in answer.reason


def test_with_the_overlay_auto_places_work_on_every_core(
    on_machine: dict[str, str], tmp_path: Path
) -> None:
    enable_eth("mock", command=saying(PASSED))
    code = """
import os, torch
from sam3_ray.backends.blackhole.device import device_open_kwargs
arguments = device_open_kwargs()
print("=", os.environ["TT_METAL_RUNTIME_ROOT"])
import ttnn
device = ttnn.open_device(**arguments)
size = device.compute_with_storage_grid_size()
print("=", size.x, size.y)
def upload(kind, *shape):
    return ttnn.from_torch(torch.zeros(shape), dtype=kind, layout=ttnn.TILE_LAYOUT, device=device)
def linear(columns):  # 8 tiles wide for each column of cores, so that none is left out
    config = ttnn.MatmulMultiCoreReuseMultiCastProgramConfig(
        compute_with_storage_grid_size=(columns, 10), in0_block_w=4, out_subblock_h=1,
        out_subblock_w=8, per_core_M=17, per_core_N=8, transpose_mcast=False,
        fused_activation=None,
    )
    return ttnn.linear(
        upload(ttnn.bfloat16, 1, 1, 5184, 1024), upload(ttnn.bfloat8_b, 1024, columns * 256),
        program_config=config,
    )
def attention(columns):
    heads = upload(ttnn.bfloat16, 9, 16, 576, 64)
    config = ttnn.SDPAProgramConfig(
        compute_with_storage_grid_size=(columns, 10), q_chunk_size=288, k_chunk_size=288
    )
    return ttnn.transformer.scaled_dot_product_attention(
        heads, heads, heads, is_causal=False, program_config=config
    )
for operation in (linear, attention):
    print("=", tuple(operation(12).shape))
    try:
        operation(13)
        print("= 13 columns")
    except RuntimeError:
        print("= refused")
ttnn.close_device(device)
"""
    root, grid, linear, past_linear, attention, past_attention = answered(
        code, on_machine, tmp_path
    )
    assert root == str(overlay_root(Path(on_machine[RUNTIME_ROOT])))
    assert grid == "12 10"
    assert linear == "(1, 1, 5184, 3072)"
    assert attention == "(9, 16, 576, 64)"
    assert (past_linear, past_attention) == ("refused", "refused")  # so 12 was looked at


def test_the_model_takes_what_the_trial_allows(on_machine: dict[str, str], tmp_path: Path) -> None:
    """All of a model, opened with nothing said about dispatch, on 12x10 cores, answers as the CPU does."""
    enable_eth("mock", command=saying(PASSED))
    code = """
import warnings
warnings.simplefilter("error", RuntimeWarning)
from tests.emulation import worker_setup
worker_setup()
from sam3_ray import Sam3
from tests.demo_scenes import scenes
scene = next(iter(scenes(1)))
phrase = scene.phrases[0][0]
with Sam3.from_pretrained("demo", backend="blackhole", warmup=0, image_cache_bytes=0) as chip:
    print("=", chip.info["dispatch"], chip.info["grid"])
    ours = chip(scene.image, phrase)
with Sam3.from_pretrained("demo", backend="cpu") as cpu:
    theirs = cpu(scene.image, phrase)
print("=", len(ours), len(theirs), max(abs(ours.scores - theirs.scores), default=0.0) < 0.03)
"""
    place, answers = answered(code, on_machine, tmp_path)
    assert place == "eth [12, 10]"
    found, expected, close = answers.split()
    assert found == expected != "0"
    assert close == "True"


def test_the_trial_sees_one_wrong_value(on_machine: dict[str, str]) -> None:
    spoil = """
import ttnn
right = ttnn.to_torch
def wrong(tensor, *arguments, **options):
    values = right(tensor, *arguments, **options).clone()
    values[0, 0, 319, 383] += 1
    return values
ttnn.to_torch = wrong
raise SystemExit(trial.main())
"""
    answer = enable_eth("mock", command=python(TRIAL_WITH_VALUES + spoil))
    assert not answer.passed
    assert answer.grid == (12, 10)
    assert "replay 1: 1 of 122880 values differ" in answer.reason
