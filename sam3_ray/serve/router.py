"""Sends every request for one image to the replica whose cache holds that image.

A ``RequestRouter`` of Ray's, wired by ``RequestRouterConfig``; ``placement`` decides. The API is alpha: Ray's
minor version is pinned.

Not derived from ``ConsistentHashRouter``: its key is the random id, and its own loop never registers routing
tasks, so a client that hangs up would not cancel them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.request_router.request_router import RequestRouter

from sam3_ray.serve.metrics import RouterMetrics
from sam3_ray.serve.placement import (
    DEFAULT_FREE_LOAD,
    DEFAULT_LOAD_FACTOR,
    DEFAULT_NUM_FALLBACKS,
    Candidate,
    Placement,
)
from sam3_ray.serve.schemas import PredictJob


class DigestRouter(RequestRouter):
    """Routes by the digest in ``session_id`` (see ``placement``).

    Kwargs (``RequestRouterConfig.request_router_kwargs``):
        num_fallbacks (int, default 2): replicas after the first that a digest-only request may go to.
        load_factor (float, default 1.25): at least 1; the bound of a replica's load over the mean.
        free_load (int, default 16): at least 1; a load below it never overflows.
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
        self._placement = Placement(
            num_fallbacks=num_fallbacks, load_factor=load_factor, free_load=free_load
        )
        self._metrics = RouterMetrics()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, so that the retry loop keeps the order."""
        if pending_request is None:
            # An empty list here would spin Ray's retry loop.
            return [candidate_replicas]
        first_round = not pending_request.routing_context.should_backoff
        # Without it the retry loop does not sleep between rounds while every replica is full.
        pending_request.routing_context.should_backoff = True
        job = next((arg for arg in pending_request.args if isinstance(arg, PredictJob)), None)
        avoid = frozenset[str]() if job is None else job.avoid
        digest = pending_request.metadata.session_id or pending_request.metadata.internal_request_id
        candidates = [self._candidate(replica) for replica in candidate_replicas]
        chosen = self._placement.choose(
            digest,
            candidates,
            digest_only=job is not None and job.image is None,
            avoid=avoid,
            # A request that comes again, because replicas were full or one failed, is no new demand.
            counts=first_round and not avoid,
        )
        if first_round and job is not None and chosen:
            self._metrics.routed(self._placement.why(digest, chosen[0], candidates))
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_id[candidate.replica_id]] for candidate in chosen]

    def _candidate(self, replica: RunningReplica) -> Candidate:
        metadata: Mapping[str, Any] = replica.replica_metadata
        stats: Mapping[str, Any] = replica.routing_stats
        unique_id = replica.replica_id.unique_id
        return Candidate(
            replica_id=unique_id,
            place=str(metadata.get("place", unique_id)),
            load=self.replica_queue_len_cache.get(replica.replica_id) or 0,
            # The metadata is of the start; a replica can be parked later.
            parked=bool(stats.get("parked", metadata.get("parked", False))),
        )
