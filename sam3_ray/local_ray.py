"""What a Ray of our own on this machine needs: it keeps to the loopback, and leaves no process behind.

Neither imports Ray: the first of these has to be done before anything does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

import psutil

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""0: Ray takes the loopback for its node's address, and listens there only. It is Ray's default on macOS and
Windows, and heeded on Linux (ray/_private/services.py, get_node_ip_address). The argument of ``ray.init``
will not do: Ray replaces a loopback address given there by the outward one."""

KILL_AFTER_S = 5.0
"""How long Ray's processes may take to end by themselves."""

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def keep_ray_on_loopback() -> None:
    """Have Ray listen on the loopback only; a value that the user has set stays.

    Ray reads it at its import: call this before anything imports Ray.
    """
    os.environ.setdefault(LOOPBACK_VARIABLE, "0")


def adopt_orphans() -> None:
    """Have processes whose parent ends before them become this process's children, not init's.

    Ray's workers and agents are children of its raylet: should that be killed, they could not be found.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


class StartedProcesses:
    """The processes that run because of this one, but for those that did when this was made."""

    def __init__(self) -> None:
        self._others = {process.pid for process in psutil.Process().children(recursive=True)}

    def __call__(self) -> list[psutil.Process]:
        """All of them: children, their children, and orphans of these."""
        children = psutil.Process().children(recursive=True)
        return [process for process in children if process.pid not in self._others]

    def end(self, shutdown: Callable[[], object]) -> None:
        """Call ``shutdown``, and kill what is still there a little later. An interrupt ends the waiting."""
        processes = self()
        try:
            shutdown()
            psutil.wait_procs(processes, timeout=KILL_AFTER_S)
        except KeyboardInterrupt:
            pass  # whoever asks twice does not want to wait: they are killed
        # Ends: what is killed starts nothing, and orphans come to this process.
        while remaining := self():
            for process in remaining:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(remaining, timeout=KILL_AFTER_S)
