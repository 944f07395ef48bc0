"""How long from typing ``sam3-ray serve`` to the first answer, against a bare Serve application.

Both are started in fresh processes, in turns, in the same run: ``sam3-ray serve`` with the demo checkpoint,
whose first answer is one of ``POST /predict``; and the least that Ray allows, a script that starts a local
Ray without dashboard and runs one FastAPI deployment (``BARE``). CPU seconds are those of all processes of
the start: on a machine that is busy with other things they say more than the clock.

    python perf/startup.py [--repeats 5] [--out perf/results/startup.json]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "examples/parade.png"
LIMIT_S = 300.0
TARGET_S = 15.0

BARE = """
import sys
import ray
from ray import serve
from fastapi import FastAPI

app = FastAPI()

@serve.deployment
@serve.ingress(app)
class Bare:
    @app.post("/predict")
    def predict(self) -> dict[str, bool]:
        return {"ok": True}

ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(Bare.bind(), blocking=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="starts of each (default: 5)")
    parser.add_argument("--out", type=Path, default=ROOT / "perf/results/startup.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(BARE)
        # Started in a shell's background, SIGINT is ignored, and children would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        runs: dict[str, list[dict[str, float]]] = {"bare": [], "sam3-ray": []}
        for repeat in range(arguments.repeats):
            for name in runs:
                port = free_port()
                command = [sys.executable, str(bare), str(port)]
                if name == "sam3-ray":
                    command = [
                        str(Path(sys.executable).with_name("sam3-ray")),
                        *("serve", "--checkpoint", "demo", "--backend", "cpu", "--port", str(port)),
                    ]
                load = os.getloadavg()[0]
                seconds, cpu = first_answer(command, port, folder)
                print(
                    f"{repeat + 1}/{arguments.repeats} {name:9} {seconds:6.1f} s, {cpu:5.1f} CPU-s",
                    flush=True,
                )
                runs[name].append(
                    {"seconds": seconds, "cpu_seconds": cpu, "load_before": round(load, 2)}
                )
    medians = {name: median(of, "seconds") for name, of in runs.items()}
    difference = round(medians["sam3-ray"] - medians["bare"], 2)
    result = {
        "what": "seconds from starting the process to the first answer over HTTP",
        "command": "sam3-ray serve --checkpoint demo --backend cpu",
        "median_seconds": medians,
        "difference_seconds": difference,
        "target_difference_seconds": TARGET_S,
        "median_cpu_seconds": {name: median(of, "cpu_seconds") for name, of in runs.items()},
        "runs": runs,
        "conditions": conditions(),
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"medians {medians}; {difference} s more than bare (target: {TARGET_S:g})")


def median(runs: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(run[name] for run in runs), 2)


def first_answer(command: list[str], port: int, folder: str) -> tuple[float, float]:
    """Start, wait for the first 200 of ``POST /predict``, stop; seconds and CPU seconds until then."""
    data = PICTURE.read_bytes()
    log = Path(folder) / "output.log"
    with log.open("wb") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while not answers(port, data):
                if process.poll() is not None:
                    raise SystemExit(
                        f"{command} ended with {process.returncode}:\n{log.read_text()}"
                    )
                if time.perf_counter() - started > LIMIT_S:
                    raise SystemExit(f"{command}: no answer in {LIMIT_S:g} s:\n{log.read_text()}")
                time.sleep(0.05)
            return round(time.perf_counter() - started, 2), cpu_seconds(process.pid)
        finally:
            # Only the process itself, as Ctrl-C's effect on it: Ray's own children end with it.
            process.send_signal(signal.SIGINT)
            process.wait(60)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process, its descendants, and those of them that have ended."""
    parent = psutil.Process(pid)
    total = 0.0
    for process in [parent, *parent.children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return round(total, 2)


def answers(port: int, data: bytes) -> bool:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict?prompts=red%20circle",
        data=data,
        headers={"Content-Type": "image/png"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            return bool(response.status == 200)
    except OSError:  # nothing listens yet, or Serve has no route yet
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def conditions() -> dict[str, Any]:
    origin = getattr(importlib.util.find_spec("ray"), "origin", None)
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "ray": metadata.version("ray"),
        "torch": metadata.version("torch"),
        "niceness": os.nice(0),
        "packages_compiled": Path(importlib.util.cache_from_source(str(origin))).is_file(),
        "load_after": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
