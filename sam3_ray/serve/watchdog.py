"""Ends a replica whose device call never returns. Nothing in the process can end such a call otherwise.

Serve then starts another replica, and Ray gives it the same chip. What happened is left in a file for it:
``recovery`` reads that, and looks after the chip before it is opened again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from sam3_ray.serve.health import DeviceWatch
from sam3_ray.serve.recovery import Incidents

logger = logging.getLogger("sam3_ray")

EXIT_CODE = 70  # EX_SOFTWARE

LOOK_EVERY_S = 0.5


class Watchdog:
    """A thread that looks at the age of the running device call.

    Args:
        watch: knows the age and the limit.
        incidents: where the reason is left.
        end: ends the process; does not return. ``os._exit``: no handler may wait for the hung thread.
        every_s: seconds between two looks.
    """

    def __init__(
        self,
        watch: DeviceWatch,
        incidents: Incidents,
        *,
        end: Callable[[int], object] = os._exit,
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._watch = watch
        self._incidents = incidents
        self._end = end
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sam3-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            reason = self._watch.hung()
            if reason is not None:
                logger.critical("the replica ends: %s", reason)
                try:
                    self._incidents.add(reason)
                except OSError:
                    # Of a full disk, say: the next replica opens the chip unprepared, but there is one.
                    logger.exception("the reason could not be left for the next replica")
                finally:
                    self._end(EXIT_CODE)
                return
