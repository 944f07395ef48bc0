"""After a hang: reset that one chip, open it once in a process of its own, and only then use it again."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sam3_ray.chips import Chip
from sam3_ray.serve.config import check_reset_command

logger = logging.getLogger("sam3_ray")

RESET_TIMEOUT_S = 120.0
OPEN_TIMEOUT_S = 300.0
"""The first opening builds kernels; a chip that hangs again has no other end than this."""

KEPT_INCIDENTS = 20

OPEN_COMMAND = (
    sys.executable,
    "-c",
    "from sam3_ray import device_open_kwargs; arguments = device_open_kwargs(); import ttnn; "
    "ttnn.close_device(ttnn.open_device(**arguments))",
)
"""Opens, as a replica would, the one chip that TT_VISIBLE_DEVICES leaves this process and its children."""


class Incidents:
    """What happened to one place of a host (a chip, or a CPU replica), over the replicas that have it.

    Args:
        folder: of this Ray session on this host: another start begins with none.
        slot: name of the place in file names.
    """

    def __init__(self, folder: Path, slot: str) -> None:
        self._file = folder / f"sam3_ray-incidents-{slot}.json"

    def add(self, reason: str) -> None:
        """A hang; the next replica has to look after the chip."""
        self._write([*self.read(), {"at": _now(), "reason": reason, "outcome": None}])

    def read(self) -> list[dict[str, Any]]:
        """``at`` (UTC), ``reason``, and the ``outcome`` where it was looked after; oldest first."""
        try:
            incidents: list[dict[str, Any]] = json.loads(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            # A disk's fault must not keep every replica from starting.
            logger.error("%s cannot be read, and counts as empty: %s", self._file, error)
            return []
        return incidents

    @property
    def pending(self) -> bool:
        """Whether the last one has not been looked after."""
        incidents = self.read()
        return bool(incidents) and incidents[-1]["outcome"] is None

    def settle(self, outcome: str) -> None:
        """What came of the last one."""
        incidents = self.read()
        if incidents:
            incidents[-1]["outcome"] = outcome
            self._write(incidents)

    def _write(self, incidents: list[dict[str, Any]]) -> None:
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(incidents[-KEPT_INCIDENTS:]))
        part.replace(self._file)  # a process that is killed leaves the whole file of before


def reset_words(command: str, chip: Chip) -> list[str]:
    """The words of a reset command for one chip.

    Raises:
        ValueError: it names no chip, or the chip by an address that the kernel does not tell.
    """
    check_reset_command(command)
    if "{pci_address}" in command and chip.pci_address is None:
        raise ValueError(f"the kernel tells no PCI address of chip {chip.index}; use {{device}}")
    values = {"{device}": str(chip.device), "{pci_address}": chip.pci_address or ""}
    words = shlex.split(command)
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    return words


def recover(
    chip: Chip | None,
    reset_command: str | None,
    *,
    open_command: Sequence[str] = OPEN_COMMAND,
    open_timeout_s: float = OPEN_TIMEOUT_S,
) -> tuple[bool, str]:
    """Reset a chip that has hung, if that is configured, and try to open it.

    Args:
        chip: None where the kernel does not show it: then it is only opened.
        reset_command: of the configuration.
        open_command: opens it once and ends with 0.
        open_timeout_s: seconds until that is killed.

    Returns:
        Whether it may be used, and what was done, for ``/info``.
    """
    done = "not reset (no reset_command)"
    if reset_command is not None and chip is None:
        done = "not reset (the chip is not in /dev/tenstorrent)"
    elif reset_command is not None and chip is not None:
        words = reset_words(reset_command, chip)
        logger.warning("resetting chip %d: %s", chip.index, shlex.join(words))
        failure = _run(words, RESET_TIMEOUT_S)
        done = "reset" if failure is None else f"reset failed ({failure})"
    failure = _run(open_command, open_timeout_s)
    if failure is None:
        return True, f"{done}; it opens again"
    return False, f"{done}; it does not open ({failure})"


def _run(words: Sequence[str], timeout_s: float) -> str | None:
    """Run a command; None where it ends with 0, else what was wrong."""
    try:
        ended = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} took more than {timeout_s:g} s"
    except OSError as error:
        return f"{words[0]}: {error.strerror}"
    if ended.returncode == 0:
        return None
    last = (ended.stderr.strip() or ended.stdout.strip() or "no output").splitlines()[-1]
    return f"{words[0]} ended with {ended.returncode}: {last[:200]}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
