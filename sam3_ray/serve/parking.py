"""Whether a replica takes requests. A chip that does not open, or that someone works on, is parked.

Ray would hand the same chip to the next replica, for ever: so the replica stays, says why, and is passed over
by the router.
"""

from __future__ import annotations

from pathlib import Path

BY_HAND = "parked by hand"

PARK_TIMEOUT_S = 30.0
"""How long a replica that is parked or unparked by hand may take for the requests that it has."""


class Parking:
    """Of one place (a chip of a host, or a CPU replica).

    Args:
        folder: of this Ray session on this host. A decision by hand is kept there over the replicas that the
            place has; another start begins with none.
        slot: name of the place in file names.
    """

    def __init__(self, folder: Path, slot: str) -> None:
        self._file = folder / f"sam3_ray-parked-{slot}"
        self._fault: str | None = None

    @property
    def reason(self) -> str | None:
        """Why it is parked; None where it is not."""
        return BY_HAND if self.by_hand else self._fault

    @property
    def by_hand(self) -> bool:
        """Whether someone parked it, so that nothing but ``unpark`` ends it."""
        return self._file.exists()

    def fault(self, reason: str) -> None:
        """Park it for this replica's life."""
        self._fault = reason

    def park(self) -> None:
        """Park it by hand."""
        self._file.touch()

    def unpark(self) -> None:
        """Take back what was done by hand; the next replica here starts as if nothing had been."""
        self._file.unlink(missing_ok=True)
