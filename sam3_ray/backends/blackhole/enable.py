"""Enabling ETH dispatch: make the overlay, try it on a chip, remember the answer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sam3_ray.backends.blackhole.eth_answers import Answer, answer_file, remember
from sam3_ray.backends.blackhole.overlay import (
    RUNTIME_ROOT,
    build_overlay,
    eth_folder,
    has_eth_patch,
    overlay_root,
    overlay_source,
    runtime_root,
    tree_key,
    ttnn_version,
)
from sam3_ray.backends.blackhole.trial import TIMEOUT_S, TRIAL_COMMAND, run_trial


def enable_eth(
    board: str,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    command: Sequence[str] = TRIAL_COMMAND,
) -> Answer:
    """Try ETH dispatch on a chip, and remember what was found: it holds until this is called again.

    The trial is of the overlay of the installed ttnn, or, where the runtime root in use is patched itself, of
    that one. This process's environment stays as it is.

    Args:
        board: type of the chip's board (``dispatch.board_type``).
        environment: added to this process's for the trial; TT_VISIBLE_DEVICES chooses the chip.
        timeout_s: seconds that the trial may take.
        command: of the trial (``trial.run_trial``).

    Raises:
        ImportError: ttnn is not installed.
        UnknownTtnnFilesError: these data files cannot be patched; nothing is tried or remembered.
        OSError: the cache folder cannot be written.
    """
    root = _patched_root()
    variables = {
        # Its own kernels: another process may build into the default folder at the same time.
        "TT_METAL_CACHE": str(eth_folder() / "kernels"),
        "TT_METAL_LOGS_PATH": str(eth_folder() / "logs"),  # else in the working folder
        "TT_LOGGER_LEVEL": "error",
        "LOGURU_LEVEL": "WARNING",
        **os.environ,
        **(environment or {}),
        RUNTIME_ROOT: str(root),
    }
    result = run_trial(variables, timeout_s=timeout_s, command=command)
    version, tree, reason = str(ttnn_version()), tree_key(root), result.reason
    log = answer_file(version, tree, board).with_suffix(".log")
    if result.passed:
        log.unlink(missing_ok=True)  # of an earlier trial
    else:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(result.log)
        reason = f"{reason} (what it printed: {log})"
    answer = Answer(version, tree, board, result.passed, reason, result.grid)
    remember(answer)
    return answer


def _patched_root() -> Path:
    """The runtime root to try; an overlay is made where it is needed."""
    current = runtime_root()
    source = overlay_source(current)
    if source is None and has_eth_patch(current):
        return current
    source = source or current
    root = overlay_root(source)
    build_overlay(source, root)
    return root
