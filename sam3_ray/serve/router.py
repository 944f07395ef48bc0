"""Sends every request for one image to the replica whose cache holds that image.

A ``RequestRouter`` of Ray's, wired by ``RequestRouterConfig``. For each digest the replicas have a fixed
order of preference: rendezvous hashing of (host, chip) with the digest, the form of consistent hashing that
needs no ring. A replica that comes or goes moves only its own share of the images. A replica's key is its
place, not Ray's random id of it: after a restart it gets the same images again.

- A request with the image goes down that order. A replica whose load is over the bound is passed over
  (bounded load), so that one popular image does not queue behind itself while others idle.
- A request with a digest alone goes to the first and its fallbacks, in order, and to no other: a replica
  further down has never seen the image.
- Parked replicas (their chip does not open) are left out while there is another.

Not derived from ``ConsistentHashRouter``: its key is the random id, and its own loop never registers routing
tasks, so a client that hangs up would not cancel them. The API is alpha: Ray's minor version is pinned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter

from sam3_ray.serve.schemas import PredictJob

DEFAULT_NUM_FALLBACKS = 2
DEFAULT_LOAD_FACTOR = 1.25
DEFAULT_FREE_LOAD = 4


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


def choose(
    digest: str,
    candidates: Sequence[Candidate],
    *,
    digest_only: bool,
    avoid: frozenset[str] = frozenset(),
    num_fallbacks: int = DEFAULT_NUM_FALLBACKS,
    load_factor: float = DEFAULT_LOAD_FACTOR,
    free_load: int = DEFAULT_FREE_LOAD,
) -> list[Candidate]:
    """The replicas to try, in order; never empty where there is a candidate.

    Args:
        digest: of the image.
        candidates: all running replicas.
        digest_only: the request does not carry the image.
        avoid: ids of replicas that failed on this request.
        num_fallbacks: replicas after the first that a digest-only request may go to.
        load_factor: a replica may have this many times the mean load before its images overflow.
        free_load: a load up to this is never too much: it fits in one batch.
    """
    usable = [c for c in candidates if not c.parked] or list(candidates)
    order = preference(digest, usable)
    if digest_only:
        order = order[: 1 + num_fallbacks]
    else:
        mean = (sum(c.load for c in order) + 1) / max(1, len(order))
        bound = max(free_load, math.ceil(load_factor * mean))
        order = [c for c in order if c.load < bound] + [c for c in order if c.load >= bound]
    return [c for c in order if c.replica_id not in avoid] or order


class DigestRouter(RequestRouter):
    """Routes by the digest in ``session_id`` (see the module).

    Kwargs (``RequestRouterConfig.request_router_kwargs``):
        num_fallbacks (int, default 2): replicas after the first that a digest-only request may go to.
        load_factor (float, default 1.25): at least 1; the bound of a replica's load over the mean.
        free_load (int, default 4): at least 1; a load below it never overflows.
    """

    def initialize_state(  # type: ignore[override]  # Serve passes the kwargs by name
        self,
        num_fallbacks: int = DEFAULT_NUM_FALLBACKS,
        load_factor: float = DEFAULT_LOAD_FACTOR,
        free_load: int = DEFAULT_FREE_LOAD,
    ) -> None:
        """Take the kwargs; called by Serve once.

        Raises:
            ValueError: a value out of its range.
        """
        if num_fallbacks < 0:
            raise ValueError(f"num_fallbacks must be at least 0, got {num_fallbacks}")
        if load_factor < 1:
            raise ValueError(f"load_factor must be at least 1, got {load_factor}")
        if free_load < 1:
            raise ValueError(f"free_load must be at least 1, got {free_load}")
        self._choose = partial(
            choose, num_fallbacks=num_fallbacks, load_factor=load_factor, free_load=free_load
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, so that the retry loop keeps the order."""
        if pending_request is None:
            # An empty list here would spin Ray's retry loop.
            return [candidate_replicas]
        # Without it the retry loop does not sleep between rounds while every replica is full.
        pending_request.routing_context.should_backoff = True
        job = next((arg for arg in pending_request.args if isinstance(arg, PredictJob)), None)
        chosen = self._choose(
            pending_request.metadata.session_id or pending_request.metadata.internal_request_id,
            [self._candidate(replica) for replica in candidate_replicas],
            digest_only=job is not None and job.image is None,
            avoid=frozenset() if job is None else job.avoid,
        )
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_id[candidate.replica_id]] for candidate in chosen]

    def _candidate(self, replica: RunningReplica) -> Candidate:
        metadata: Mapping[str, Any] = replica.replica_metadata
        unique_id = replica.replica_id.unique_id
        return Candidate(
            replica_id=unique_id,
            place=str(metadata.get("place", unique_id)),
            load=self.replica_queue_len_cache.get(replica.replica_id) or 0,
            parked=bool(metadata.get("parked", False)),
        )
