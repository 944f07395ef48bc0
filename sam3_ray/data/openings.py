"""Which actors of a run have not been able to open their model, and what they do then.

An actor that raises in its constructor ends the whole job, or, where Ray Data is told to bear it, gives its
chip back, on which the next one fails. So it does neither: it says why, in a file, and stays in its
constructor with its chip. Ray Data gives no work to an actor that is not ready, and the others go on.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from sam3_ray import chips
from sam3_ray.data.files import replace_file
from sam3_ray.data.ray_session import this_actor

_OUT, _OPEN = "out-", "open-"
_POLL_S = 0.5

OTHERS_OPEN_S = 900.0
"""How long the first of the others may take. One that hangs, or that the cluster has no room for, never says
that it has failed."""


class NothingOpensError(RuntimeError):
    """Not one of the actors of a run can open its model."""


class Openings:
    """The files of one run, in the folder of its attempts.

    Args:
        folder: it, on a file system that all actors share.
        actors: how many the run has.
    """

    def __init__(self, folder: Path, actors: int) -> None:
        self._folder = folder
        self._actors = actors

    def open[Model](self, open_model: Callable[[], Model]) -> Model:
        """Open a model; where that fails, stay here while others work.

        Raises:
            NothingOpensError: all others have failed too, or none has opened in ``OTHERS_OPEN_S``.
            Exception: what opening raises, where there is one actor, the run has ended, or this one worked
                before: then it has images that wait for it.
        """
        if self._actors == 1:
            return open_model()
        try:
            model = open_model()
            (self._folder / f"{_OPEN}{uuid.uuid4().hex[:12]}").touch()
            return model
        except Exception as error:
            if _worked_before():
                raise
            self._tell(error)
            deadline = time.monotonic() + OTHERS_OPEN_S
            while self._folder.is_dir():
                found = told(self._folder)
                late = time.monotonic() > deadline and not any(self._folder.glob(f"{_OPEN}*"))
                if late or len(found) >= self._actors:
                    raise NothingOpensError("; ".join(found)) from error
                time.sleep(_POLL_S)
            raise

    def _tell(self, error: Exception) -> None:
        text = f"{_device()}: {type(error).__name__}: {error}"
        path = self._folder / f"{_OUT}{uuid.uuid4().hex[:12]}"
        replace_file(path, lambda unfinished: unfinished.write_text(json.dumps(text)))


def told(folder: Path) -> tuple[str, ...]:
    """For each device of a run that is out: which, and why."""
    return tuple(sorted(json.loads(path.read_text()) for path in folder.glob(f"{_OUT}*")))


def _device() -> str:
    name = os.environ.get(chips.VISIBLE_DEVICES)
    here = socket.gethostname()
    return f"an actor on {here}" if name is None else f"chip {name} of {here}"


def _worked_before() -> bool:
    actor = this_actor()
    return actor is not None and bool(actor.was_current_actor_reconstructed)
