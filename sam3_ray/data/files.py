"""Files that are there whole or not at all, and a folder that one run at a time may write."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, have it on the disk, and rename it into place.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    write(unfinished)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename too
    finally:
        os.close(folder)


class FolderInUseError(RuntimeError):
    """Another run writes into the same folder."""


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; the kernel lets go of it when the process ends, however it does.

    Raises:
        FolderInUseError: another process holds it.
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUseError(
                f"another run writes into {folder}: wait until it ends, or stop it"
            ) from None
        yield
