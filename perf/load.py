"""A closed loop over HTTP that costs little: each connection sends a request when it has its answer.

A process of its own, which ``perf/serving.py`` starts: its CPU time is not the service's. Reads a job from
standard input as JSON, writes what it saw to standard output.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD_END = b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client. ``seen`` gets (start, end, status, body) of each answer."""

    def __init__(
        self, requests: Iterator[bytes], seen: list[tuple[float, float, int, bytes]]
    ) -> None:
        self._requests, self._seen = requests, seen
        self._received = bytearray()
        self._needed: int | None = None
        self._stopped = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._next()

    def stop(self) -> None:
        self._stopped = True

    def _next(self) -> None:
        request = next(self._requests, None)
        if self._stopped or request is None:
            self._transport.close()
            return
        self._started = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._needed is None:
            end = self._received.find(HEAD_END)
            if end < 0:
                return
            head = bytes(self._received[:end]).lower()
            self._status = int(head[9:12])
            length = head.index(b"content-length:") + 15
            self._body = end + len(HEAD_END)
            self._needed = self._body + int(head[length:].split(b"\r\n", 1)[0])
        if len(self._received) < self._needed:
            return
        now = time.perf_counter()
        self._seen.append((self._started, now, self._status, bytes(self._received[self._body :])))
        self._received.clear()
        self._needed = None
        self._next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


async def closed_loop(job: dict[str, Any]) -> dict[str, Any]:
    head = (
        f"POST {job['path']} HTTP/1.1\r\nHost: {job['host']}\r\nContent-Type: image/jpeg\r\n"
        "Content-Length: {length}\r\n\r\n"
    )
    bodies = [path.read_bytes() for path in sorted(Path(job["pictures"]).iterdir())]
    bodies = bodies[job.get("first", 0) :][: job.get("different") or len(bodies)]
    sent: Iterator[bytes] = (
        head.format(length=len(body)).encode() + body for body in itertools.cycle(bodies)
    )
    if job.get("requests"):
        sent = itertools.islice(sent, job["requests"])
    seen: list[tuple[float, float, int, bytes]] = []
    loop = asyncio.get_running_loop()
    host, _, port = job["host"].partition(":")
    clients = []
    cpu = time.process_time()
    start = time.perf_counter()
    for _ in range(job["clients"]):
        _, client = await loop.create_connection(lambda: Connection(sent, seen), host, int(port))
        clients.append(client)
    if job.get("seconds"):
        await asyncio.sleep(job["seconds"])
        for client in clients:
            client.stop()
    errors = [error for error in await asyncio.gather(*(c.ended for c in clients)) if error]
    end = time.perf_counter()
    cpu = time.process_time() - cpu
    # The first seconds fill the queues, the last empty them.
    first = start + job.get("warm_s", 0.0)
    last = start + job["seconds"] if job.get("seconds") else end
    counted = [one for one in seen if first <= one[1] <= last]
    return {
        "requests": len(seen),
        "errors": [repr(error) for error in errors],
        "statuses": Counter(status for _, _, status, _ in seen),
        "per_s": len(counted) / (last - first),
        "latency_ms": [round((end - start) * 1000, 3) for start, end, _, _ in counted],
        "cpu_s": cpu,
        "answers": [body.decode() for _, _, _, body in seen] if job.get("keep") else [],
        "refused": next((body.decode() for _, _, status, body in seen if status != 200), None),
    }


if __name__ == "__main__":
    json.dump(asyncio.run(closed_loop(json.load(sys.stdin))), sys.stdout)
