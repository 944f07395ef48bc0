"""What tells that a file has changed: its size and the time of its last change."""

from __future__ import annotations

import os
from typing import NamedTuple

from pyarrow import fs


class Stamp(NamedTuple):
    """Of a file when it was looked at.

    Attributes:
        size: in bytes; None: nobody looked; ``GONE``: it was not there.
        mtime_ns: of its last change, since 1970; None where its file system does not tell.
    """

    size: int | None
    mtime_ns: int | None

    def known(self) -> Stamp | None:
        """Itself, where there was a file to look at."""
        return None if self.size is None or self.size == GONE else self


GONE = -1
UNKNOWN = Stamp(None, None)


def local_stamp(path: str) -> Stamp:
    """Of a local file."""
    try:
        found = os.stat(path)
    except OSError:  # whoever labels it finds out what is wrong
        return Stamp(GONE, None)
    return Stamp(found.st_size, found.st_mtime_ns)


def remote_stamp(info: fs.FileInfo) -> Stamp:
    """Of a file behind a URI, as the listing of its folder tells it."""
    return Stamp(info.size, info.mtime_ns)
