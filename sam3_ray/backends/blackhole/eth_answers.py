"""What a trial of ETH dispatch found, remembered on disk: one small JSON file an answer."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from sam3_ray.backends.blackhole.overlay import eth_folder


@dataclass(frozen=True)
class Answer:
    """Whether ETH dispatch works for one ttnn, one set of data files and one type of board.

    Attributes:
        ttnn: version that was tried.
        tree: key of the three data files (``overlay.files_key``).
        board: such as ``p150a``.
        passed: whether the trial did.
        reason: what went wrong; what was seen where it passed.
        grid: compute grid (columns, rows) that the device had; None where it did not open.
        tried_at: when, ISO 8601 in UTC.
    """

    ttnn: str
    tree: str
    board: str
    passed: bool
    reason: str
    grid: tuple[int, int] | None = None
    tried_at: str = ""


def answer_file(ttnn: str, tree: str, board: str) -> Path:
    """Where an answer is kept, there or not."""
    name = re.sub(r"[^\w.+-]", "_", f"{ttnn}-{tree}-{board}")
    return eth_folder() / "answers" / f"{name}.json"


def remember(answer: Answer) -> Path:
    """Write an answer in place of the one before; the time is set here.

    Raises:
        OSError: the cache folder cannot be written.
    """
    path = answer_file(answer.ttnn, answer.tree, answer.board)
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(answer) | {"tried_at": now}, file, indent=2)
    os.chmod(name, 0o644)
    os.replace(name, path)  # a reader sees the old answer or the new one
    return path


def recall(ttnn: str, tree: str, board: str) -> Answer | None:
    """The answer, or None where nothing was tried. One that cannot be read counts as failed, and says so."""
    path = answer_file(ttnn, tree, board)
    try:
        found = json.loads(path.read_text())
        grid = found["grid"]
        answer = Answer(
            ttnn=str(found["ttnn"]),
            tree=str(found["tree"]),
            board=str(found["board"]),
            passed=found["passed"] is True,
            reason=str(found["reason"]),
            grid=None if grid is None else (int(grid[0]), int(grid[1])),
            tried_at=str(found["tried_at"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return Answer(
            ttnn, tree, board, passed=False, reason=f"{path} cannot be read ({error!r}); try again"
        )
    return answer
