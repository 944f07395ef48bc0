"""Which cores dispatch work on a chip: a column of Tensix cores, or the Ethernet cores.

``worker``, the stock dispatch, costs a p150 one of its 12 columns (11x10 cores are left); ``eth`` leaves all
(12x10) and needs data files that are patched for it (``overlay.py``) and that were tried on this type of
board (``enable.py``). What is decided here takes effect when ttnn is imported.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from sam3_ray import chips
from sam3_ray.backends.blackhole.eth_answers import Answer, recall
from sam3_ray.backends.blackhole.overlay import (
    RUNTIME_ROOT,
    UnknownTtnnFilesError,
    build_overlay,
    default_root,
    eth_folder,
    files_key,
    has_eth_patch,
    overlay_root,
    overlay_source,
    patched_files,
    runtime_root,
    tree_key,
    ttnn_version,
)

Mode = Literal["eth", "worker"]
Choice = Literal["auto", "eth", "worker"]

COMMAND = "sam3-ray chips enable-eth"
"""What tries ETH dispatch, and remembers the answer."""

MOCK_BOARD = "mock"
"""Board type of an emulated cluster: what was seen there says nothing of a real board."""

_GRIDS: dict[str, dict[Mode, tuple[int, int]]] = {"p150": {"worker": (11, 10), "eth": (12, 10)}}
"""Compute grids (columns, rows) by the start of the board's name: 140 cores, two columns harvested
(tt_metal/core_descriptors/blackhole_140_arch*.yaml). Other boards: not known here."""

_PACKAGE = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Dispatch:
    """What was decided.

    Attributes:
        mode: ``eth`` or ``worker``.
        root: what TT_METAL_RUNTIME_ROOT must be when ttnn is imported; None leaves it as it is.
        why: in a sentence.
    """

    mode: Mode
    root: Path | None
    why: str


@dataclass(frozen=True)
class EthState:
    """What is known of ETH dispatch with this ttnn on one type of board.

    Attributes:
        usable: whether ``auto`` takes it.
        root: the overlay that it needs; None where the runtime root in use is patched itself.
        why: in a sentence.
        answer: what the trial found; None where there was none.
    """

    usable: bool
    root: Path | None
    why: str
    answer: Answer | None = None


def board_type(device_id: int = 0) -> str | None:
    """The type of a chip's board, such as ``p150a``; ``unknown`` where the driver does not tell it, None
    where there is no such chip. No chip is opened.

    Args:
        device_id: position among the chips that TT_VISIBLE_DEVICES leaves.

    Raises:
        ValueError: TT_VISIBLE_DEVICES names a chip that is not here.
    """
    if os.environ.get(chips.MOCK_CLUSTER):
        return MOCK_BOARD
    visible = chips.look().visible()
    return (visible[device_id].card or "unknown") if device_id < len(visible) else None


def known_grid(
    board: str | None, mode: Mode, answer: Answer | None = None
) -> tuple[int, int] | None:
    """The compute grid (columns, rows) that a board has: what its trial saw, else what is known of the board,
    else None."""
    if mode == "eth" and answer is not None and answer.passed and answer.grid is not None:
        return answer.grid
    for name, grids in _GRIDS.items():
        if board is not None and board.lower().startswith(name):
            return grids[mode]
    return None


def eth_state(board: str | None) -> EthState:
    """What is known of ETH dispatch on ``board`` (:func:`board_type`), without trying or importing anything.

    A runtime root that is patched itself is taken at its word, unless a trial of it failed: who set
    TT_METAL_RUNTIME_ROOT to such a tree, or built ttnn in one, wants it.
    """
    version = ttnn_version()
    if version is None:
        return EthState(False, None, "ttnn is not installed")
    if board is None:
        return EthState(False, None, "there is no chip")
    current = runtime_root()
    if has_eth_patch(current):
        root, tree = None, tree_key(current)
    else:
        try:
            tree, root = files_key(patched_files(current)), overlay_root(current)
        except UnknownTtnnFilesError as error:
            return EthState(False, None, str(error))
    answer = recall(version, tree, board)
    where = f"ttnn {version} on {board}"
    if answer is None:
        # An overlay of ours may be inherited from a process that works on another type of board.
        if root is None and current.parent != eth_folder():
            return EthState(True, None, f"{current} is patched for it")
        return EthState(False, root, f"it has not been tried with {where}")
    if not answer.passed:
        return EthState(False, root, f"it failed with {where}: {answer.reason}", answer)
    return EthState(True, root, f"its trial passed with {where} ({answer.tried_at})", answer)


def choose_dispatch(dispatch: str = "auto", *, board: str | None) -> Dispatch:
    """Decide, and change nothing.

    Args:
        dispatch: ``worker``: the stock dispatch. ``eth``: ETH dispatch, or an error. ``auto``: ETH dispatch
            where it is known to work, else the stock one with a RuntimeWarning.
        board: type of the chip's board (:func:`board_type`); None where there is no chip.

    Raises:
        ValueError: ``dispatch`` is unknown.
        ImportError: ``eth`` without ttnn installed.
        RuntimeError: ``eth`` where there is no chip, or where it is not known to work.
    """
    if dispatch not in get_args(Choice):
        raise ValueError(f"dispatch must be one of {get_args(Choice)}, got {dispatch!r}")
    if dispatch == "worker":
        return Dispatch("worker", None, "asked for")
    state = eth_state(board)
    if state.usable:
        return Dispatch("eth", state.root, state.why)
    if dispatch == "auto":
        return _fall_back(f"{state.why}. `{COMMAND}` tries it")
    if ttnn_version() is None:
        raise ImportError(
            "dispatch='eth' needs ttnn, which is not installed: pip install 'sam3-ray[blackhole]'"
        )
    if board is None:
        raise RuntimeError(
            "dispatch='eth': there is no chip on this machine; `sam3-ray doctor` tells what is here "
            f"({chips.VISIBLE_DEVICES}={os.environ.get(chips.VISIBLE_DEVICES, '')!r})"
        )
    raise RuntimeError(f"dispatch='eth' cannot be used: {state.why}. `{COMMAND}` tries it")


def prepare_environment(dispatch: str = "auto", *, board: str | None) -> Dispatch:
    """Decide as :func:`choose_dispatch` does, and set TT_METAL_RUNTIME_ROOT for it, completing the overlay
    where its links need it. Call it before ttnn is imported.

    Raises:
        ValueError, ImportError, RuntimeError: as :func:`choose_dispatch`; RuntimeError also where ``eth``
            comes too late, because ttnn is imported already, or its overlay cannot be written; and where the
            stock dispatch is to be used by a process whose ttnn runs from an overlay.
    """
    chosen = choose_dispatch(dispatch, board=board)
    if chosen.mode == "eth" and chosen.root is not None:
        problem = _use_overlay(chosen.root)
        if problem is not None and dispatch == "eth":
            raise RuntimeError(f"dispatch='eth' cannot be used: {problem}")
        if problem is not None:
            chosen = _fall_back(problem)
    if chosen.mode == "worker":
        _leave_overlay()
    return chosen


def _use_overlay(root: Path) -> str | None:
    """Point ttnn at an overlay. What stands in the way is returned."""
    if "ttnn" in sys.modules:
        return (
            f"ttnn was imported before {RUNTIME_ROOT} was set to {root}. Call device_open_kwargs() or make "
            "the model before the first `import ttnn`, or set that variable yourself"
        )
    try:
        build_overlay(runtime_root(), root)
    except OSError as error:
        return f"its overlay cannot be made ({error})"
    os.environ[RUNTIME_ROOT] = str(root)
    return None


def _leave_overlay() -> None:
    """Undo :func:`_use_overlay`: with the stock dispatch an overlay's twelfth column would count as compute
    cores, and it holds the dispatch cores."""
    if not os.environ.get(RUNTIME_ROOT, "").strip():
        return
    source = overlay_source(runtime_root())
    if source is None:
        return
    if "ttnn" in sys.modules:
        raise RuntimeError(
            f"this process runs ttnn from the ETH overlay ({RUNTIME_ROOT}={runtime_root()}), on which the "
            "stock dispatch would place work on its own dispatch cores: open the chip with dispatch='eth', "
            "or in another process"
        )
    if source == default_root():
        del os.environ[RUNTIME_ROOT]
    else:
        os.environ[RUNTIME_ROOT] = str(source)


def _fall_back(problem: str) -> Dispatch:
    warnings.warn(
        "ETH dispatch is not used, the stock dispatch is (11x10 cores on a p150 instead of 12x10): "
        + problem,
        RuntimeWarning,
        skip_file_prefixes=(_PACKAGE,),
    )
    return Dispatch("worker", None, problem)
