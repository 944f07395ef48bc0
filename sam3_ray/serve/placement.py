"""Which replicas an image goes to, in which order.

For each digest the replicas have a fixed order of preference: rendezvous hashing of (host, chip) with the
digest, the form of consistent hashing that needs no ring and spreads evenly without virtual nodes. A replica
that comes or goes moves only its own share of the images. A replica's key is its place, not Ray's random id
of it: after a restart it gets the same images again.

- An image goes to the first of its order; where that has had more work than the others lately, to the one of
  its first few that has had least. That is its home while it is asked for: it moves only when its features
  are likely to have gone anyway.
- A hot one (see ``hot``) goes to the least loaded of the first few, as many as its load needs, so that
  neither it nor the images which share a chip with it wait while other chips idle.
- A replica with far more requests than the others is passed over (bounded load). That is a bound for bad
  luck and bursts: a copy of a cold image elsewhere costs an image part and a place in the cache.
- A request with a digest alone goes to replicas that were sent the image, else to the first and its
  fallbacks, in order, and to no other: a replica further down has never seen the image.
- Parked replicas (their chip does not open) are left out while there is another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from sam3_ray.serve.hot import HotSet

DEFAULT_NUM_FALLBACKS = 2
DEFAULT_LOAD_FACTOR = 1.25
DEFAULT_FREE_LOAD = 16

BALANCE = 1.1
"""A replica with more recent work than this many times the mean is no new image's home. Chosen on seeds 0 to
3 of ``perf/routing.py``, which measures with others."""


@dataclass(frozen=True)
class Candidate:
    """A replica as the choice sees it.

    Attributes:
        replica_id: Ray's unique id.
        place: "host/chip": what its share of the images hangs on.
        load: requests it has now, as far as this router knows.
        parked: its chip did not open.
    """

    replica_id: str
    place: str
    load: int = 0
    parked: bool = False


def preference(digest: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates, first choice first; the same in every process that knows the same candidates."""

    def weight(candidate: Candidate) -> tuple[int, str]:
        # The id decides only between two replicas that claim one place.
        return xxhash.xxh3_64_intdigest(
            f"{candidate.place}|{digest}".encode()
        ), candidate.replica_id

    return sorted(candidates, key=weight, reverse=True)


class Placement:
    """Decides for one router; remembers what is hot.

    Args:
        num_fallbacks: replicas after the first that a digest-only request may go to.
        load_factor: a replica may have this many times the mean load before its images overflow.
        free_load: a load below this is never too much.
        clock: seconds, monotonic.

    Raises:
        ValueError: a value out of its range.
    """

    def __init__(
        self,
        *,
        num_fallbacks: int = DEFAULT_NUM_FALLBACKS,
        load_factor: float = DEFAULT_LOAD_FACTOR,
        free_load: int = DEFAULT_FREE_LOAD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if num_fallbacks < 0:
            raise ValueError(f"num_fallbacks must be at least 0, got {num_fallbacks}")
        if load_factor < 1:
            raise ValueError(f"load_factor must be at least 1, got {load_factor}")
        if free_load < 1:
            raise ValueError(f"free_load must be at least 1, got {free_load}")
        self._num_fallbacks = num_fallbacks
        self._load_factor = load_factor
        self._free_load = free_load
        self.hot = HotSet(clock=clock)

    def choose(
        self,
        digest: str,
        candidates: Sequence[Candidate],
        *,
        digest_only: bool,
        avoid: frozenset[str] = frozenset(),
        counts: bool = True,
    ) -> list[Candidate]:
        """The replicas to try, in order; never empty where there is a candidate.

        Args:
            digest: of the image.
            candidates: all running replicas.
            digest_only: the request does not carry the image.
            avoid: ids of replicas that failed on this request.
            counts: whether the request is new demand for its image.
        """
        usable = [c for c in candidates if not c.parked] or list(candidates)
        if counts:
            self.hot.arrived(digest, sum(c.load for c in usable))
        order = self._home_first(digest, preference(digest, usable), may_move=not digest_only)
        if digest_only:
            order = self._holders_first(digest, order)
        else:
            order = self._bounded(self._hot_first(digest, order))
        order = [c for c in order if c.replica_id not in avoid] or order
        if order and not digest_only:
            self.hot.sent(digest, order[0].place)
        return order

    def why(self, digest: str, chosen: Candidate, candidates: Sequence[Candidate]) -> str:
        """Why an image went to a replica: ``first`` (its home), ``hot`` (a copy of it is there, or is made
        there, because it is hot), ``overflow`` (its home has too much to do, or failed)."""
        usable = [c for c in candidates if not c.parked] or list(candidates)
        order = self._home_first(digest, preference(digest, usable), may_move=False)
        rank = order.index(chosen)
        if rank == 0:
            return "first"
        return "hot" if rank < self.hot.width(digest, len(order)) else "overflow"

    def _home_first(
        self, digest: str, order: list[Candidate], *, may_move: bool
    ) -> list[Candidate]:
        known = self.hot.home(digest)
        home = next((c for c in order if c.place == known), None)
        if may_move and order and (home is None or not self.hot.is_warm(digest)):
            home = self._new_home(order)
            self.hot.settle(digest, home.place)
        if home is None:
            return order
        return [home, *(c for c in order if c is not home)]

    def _new_home(self, order: list[Candidate]) -> Candidate:
        """The first, or one of those that a request with the digest alone would look for it at."""
        work = {c.place: self.hot.recent(c.place) for c in order}
        if work[order[0].place] <= BALANCE * sum(work.values()) / len(order):
            return order[0]
        return min(order[: 1 + self._num_fallbacks], key=lambda c: work[c.place])

    def _hot_first(self, digest: str, order: list[Candidate]) -> list[Candidate]:
        """The replicas of a hot image by their load; of two alike, the one that had less to do lately."""
        width = self.hot.width(digest, len(order))
        if width == 1:
            return order
        return (
            sorted(order[:width], key=lambda c: (c.load, self.hot.recent(c.place))) + order[width:]
        )

    def _bounded(self, order: list[Candidate]) -> list[Candidate]:
        mean = (sum(c.load for c in order) + 1) / max(1, len(order))
        bound = max(self._free_load, math.ceil(self._load_factor * mean))
        return [c for c in order if c.load < bound] + [c for c in order if c.load >= bound]

    def _holders_first(self, digest: str, order: list[Candidate]) -> list[Candidate]:
        width = self.hot.width(digest, len(order))
        seen = self.hot.seen(digest)
        holders = sorted((c for c in order[:width] if c.place in seen), key=_load)
        return holders + [c for c in order[: 1 + self._num_fallbacks] if c not in holders]


def _load(candidate: Candidate) -> int:
    return candidate.load
