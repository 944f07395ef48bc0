"""Which dispatch is chosen, and what is remembered of its trial. No device is opened here."""

from __future__ import annotations

import os
import shutil
import sys
import types
import warnings
from pathlib import Path

import pytest

from sam3_ray.backends.blackhole import dispatch as dispatch_module
from sam3_ray.backends.blackhole.device import device_open_kwargs
from sam3_ray.backends.blackhole.dispatch import (
    Dispatch,
    board_type,
    choose_dispatch,
    eth_state,
    known_grid,
    prepare_environment,
)
from sam3_ray.backends.blackhole.eth_answers import Answer, answer_file, recall, remember
from sam3_ray.backends.blackhole.overlay import (
    RUNTIME_ROOT,
    build_overlay,
    files_key,
    overlay_root,
    patched_files,
    tree_key,
    ttnn_version,
)
from tests.blackhole.stock_root import make_stock_root, patch_linker_script, without_a_machine

COMMAND = "sam3-ray chips enable-eth"
BOARD = "p150a"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    without_a_machine(monkeypatch, tmp_path / "cache")
    # Other tests of this process may have imported it.
    monkeypatch.delitem(sys.modules, "ttnn", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stock runtime root that is the one in use."""
    root = make_stock_root(tmp_path / "stock")
    monkeypatch.setenv(RUNTIME_ROOT, str(root))
    return root


def answer(root: Path, *, passed: bool, board: str = BOARD, reason: str = "seen") -> Answer:
    """An answer for the overlay of ``root``, remembered."""
    key = files_key(patched_files(root))
    given = Answer(str(ttnn_version()), key, board, passed, reason, (12, 10) if passed else None)
    remember(given)
    return given


def import_ttnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ttnn", types.ModuleType("ttnn"))


def quietly(choice: str, board: str | None = BOARD) -> Dispatch:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return choose_dispatch(choice, board=board)


# -- choosing --------------------------------------------------------------------------------------


def test_not_tried(stock: Path) -> None:
    with pytest.warns(RuntimeWarning, match=f"not been tried.*{BOARD}.*{COMMAND}") as warned:
        chosen = choose_dispatch("auto", board=BOARD)
    assert (chosen.mode, chosen.root) == ("worker", None)
    assert warned[0].filename == __file__  # the caller's line, not one of ours
    with pytest.raises(RuntimeError, match=f"not been tried.*{COMMAND}"):
        choose_dispatch("eth", board=BOARD)
    assert quietly("worker").mode == "worker"


def test_passed(stock: Path) -> None:
    answer(stock, passed=True)
    for choice in ("auto", "eth"):
        chosen = quietly(choice)
        assert (chosen.mode, chosen.root) == ("eth", overlay_root(stock))
    assert quietly("worker").mode == "worker"


def test_failed_holds_with_its_reason_until_tried_again(stock: Path) -> None:
    answer(stock, passed=False, reason="it died by SIGBUS")
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=f"SIGBUS.*{COMMAND}"):
            assert choose_dispatch("auto", board=BOARD).mode == "worker"
        with pytest.raises(RuntimeError, match=f"SIGBUS.*{COMMAND}"):
            choose_dispatch("eth", board=BOARD)
    answer(stock, passed=True)
    assert quietly("auto").mode == "eth"


def test_an_answer_is_for_one_board_one_ttnn_and_one_set_of_files(
    stock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(stock, passed=True)
    with pytest.warns(RuntimeWarning, match="p100a"):
        assert choose_dispatch("auto", board="p100a").mode == "worker"
    key = files_key(patched_files(stock))
    assert recall("0.81.1", "0" * 12, BOARD) is None
    assert recall("0.82.0", key, BOARD) is None
    found = recall(str(ttnn_version()), key, BOARD)
    assert found is not None
    assert (found.passed, found.grid, found.reason) == (True, (12, 10), "seen")
    assert found.tried_at.endswith("+00:00")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"passed": true}', '{"grid": [1]}'])
def test_an_answer_that_cannot_be_read_is_no_pass(stock: Path, text: str) -> None:
    given = answer(stock, passed=True)
    path = answer_file(given.ttnn, given.tree, given.board)
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match=f"{path.name} cannot be read.*{COMMAND}"):
        assert choose_dispatch("auto", board=BOARD).mode == "worker"


def test_a_board_name_cannot_leave_the_folder(cache: Path) -> None:
    path = answer_file("0.81.1", "0" * 12, "../../p150 a")
    assert path.parent == cache / "eth-dispatch/answers"


def test_unknown_files(stock: Path) -> None:
    script = stock / "runtime/hw/toolchain/blackhole/kernel_ierisc.ld"
    script.write_text(script.read_text() + "\n")
    with pytest.warns(RuntimeWarning, match=r"kernel_ierisc\.ld of ttnn"):
        assert choose_dispatch("auto", board=BOARD).mode == "worker"
    with pytest.raises(RuntimeError, match=r"kernel_ierisc\.ld of ttnn"):
        choose_dispatch("eth", board=BOARD)


def test_a_patched_tree_is_taken_at_its_word_unless_its_trial_failed(stock: Path) -> None:
    patch_linker_script(stock)
    chosen = quietly("auto")
    assert (chosen.mode, chosen.root) == ("eth", None)
    assert str(stock) in chosen.why
    remember(Answer(str(ttnn_version()), tree_key(stock), BOARD, False, "it hung"))
    with pytest.warns(RuntimeWarning, match="it hung"):
        assert choose_dispatch("auto", board=BOARD).mode == "worker"


def test_without_a_chip() -> None:
    with pytest.warns(RuntimeWarning, match="there is no chip"):
        assert choose_dispatch("auto", board=None).mode == "worker"
    with pytest.raises(RuntimeError, match="there is no chip"):
        choose_dispatch("eth", board=None)


def test_without_ttnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "ttnn_version", lambda: None)
    with pytest.warns(RuntimeWarning, match="ttnn is not installed"):
        assert choose_dispatch("auto", board=BOARD).mode == "worker"
    with pytest.raises(ImportError, match=r"sam3-ray\[blackhole\]"):
        choose_dispatch("eth", board=BOARD)


def test_an_unknown_choice() -> None:
    with pytest.raises(ValueError, match="'ethernet'"):
        choose_dispatch("ethernet", board=BOARD)


def test_an_emulated_board_has_its_own_answers(
    stock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TT_METAL_MOCK_CLUSTER_DESC_PATH", "/a/cluster.yaml")
    assert board_type() == "mock"
    answer(stock, passed=True, board="mock")
    assert eth_state("mock").usable
    assert not eth_state(BOARD).usable


@pytest.mark.parametrize(
    ("board", "worker", "eth"),
    [
        ("p150a", (11, 10), (12, 10)),
        ("p150b", (11, 10), (12, 10)),
        ("n300", None, None),
        (None, None, None),
    ],
)
def test_known_grids(
    board: str | None, worker: tuple[int, int] | None, eth: tuple[int, int] | None
) -> None:
    assert known_grid(board, "worker") == worker
    assert known_grid(board, "eth") == eth


def test_a_trial_tells_the_grid_of_any_board() -> None:
    seen = Answer("0.81.1", "0" * 12, "p300c", True, "seen", (13, 10))
    assert known_grid("p300c", "eth", seen) == (13, 10)
    assert known_grid("p300c", "worker", seen) is None


# -- the environment -------------------------------------------------------------------------------


def root_in_use() -> str | None:
    return os.environ.get(RUNTIME_ROOT)


def test_the_overlay_is_made_and_used(stock: Path) -> None:
    answer(stock, passed=True)
    assert not overlay_root(stock).exists()
    expected = str(overlay_root(stock))
    for _ in range(2):  # in this process again, and as a child inherits it
        assert prepare_environment("auto", board=BOARD).mode == "eth"
        assert root_in_use() == expected
    assert tree_key(Path(expected)) == files_key(patched_files(stock))


def test_worker_leaves_the_environment_alone(stock: Path) -> None:
    prepare_environment("worker", board=BOARD)
    assert root_in_use() == str(stock)


def test_worker_leaves_an_overlay(stock: Path) -> None:
    """On an overlay the stock dispatch counts its own column of cores as compute cores."""
    answer(stock, passed=True)
    prepare_environment("eth", board=BOARD)
    assert prepare_environment("worker", board=BOARD).mode == "worker"
    assert root_in_use() == str(stock)


def test_worker_leaves_an_overlay_of_the_installed_ttnn(monkeypatch: pytest.MonkeyPatch) -> None:
    source = dispatch_module.default_root()
    answer(source, passed=True)
    prepare_environment("eth", board=BOARD)
    assert root_in_use() is not None
    prepare_environment("worker", board=BOARD)
    assert root_in_use() is None


def test_an_inherited_overlay_is_no_pass_for_another_board(stock: Path) -> None:
    answer(stock, passed=True)
    prepare_environment("eth", board=BOARD)
    with pytest.raises(RuntimeError, match=r"not been tried.*p100a"):
        choose_dispatch("eth", board="p100a")
    with pytest.warns(RuntimeWarning, match=r"not been tried.*p100a"):
        assert prepare_environment("auto", board="p100a").mode == "worker"
    assert root_in_use() == str(stock)


def test_ttnn_imported_too_early(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(stock, passed=True)
    import_ttnn(monkeypatch)
    with pytest.warns(RuntimeWarning, match=f"imported before {RUNTIME_ROOT}"):
        assert prepare_environment("auto", board=BOARD).mode == "worker"
    with pytest.raises(RuntimeError, match=f"imported before {RUNTIME_ROOT}"):
        prepare_environment("eth", board=BOARD)
    assert root_in_use() == str(stock)


def test_ttnn_imported_from_the_overlay(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(stock, passed=True)
    prepare_environment("eth", board=BOARD)
    used = root_in_use()
    import_ttnn(monkeypatch)
    assert prepare_environment("auto", board=BOARD).mode == "eth"
    with pytest.raises(RuntimeError, match="its own dispatch cores"):
        prepare_environment("worker", board=BOARD)
    assert root_in_use() == used


def test_an_overlay_that_cannot_be_made(stock: Path, cache: Path) -> None:
    answer(stock, passed=True)
    overlay_root(stock).write_text("a file is in its place")
    with pytest.warns(RuntimeWarning, match="cannot be made"):
        assert prepare_environment("auto", board=BOARD).mode == "worker"
    with pytest.raises(RuntimeError, match="cannot be made"):
        prepare_environment("eth", board=BOARD)
    assert root_in_use() == str(stock)


def test_an_overlay_of_a_removed_ttnn(
    stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "overlay"
    build_overlay(stock, root)
    shutil.rmtree(root)
    monkeypatch.setenv(RUNTIME_ROOT, str(root))
    with pytest.warns(RuntimeWarning, match=rf"is {RUNTIME_ROOT} right"):
        assert prepare_environment("auto", board=BOARD).mode == "worker"


def test_open_arguments_of_auto_are_those_of_worker_until_eth_passed(
    stock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(RuntimeWarning, match="ETH dispatch"):
        assert device_open_kwargs() == device_open_kwargs(0, "worker")
    with pytest.raises(RuntimeError, match="no chip"):
        device_open_kwargs(0, "eth")
    monkeypatch.setenv("TT_METAL_MOCK_CLUSTER_DESC_PATH", "/a/cluster.yaml")
    with pytest.raises(RuntimeError, match=COMMAND):
        device_open_kwargs(0, "eth")
