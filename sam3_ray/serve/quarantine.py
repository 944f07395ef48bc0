"""Pictures that kill replicas. Two dead replicas, and a picture is refused until the next start.

A replica that dies takes other pictures' requests with it. So each of them is only a suspect, and suspects
are tried again one at a time: whoever then gets its answer is innocent, and whoever kills again is not.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sam3_ray.serve.errors import Problem, ProblemError, ProblemType

DEATHS = 2

_MOST_REMEMBERED = 10_000
"""Digests; of a suspect the oldest is forgotten first."""


class Quarantine:
    """What one ingress knows of the pictures whose replicas died."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[str, set[str]] = OrderedDict()
        self._one_suspect = asyncio.Lock()

    @property
    def refused(self) -> list[str]:
        """The digests that are refused."""
        return [digest for digest, deaths in self._deaths.items() if len(deaths) >= DEATHS]

    def check(self, digest: str) -> None:
        """Raise ProblemError (422) where this picture has killed too many replicas."""
        if len(self._deaths.get(digest, ())) >= DEATHS:
            raise ProblemError(
                Problem(
                    ProblemType.IMAGE_REFUSED,
                    f"{DEATHS} replicas died while they worked on the image {digest}; it is refused until "
                    "the service is started again: send another file of the picture, and tell the operator",
                )
            )

    @asynccontextmanager
    async def watch(self, digest: str) -> AsyncIterator[None]:
        """Around one try of a picture's request: suspects take turns.

        Raises:
            ProblemError: 422, it was refused meanwhile.
        """
        if digest not in self._deaths:
            yield
            return
        async with self._one_suspect:
            self.check(digest)
            yield

    def died(self, digest: str, replica: str) -> None:
        """This replica, which had a request for this picture, is dead; told once for each such request."""
        self._deaths.setdefault(digest, set()).add(replica)
        self._deaths.move_to_end(digest)
        while len(self._deaths) > _MOST_REMEMBERED:
            self._deaths.popitem(last=False)

    def answered(self, digest: str) -> None:
        """A replica has lived through it."""
        if len(self._deaths.get(digest, ())) < DEATHS:
            self._deaths.pop(digest, None)
