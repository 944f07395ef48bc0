"""``sam3-ray chips``: the Tenstorrent chips of this machine, and ETH dispatch on them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

from sam3_ray import chips
from sam3_ray.backends.blackhole.dispatch import (
    COMMAND,
    MOCK_BOARD,
    MOCK_CLUSTER,
    EthState,
    Mode,
    eth_state,
    known_grid,
)
from sam3_ray.backends.blackhole.enable import enable_eth
from sam3_ray.backends.blackhole.overlay import UnknownTtnnFilesError, eth_folder
from sam3_ray.backends.blackhole.trial import TIMEOUT_S
from sam3_ray.cli.main import CommandError

DESCRIPTION = """\
List the Tenstorrent chips of this machine, from the kernel's files: no chip is opened, so it is safe while a
service runs.

dispatch is what `auto` takes: worker (the stock dispatch, which costs a p150 one of its 12 columns of cores)
or eth (on the chip's Ethernet cores). enable-eth tries ETH dispatch with the installed ttnn on one free chip
of each type of board, and remembers the answer; until then `auto` is worker.
"""

EXAMPLES = """\
examples:
  sam3-ray chips
  sam3-ray chips --json
  sam3-ray chips enable-eth                        try ETH dispatch, up to five minutes
  TT_VISIBLE_DEVICES=2 sam3-ray chips enable-eth   on this chip
"""


@dataclass(frozen=True)
class Row:
    """What is told of one chip.

    Attributes:
        chip: it.
        visible: whether TT_VISIBLE_DEVICES leaves it.
        dispatch: what ``auto`` takes.
        grid: compute grid (columns, rows) with that; None where it is not known.
        eth: what is known of ETH dispatch on its board.
    """

    chip: chips.Chip
    visible: bool
    dispatch: Mode
    grid: tuple[int, int] | None
    eth: EthState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "enable-eth"),
        default="list",
        help="what to do (default: list)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_S,
        metavar="S",
        help=f"enable-eth: seconds until a trial is given up (default: {TIMEOUT_S:g})",
    )


def run(arguments: argparse.Namespace) -> int:
    """List, or try."""
    try:
        if arguments.action == "enable-eth":
            return _enable(arguments.timeout, as_json=arguments.json)
        return _list(as_json=arguments.json)
    except ValueError as error:  # of TT_VISIBLE_DEVICES, or of ttnn's files
        raise CommandError(str(error)) from error


def rows(machine: chips.Machine) -> Iterator[Row]:
    """Every chip of a machine.

    Raises:
        ValueError: TT_VISIBLE_DEVICES names a chip that is not here.
    """
    visible = machine.visible()
    for chip in machine.chips:
        board = chip.card or "unknown"
        eth = eth_state(board)
        mode: Mode = "eth" if eth.usable else "worker"
        yield Row(chip, chip in visible, mode, known_grid(board, mode, eth.answer), eth)


def _list(*, as_json: bool) -> int:
    found = list(rows(chips.look()))
    if as_json:
        print(json.dumps({"chips": [_document(row) for row in found]}, indent=2))
        return 0
    if not found:
        print("no Tenstorrent chip here (`sam3-ray doctor` tells what is missing)")
        return 0
    table = [("chip", "PCI address", "board", "grid", "dispatch", "in use by")]
    for row in found:
        users = ", ".join(map(str, row.chip.holders)) or "-"
        table.append(
            (
                str(row.chip.index),
                row.chip.pci_address or "unknown",
                row.chip.card or "unknown",
                _size(row.grid),
                row.dispatch,
                users if row.visible else f"{users} (hidden by {chips.VISIBLE_DEVICES})",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(map(str.ljust, line, widths)).rstrip())
    for row in {row.eth.why: row for row in found}.values():
        todo = "" if row.eth.usable else f" (`{COMMAND}` tries it)"
        print(f"\nETH dispatch: {row.eth.why}{todo}")
    return 0


def _document(row: Row) -> dict[str, object]:
    return {
        "index": row.chip.index,
        "pci_address": row.chip.pci_address,
        "board": row.chip.card,
        "firmware": row.chip.firmware,
        "grid": row.grid,
        "dispatch": row.dispatch,
        "eth_dispatch": row.eth.why,
        "in_use_by": [{"pid": holder.pid, "name": holder.name} for holder in row.chip.holders],
        "visible": row.visible,
    }


def _enable(timeout_s: float, *, as_json: bool) -> int:
    """Try each type of board; 0 where every trial passed."""
    answers = []
    for board, environment in _to_try():
        if not as_json:
            chip = environment.get(chips.VISIBLE_DEVICES, "the emulated one")
            print(
                f"trying ETH dispatch on {board}, chip {chip}, for up to {timeout_s:g} s ...",
                flush=True,
            )
        try:
            answer = enable_eth(board, environment=environment, timeout_s=timeout_s)
        except (UnknownTtnnFilesError, ImportError, OSError) as error:
            raise CommandError(f"ETH dispatch cannot be tried: {error}") from error
        answers.append(answer)
        if as_json:
            continue
        if answer.passed:
            print(f"passed: {answer.reason}. dispatch='auto' uses it from now on")
        else:
            print(f"failed: {answer.reason}. dispatch='auto' stays with the stock dispatch")
            print("  where the chip does not open afterwards: tt-smi -r <index>")
    if as_json:
        print(json.dumps({"trials": [vars(answer) for answer in answers]}, indent=2))
    else:
        print(f"remembered in {eth_folder()}; deleting that folder undoes it")
    return 0 if all(answer.passed for answer in answers) else 1


def _to_try() -> Iterator[tuple[str, dict[str, str]]]:
    """A type of board, and the variables that choose a free chip of it, for each type here."""
    if os.environ.get(MOCK_CLUSTER):
        yield MOCK_BOARD, {}
        return
    visible = chips.look().visible()
    if not visible:
        raise CommandError("no chip here to try ETH dispatch on: see `sam3-ray doctor`")
    for board in dict.fromkeys(chip.card or "unknown" for chip in visible):
        of_it = [chip for chip in visible if (chip.card or "unknown") == board]
        free = [chip for chip in of_it if not chip.busy]
        if not free:
            users = sorted({str(holder) for chip in of_it for holder in chip.holders})
            raise CommandError(f"every {board} is in use, by {', '.join(users)}: stop that first")
        yield board, {chips.VISIBLE_DEVICES: str(free[0].index)}


def _size(grid: tuple[int, int] | None) -> str:
    return "unknown" if grid is None else f"{grid[0]}x{grid[1]}"


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time: it must be more than 0")
    return value
