"""Our own series beside Ray's, through ``ray.serve.metrics``; Prometheus scrapes them with Ray's.

Every counter and gauge exists from the start at zero, so that a chart is never empty; a histogram cannot,
and ``sam3_stage_ms`` comes with the first answer. Tags that Serve adds by itself (application, deployment,
replica) are there too. Prometheus sees ``ray_`` before each name, and ``_total`` after a counter's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

from sam3_ray.answers import STAGES
from sam3_ray.serve.errors import ProblemType
from sam3_ray.serve.request_log import CLIENT_GONE

STAGE_BUCKETS_MS: list[float] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 3e4, 6e4]

OUTCOMES = ("ok", "client_error", "failed", "cancelled")

LEVELS = ("file", "pixels", "miss")
"""Where an image was found: by its file's digest, not even decoded; by its pixels; or not."""

CHOICES = ("first", "hot", "overflow")
"""Which replica an image was sent to: its own; a copy, because it is hot; another, because its own had too
much to do."""


class IngressMetrics:
    """What the ingress counts."""

    def __init__(self) -> None:
        self._requests = _Total("sam3_http_requests", "HTTP requests by status.", ("status",))
        for status in sorted({200, CLIENT_GONE, *(kind.status for kind in ProblemType)}):
            self._requests.add(0, {"status": str(status)})

    def request(self, status: int) -> None:
        """One request has ended."""
        self._requests.add(1, {"status": str(status)})


class RouterMetrics:
    """What the router counts, in the ingress's process."""

    def __init__(self) -> None:
        self._routed = _Total("sam3_routed", "Requests by which replica they got.", ("choice",))
        for choice in CHOICES:
            self._routed.add(0, {"choice": choice})

    def routed(self, choice: str) -> None:
        """One request was sent; ``choice`` is one of ``CHOICES``."""
        self._routed.add(1, {"choice": choice})


class ReplicaMetrics:
    """What one replica counts.

    Args:
        chip: the chip's number, None on a CPU; a tag of every series.
    """

    def __init__(self, chip: int | None) -> None:
        self._chip = {"chip": "cpu" if chip is None else str(chip)}
        self._requests = _Total("sam3_requests", "Requests by outcome.", ("outcome", "chip"))
        self._images = _Total("sam3_images", "Images by what the cache had.", ("cache", "chip"))
        self._phrases = _Total("sam3_phrases", "Phrases by what the cache had.", ("cache", "chip"))
        self._instances = _Total("sam3_instances", "Instances found.", ("chip",))
        self._stages = Histogram(
            "sam3_stage_ms",
            description="Milliseconds of each stage of a request.",
            boundaries=STAGE_BUCKETS_MS,
            tag_keys=("stage", "chip"),  # type: ignore[arg-type]  # Ray's stub says one key
        )
        self._cache_bytes = Gauge(
            "sam3_image_cache_bytes",
            description="Bytes of image features kept.",
            tag_keys=("chip",),
        )
        self._cache_entries = Gauge(
            "sam3_image_cache_entries",
            description="Images whose features are kept.",
            tag_keys=("chip",),
        )
        self._parked = Gauge(
            "sam3_parked",
            description="1 where the chip is parked: it does not open, or computes garbage.",
            tag_keys=("chip",),
        )
        self._calls = _Total("sam3_device_calls", "Calls of the device.", ("chip",))
        self._call_requests = _Total("sam3_device_requests", "Requests of those calls.", ("chip",))
        self._call_seconds = _Total(
            "sam3_device_seconds", "Seconds in those calls: its rate is the busy share.", ("chip",)
        )
        self.device(0, 0, 0.0)
        self.parked(False)
        for outcome in OUTCOMES:
            self._requests.add(0, {"outcome": outcome} | self._chip)
        for level in LEVELS:
            self._images.add(0, {"cache": level} | self._chip)
        self.phrases(0, 0)
        self._instances.add(0, self._chip)
        self.cache({})

    def request(self, outcome: str) -> None:
        """One request ended; ``outcome`` is one of ``OUTCOMES``."""
        self._requests.add(1, {"outcome": outcome} | self._chip)

    def device(self, calls: int, requests: int, seconds: float) -> None:
        """The device's calls so far, their requests, and the seconds they took."""
        self._calls.reach(calls, self._chip)
        self._call_requests.reach(requests, self._chip)
        self._call_seconds.reach(seconds, self._chip)

    def phrases(self, hits: int, misses: int) -> None:
        """The phrases so far that were encoded before, and that were not."""
        self._phrases.reach(hits, {"cache": "hit"} | self._chip)
        self._phrases.reach(misses, {"cache": "miss"} | self._chip)

    def parked(self, parked: bool) -> None:
        """Whether the chip is parked; Ray drops a gauge that is not set again within two of its reports."""
        self._parked.set(float(parked), tags=self._chip)

    def answer(self, *, cached: bool, instances: int, timing_ms: Mapping[str, float]) -> None:
        """One request was answered."""
        level = "miss"
        if cached:
            level = "pixels" if timing_ms.get("decode", 0.0) > 0 else "file"
        self._images.add(1, {"cache": level} | self._chip)
        self._instances.add(instances, self._chip)
        for stage in ("queue", *STAGES):
            if stage in timing_ms:
                self._stages.observe(timing_ms[stage], tags={"stage": stage} | self._chip)

    def cache(self, image_cache: Mapping[str, Any]) -> None:
        """The image cache now, as ``Engine.stats`` has it: ``size`` in bytes, and ``entries``."""
        self._cache_bytes.set(float(image_cache.get("size", 0)), tags=self._chip)
        self._cache_entries.set(float(image_cache.get("entries", 0)), tags=self._chip)


class _Total:
    """A counter that can start at zero. Ray's refuses ``inc(0)``, which would leave the chart empty."""

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._counter = Counter(name, description=description, tag_keys=tag_keys)  # type: ignore[arg-type]

        self._reached: dict[frozenset[tuple[str, str]], float] = {}

    def reach(self, total: float, tags: dict[str, str]) -> None:
        """Count up to a total that is counted elsewhere."""
        key = frozenset(tags.items())
        self.add(total - self._reached.get(key, 0.0), tags)
        self._reached[key] = total

    def add(self, amount: float, tags: dict[str, str]) -> None:
        if amount > 0:
            self._counter.inc(amount, tags=tags)
        else:
            # The public method insists on more than zero; recording a zero is what creates the series.
            self._counter._record(0, tags=tags)
