"""What was asked for lately: which images live where, and which need more than one replica.

Each digest's share of the recent requests, times the chips that the requests in flight keep busy, is the
load of that digest in chips. One that needs more than ``SHARE_OF_A_CHIP`` of a chip is hot, and as many
replicas answer it as keep its part of each below that. Counts halve every ``half_life_s``: an image that is
no longer asked for is forgotten, and the replicas that held a copy use the room for others.

An image that was asked for lately has a home: the replica that was chosen for it then, which has its
features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

SHARE_OF_A_CHIP = 0.35
"""What one image may take of one chip before another chip helps: the rest is for the chip's own images."""

MIN_REQUESTS = 8.0
"""Fewer recent requests than this are no measurement."""

MAX_TRACKED = 4096
"""Digests that are counted; beyond it those with less than one recent request are dropped."""

WARM_REQUESTS = 1.5
"""With fewer recent requests, this one counted, an image's features may have gone, and its home is free."""

NEW_IMAGE_WORK = 2.5
"""What a request for an image that is new to a replica costs there, in requests for one that it has: an image
part and two prompts against two prompts, on the chip that ``perf/routing.py`` simulates."""

_RESCALE_AT = 2.0**40


@dataclass
class _Digest:
    count: float = 0.0
    home: str | None = None
    seen: set[str] = field(default_factory=set)


class HotSet:
    """Counts requests by digest, and says how many replicas each digest needs.

    Args:
        half_life_s: a count halves in this time, in seconds.
        clock: seconds, monotonic.

    Raises:
        ValueError: a half-life that is not positive.
    """

    def __init__(
        self, half_life_s: float = 10.0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not half_life_s > 0:
            raise ValueError(f"half_life_s must be more than 0, got {half_life_s}")
        self._half_life_s = half_life_s
        self._clock = clock
        self._start = clock()
        self._digests: dict[str, _Digest] = {}
        self._total = 0.0
        self._in_flight = 0.0
        self._work: dict[str, float] = {}
        self._prune_above = MAX_TRACKED

    def __len__(self) -> int:
        """Digests that are counted now."""
        return len(self._digests)

    def arrived(self, digest: str, in_flight: int) -> None:
        """Count a request.

        Args:
            digest: of its image.
            in_flight: requests that all replicas have now, this one not counted.
        """
        # Counting with a unit that grows is the same as letting all older counts shrink.
        unit = self._unit()
        self._digests.setdefault(digest, _Digest()).count += unit
        # The mean over the last requests, weighted as they are.
        self._total += unit
        self._in_flight += unit * in_flight
        if len(self._digests) > self._prune_above:
            self._forget_cold(unit)

    def width(self, digest: str, replicas: int) -> int:
        """How many of ``replicas`` shall answer this digest: 1 unless it is hot."""
        known = self._digests.get(digest)
        if known is None or replicas <= 1 or known.count < MIN_REQUESTS * self._unit():
            return 1
        # By Little's law requests in flight are at least the busy chips; a queue counts as busy chips, of
        # which there are no more than replicas.
        busy_chips = min(self._in_flight / self._total, float(replicas))
        load = known.count / self._total * busy_chips
        return min(replicas, max(1, math.ceil(load / SHARE_OF_A_CHIP)))

    def home(self, digest: str) -> str | None:
        """The place where an image lives, as far as is known."""
        known = self._digests.get(digest)
        return None if known is None else known.home

    def is_warm(self, digest: str) -> bool:
        """Whether the image was asked for so lately that its home has it still."""
        known = self._digests.get(digest)
        return known is not None and known.count >= WARM_REQUESTS * self._unit()

    def settle(self, digest: str, place: str) -> None:
        """An image lives here from now on; copies of before have gone."""
        known = self._digests.get(digest)
        if known is not None:
            known.home, known.seen = place, set()

    def sent(self, digest: str, place: str) -> None:
        """A request that carries the image was sent to this place: its cache holds the image from now on."""
        known = self._digests.get(digest)
        work = self._unit()
        if known is None or place not in known.seen:
            work *= NEW_IMAGE_WORK
        self._work[place] = self._work.get(place, 0.0) + work
        if known is not None:
            known.seen.add(place)

    def recent(self, place: str) -> float:
        """Work that was sent to this place lately, in a unit that only compares."""
        return self._work.get(place, 0.0)

    def seen(self, digest: str) -> frozenset[str]:
        """Places that were sent the image while it was counted."""
        known = self._digests.get(digest)
        return frozenset() if known is None else frozenset(known.seen)

    def _unit(self) -> float:
        """What one request counts now."""
        unit = 2.0 ** min((self._clock() - self._start) / self._half_life_s, 1000.0)
        return self._rescale(unit) if unit > _RESCALE_AT else unit

    def _rescale(self, unit: float) -> float:
        self._start = self._clock()
        for known in self._digests.values():
            known.count /= unit
        # A place that has had nothing for so long has gone.
        self._work = {p: work / unit for p, work in self._work.items() if work >= unit}
        self._total /= unit
        self._in_flight /= unit
        self._forget_cold(1.0)
        return 1.0

    def _forget_cold(self, unit: float) -> None:
        self._digests = {d: known for d, known in self._digests.items() if known.count >= unit}
        # Where all are still warm, look again only when there are twice as many: constant work a request.
        self._prune_above = max(MAX_TRACKED, 2 * len(self._digests))
