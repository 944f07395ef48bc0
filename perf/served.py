"""A Ray of its own with Serve in one proxy mode, load on it, and the CPU time of each process meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]

PROMPTS = ("car", "person")


class Served:
    """A Ray of its own with Serve in one mode, and what is deployed in it."""

    def __init__(self, mode: str, work: Path) -> None:
        from sam3_ray.local_ray import keep_ray_on_loopback
        from sam3_ray.serve import proxies

        keep_ray_on_loopback()
        self._folder = proxies.make_folder()
        os.environ.update(
            proxies.environment(
                mode, self._folder, largest_bytes=proxies.largest_message(32 << 20)
            ),  # type: ignore[arg-type]
            RAY_USAGE_STATS_ENABLED="0",
            PYTHONPATH=str(ROOT),
        )
        import ray
        from ray import serve

        ray.init(
            address="local", num_cpus=64, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR", object_store_memory=512 << 20,
        )  # fmt: skip
        self._port = proxies._free_port(8123)
        serve.start(http_options={"host": "127.0.0.1", "port": self._port})
        self.mode = mode
        self.pictures = work / "pictures"

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, name: str, application: Any) -> None:
        import logging

        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.run(application, name=name, route_prefix=f"/{name}")
        deadline = time.monotonic() + 120
        # No picture: 415 from the real application, 200 from the empty one.
        while (status := self.post(name, b"?")) not in (200, 415):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} does not answer but with {status}")
            time.sleep(0.1)

    def delete(self, name: str) -> None:
        from ray import serve

        serve.delete(name)

    def get(self, path: str) -> Any:
        import httpx

        response = httpx.get(f"http://127.0.0.1:{self._port}{path}", timeout=60)
        return response.json() if response.status_code == 200 else None

    def post(self, name: str, body: bytes) -> int:
        import httpx

        url = f"http://127.0.0.1:{self._port}/{name}/predict"
        headers = {"content-type": "image/jpeg"}
        return httpx.post(url, content=body, headers=headers, timeout=60).status_code

    def load(self, name: str, query: str = "", **job: Any) -> dict[str, Any]:
        """A closed loop; what it saw, and the CPU seconds of each process meanwhile."""
        job |= {
            "host": f"127.0.0.1:{self._port}",
            "path": f"/{name}/predict?" + "&".join(f"prompts={p}" for p in PROMPTS) + query,
            "pictures": str(self.pictures),
        }
        before, started = cpu_seconds(), time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(ROOT / "perf/load.py")],
            input=json.dumps(job), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr)
        seen: dict[str, Any] = json.loads(done.stdout)
        seconds = time.perf_counter() - started
        after = cpu_seconds()
        if seen["errors"] or set(seen["statuses"]) != {"200"}:
            raise RuntimeError(
                f"not all is well: {seen['statuses']} {seen['errors'][:3]} {seen['refused']}"
            )
        spent = {who: after[who] - before[who] for who in after if after[who] - before[who] > 0}
        return seen | {"cpu_of": spent, "seconds": seconds}


def cpu_seconds() -> Counter[str]:
    """CPU seconds so far of all processes below this one, by what they are."""
    spent: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent[kind_of(title)] += times.user + times.system  # type: ignore[assignment]
    return spent


def kind_of(title: str) -> str:
    """``sam3 ingress``, ``empty replicas``, ``proxy``, ...; what no request passes is ``background``."""
    if title.startswith("ray::ServeReplica:"):
        _, application, deployment = title.removeprefix("ray::").split(":")[:3]
        whose = "empty" if application == "empty" else application
        return f"{whose} {'ingress' if deployment.startswith('Ingress') else 'replicas'}"
    if title.startswith("ray::ProxyActor"):
        return "proxy"
    if "haproxy.cfg" in title:
        return "haproxy"
    return "background"


def on_path(spent: dict[str, float], name: str) -> dict[str, float]:
    """What the requests of one application passed."""
    return {
        who.removeprefix(f"{name} "): seconds
        for who, seconds in spent.items()
        if who in ("proxy", "haproxy") or who.startswith(f"{name} ")
    }
