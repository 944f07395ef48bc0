"""Which images were at work when their process died: a file each, gone when the image is through.

An image that was at work at a death is a suspect and is then labelled with nothing else at work in its
process. One that dies alone too is condemned: it gets an error instead of a third try, in later runs as well.
Deaths of earlier runs do not count, for a run that was killed says nothing of its images.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONDEMNED = "condemned"
"""The folder of those that are not tried again."""

DEATHS = 2
"""So many, and an image is condemned."""


class Attempts:
    """The files of one run.

    Args:
        folder: of this run; on a file system that all actors share. The condemned are kept beside it.

    Raises:
        FileNotFoundError: the folder is not there.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise FileNotFoundError(
                f"{self._folder} is not there: the output folder must be on a file system that every "
                "node of the cluster has at the same place"
            )
        self._condemned = self._folder.parent / CONDEMNED
        self._condemned.mkdir(exist_ok=True)

    def deaths(self, key: str) -> int:
        """How often a process died with this image at work; ``DEATHS`` where it is condemned."""
        if (self._condemned / key).exists():
            return DEATHS
        try:
            count = len((self._folder / key).read_bytes())
        except FileNotFoundError:
            return 0
        if count >= DEATHS:
            (self._condemned / key).touch()
        return min(count, DEATHS)

    @contextmanager
    def at_work(self, key: str) -> Iterator[None]:
        """Counts a death for an image, and takes it back where there was none."""
        path = self._folder / key
        with path.open("ab") as file:  # a byte a try; the kernel has it though this process dies
            file.write(b"x")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


class Gate:
    """Many at a time, or one alone; who waits to be alone goes before those who come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting_alone = 0
        self._alone = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside with any number of others, while nobody is alone or waits to be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._waiting_alone)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside with nobody else."""
        with self._changed:
            self._waiting_alone += 1
            self._changed.wait_for(lambda: not self._alone and not self._inside)
            self._waiting_alone -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class ByteBudget:
    """Bytes that several threads may hold together, given in the order in which they are asked for.

    More than the whole budget is given to one alone.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = 0
        self._queue: list[object] = []
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait until ``size`` bytes fit, and hold them; nothing waits for nothing."""
        if not size:
            yield
            return
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            self._changed.wait_for(
                lambda: (
                    self._queue[0] is ticket
                    and (not self._held or self._held + size <= self._budget)
                )
            )
            self._queue.pop(0)
            self._held += size
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()
