"""Four times what the chips can do, on simulated chips behind the real ingress: who is refused, what stays.

How quickly a request is refused, and the share of the host's processors, are printed: figures, no assertions.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from perf.serving_apps import SimulatedReplica, simulated
from tests.serve.fakes import assert_problem
from tests.serve.test_service import drawn

CHIPS, PROMPT_S = 2, 0.5
CAPACITY = CHIPS / PROMPT_S
"""Requests a second of pictures that are cached, one phrase each."""

OVER = 4
RAW = {"content-type": "image/png"}


class SlowReplica(SimulatedReplica):
    image_s, prompt_s = 0.2, PROMPT_S


@pytest.fixture(scope="module")
def slow(ray_url: str) -> Iterator[httpx.Client]:
    from ray import cloudpickle, serve

    import perf.serving_apps
    from tests.serve import test_overload

    for module in (perf.serving_apps, test_overload):
        cloudpickle.register_pickle_by_value(module)
    application = simulated(SlowReplica, CHIPS, cache=True, max_queued_requests=8)
    serve.run(application, name="slow", route_prefix="/slow")
    with httpx.Client(base_url=f"{ray_url}/slow", timeout=120) as client:
        yield client
    serve.delete("slow")


@dataclass
class Seen:
    """What came of a load."""

    statuses: Counter[int] = field(default_factory=Counter)
    refusals: list[httpx.Response] = field(default_factory=list)
    refused_after_ms: list[float] = field(default_factory=list)


async def offer(client: httpx.Client, seconds: float) -> Seen:
    """Requests at a steady rate, whatever becomes of those before."""
    seen = Seen()
    pictures = [drawn(15_000 + i) for i in range(16)]

    async def one(web: httpx.AsyncClient, number: int) -> None:
        response = await web.post(
            "/predict",
            content=pictures[number % 16],
            headers=RAW,
            # Of their own: requests for one phrase of one image would be one prompt run.
            params={"prompts": f"car {number % 64}"},
        )
        seen.statuses[response.status_code] += 1
        if response.status_code == 503:
            seen.refusals = [*seen.refusals[-20:], response]
            [after] = re.findall(r"after-body;dur=([\d.]+)", response.headers["server-timing"])
            seen.refused_after_ms.append(float(after))

    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(base_url=client.base_url, timeout=120, limits=limits) as web:
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(int(seconds * OVER * CAPACITY)):
                await asyncio.sleep(
                    max(0.0, started + number / (OVER * CAPACITY) - time.monotonic())
                )
                group.create_task(one(web, number))
    return seen


def family() -> dict[int, psutil.Process]:
    return {process.pid: process for process in psutil.Process().children(recursive=True)}


def rss_mb() -> dict[int, float]:
    found = {}
    for pid, process in family().items():
        try:
            found[pid] = process.memory_info().rss / 1e6
        except psutil.NoSuchProcess:
            continue
    return found


def title_of(pid: int) -> str:
    words = psutil.Process(pid).cmdline()
    return " ".join(Path(word).name for word in words[:3])[:60]


def cpu_s() -> float:
    """Of the service's processes, and not of this one, which makes the load."""
    total = 0.0
    for process in family().values():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def overload(client: httpx.Client, warm_s: float, measured_s: float) -> float:
    """Overload; the growth of the process that grew most, in MB a minute after the warm time."""
    asyncio.run(offer(client, warm_s))
    before, cpu, started = rss_mb(), cpu_s(), time.monotonic()
    seen = asyncio.run(offer(client, measured_s))
    elapsed = time.monotonic() - started
    after = rss_mb()
    assert set(seen.statuses) == {200, 503}, seen.statuses
    for response in seen.refusals:
        assert_problem(response, 503, "over-capacity")
        assert int(response.headers["retry-after"]) >= 1
    growth = {pid: (after[pid] - before[pid]) / (measured_s / 60) for pid in before if pid in after}
    assert growth
    refused = sorted(seen.refused_after_ms)
    share = (cpu_s() - cpu) / elapsed / (os.cpu_count() or 1)
    most = sorted(growth, key=growth.__getitem__, reverse=True)[:4]
    growing = ", ".join(
        f"{title_of(pid)} {growth[pid]:.2f} (of {after[pid]:.0f} MB)" for pid in most
    )
    print(
        f"\n{OVER} x {CAPACITY:g} requests a second for {measured_s:g} s: {dict(seen.statuses)}; refused "
        f"after the body: median {refused[len(refused) // 2]:.1f} ms, p99 "
        f"{refused[int(0.99 * (len(refused) - 1))]:.1f} ms, most {refused[-1]:.1f} ms; the service took "
        f"{share:.0%} of the host's processors; of {len(growth)} processes these grew most, in MB/min: "
        f"{growing}"
    )
    return max(growth.values())


def test_over_capacity_is_refused_and_then_answered_again(slow: httpx.Client) -> None:
    overload(slow, 10.0, 50.0)
    for number in range(8):
        response = slow.post(
            "/predict", content=drawn(16_000 + number), headers=RAW, params={"prompts": "car"}
        )
        assert response.status_code == 200, response.text


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ten_minutes_over_capacity_keep_no_memory(slow: httpx.Client) -> None:
    assert overload(slow, 120.0, 480.0) < 1.0
