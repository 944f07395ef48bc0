"""``sam3-ray chips``: the Tenstorrent chips of this machine, which replicas have them, and ETH dispatch."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sam3_ray import chips
from sam3_ray.backends.blackhole.dispatch import (
    COMMAND,
    MOCK_BOARD,
    EthState,
    Mode,
    eth_state,
    known_grid,
)
from sam3_ray.backends.blackhole.enable import enable_eth
from sam3_ray.backends.blackhole.overlay import UnknownTtnnFilesError, eth_folder
from sam3_ray.backends.blackhole.trial import TIMEOUT_S
from sam3_ray.cli import running
from sam3_ray.cli.main import CommandError
from sam3_ray.cli.table import print_table

DESCRIPTION = """\
List the Tenstorrent chips of this machine, from the kernel's files: no chip is opened, so it is safe while a
service runs. Where a Ray runs here with the service in it, its replicas are listed too, on every host: which
place (a chip of a node) each has, and which are parked, and why.

park takes a chip out: its replica finishes what it has, closes the chip, and gets no more requests. unpark
starts a new replica on it. Both take the chip's number, or its place where several hosts have that number.

dispatch is what `auto` takes: worker (the stock dispatch, which costs a p150 one of its 12 columns of cores)
or eth (on the chip's Ethernet cores). enable-eth tries ETH dispatch with the installed ttnn on one free chip
of each type of board, and remembers the answer; until then `auto` is worker.
"""

EXAMPLES = """\
examples:
  sam3-ray chips
  sam3-ray chips --json
  sam3-ray chips park 2                            then reset it, or use it otherwise
  sam3-ray chips unpark 2
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
        choices=("list", "park", "unpark", "enable-eth"),
        default="list",
        help="what to do (default: list)",
    )
    parser.add_argument("place", nargs="?", help="park, unpark: a chip's number, or NODE/chipN")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_S,
        metavar="S",
        help=f"enable-eth: seconds until a trial is given up (default: {TIMEOUT_S:g})",
    )
    running.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """List, park, unpark, or try."""
    moves = arguments.action in ("park", "unpark")
    if moves and arguments.place is None:
        raise CommandError(f"which chip? `sam3-ray chips {arguments.action} N`", 2)
    if not moves and arguments.place is not None:
        raise CommandError(f"{arguments.action} takes no chip, got {arguments.place!r}", 2)
    try:
        if moves:
            return _move(arguments)
        if arguments.action == "enable-eth":
            return _enable(arguments.timeout, as_json=arguments.json)
        return _list(arguments)
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


def _move(arguments: argparse.Namespace) -> int:
    with running.service(arguments.address, arguments.application) as service:
        answer = service.call(arguments.action, arguments.place)
    if arguments.json:
        print(json.dumps(answer, indent=2))
    elif arguments.action == "unpark":
        was = answer["was"]
        print(
            f"{answer['place']} was not parked"
            if was is None
            else f"{answer['place']} was parked ({was}); a new replica starts there"
        )
    elif answer["closed"]:
        print(f"{answer['place']} is parked, and the chip is closed")
    else:
        print(
            f"{answer['place']} is parked, but {answer['unfinished']} requests go on: ask again later"
        )
    return 0 if answer.get("closed", True) else 1


def _list(arguments: argparse.Namespace) -> int:
    found = list(rows(chips.look()))
    replicas, note = _replicas(arguments)
    if arguments.json:
        document = {"chips": [_document(row) for row in found], "replicas": replicas}
        print(json.dumps(document, indent=2))
        return 0
    _print_chips(found)
    if note is not None:
        print(f"\n{note}")
    elif replicas is not None:
        table = [("place", "host", "state")]
        table += [(r["place"], r["host"] or "-", _state(r)) for r in replicas]
        print(f"\nreplicas of {arguments.application}:")
        print_table(table)
    return 0


def _replicas(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]] | None, str | None]:
    """The replicas of the service that runs here, and what to say where there is a Ray and no service."""
    if not running.ray_runs_here() and arguments.address == "auto":
        return None, None
    names = ("place", "host", "chip", "replica", "parked", "busy")
    try:
        with running.service(arguments.address, arguments.application) as service:
            replicas = service.call("info")["replicas"]
    except CommandError as error:
        return None, str(error)
    return [{name: replica.get(name) for name in names} for replica in replicas], None


def _state(replica: dict[str, Any]) -> str:
    if replica["parked"] is not None:
        return f"parked: {replica['parked']}"
    return "serving, all its places taken" if replica["busy"] else "serving"


def _print_chips(found: list[Row]) -> None:
    if not found:
        print("no Tenstorrent chip here (`sam3-ray doctor` tells what is missing)")
        return
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
    print_table(table)
    for row in {row.eth.why: row for row in found}.values():
        todo = "" if row.eth.usable else f" (`{COMMAND}` tries it)"
        print(f"\nETH dispatch: {row.eth.why}{todo}")


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
    if os.environ.get(chips.MOCK_CLUSTER):
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
