"""What the serving layer itself costs: the real application on simulated chips (60 ms an image, 20 ms a
prompt), over real HTTP, always beside an empty Serve application in the same mode and the same run.

throughput: closed loop, 720p JPEGs, all new, 2 prompts, so many chips, against what the chips could do, and
where the host's CPU time went, by process and by stage. cost: CPU time of a request without decoding and
without masks, beside the empty application's. latency: one client. together: four requests for one image.

    python perf/serving.py [throughput] [cost] [latency] [together] [--mode plain|throughput|haproxy] ...
        [--chips 1 2 4] [--out perf/results/serving.json]

Each part and mode is a process of its own and is written when it is done: what is there already of others
stays. The load generator is another process (``perf/load.py``); it runs on the same cores, its CPU time is
told apart. "Ideal" is what the chips could do with no host at all.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from perf.labelling import photo  # noqa: E402
from perf.served import PROMPTS, Served, cpu_seconds, on_path  # noqa: E402

PARTS = ("throughput", "cost", "latency", "together")
MODES = ("plain", "throughput", "haproxy")
CLIENTS_A_CHIP = 24
"""As many as a replica takes (``max_ongoing_requests``): in a closed loop with few, chips idle by chance."""

DIFFERENT = 640
"""Pictures; more than are under way at a time."""

SIZE = (1280, 720)


def pictures(folder: Path) -> Path:
    """720p JPEGs with about the detail of photos, no two with the same pixels."""
    folder.mkdir()
    drawn = []
    for number in range(8):
        photo(folder / "drawn.jpg", number, SIZE)
        drawn.append(np.asarray(Image.open(folder / "drawn.jpg")))
    (folder / "drawn.jpg").unlink()
    for number in range(DIFFERENT):
        pixels = drawn[number % len(drawn)].copy()
        pixels[:64, :64] = np.random.default_rng(number).integers(0, 256, (1, 1, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=92)
        (folder / f"{number:04d}.jpg").write_bytes(file.getvalue())
    return folder


def throughput(served: Served, chips: int, seconds: float) -> dict[str, Any]:
    from perf.serving_apps import IMAGE_S, PROMPT_S, SimulatedReplica, simulated

    name = f"chips{chips}"
    served.run(name, simulated(SimulatedReplica, chips, cache=False))
    served.load(name, clients=2 * chips, requests=8 * chips)  # imports, first calls
    before = served.get(f"/{name}/info")["replicas"]
    seen = served.load(
        name, "&mask_format=rle", clients=CLIENTS_A_CHIP * chips, seconds=seconds + 4.0, warm_s=4.0
    )
    after = served.get(f"/{name}/info")["replicas"]
    served.delete(name)
    requests, cores = seen["requests"], len(os.sched_getaffinity(0))
    ideal = chips / (IMAGE_S + len(PROMPTS) * PROMPT_S)
    stages = Counter[str]()
    for replica in after:
        stages.update(replica["cpu_s"])
    for replica in before:
        stages.subtract(replica["cpu_s"])
    path = on_path(seen["cpu_of"], name)
    everything = sum(seen["cpu_of"].values()) + seen["cpu_s"]
    return {
        "per_s": round(seen["per_s"], 2),
        "ideal_per_s": round(ideal, 2),
        "share_of_ideal": round(seen["per_s"] / ideal, 3),
        "latency_p50_ms": round(statistics.median(seen["latency_ms"]), 1),
        "host_cpu_share": round(everything / (seen["seconds"] * cores), 3),
        "cpu_ms_a_request": {who: per_request(s, requests) for who, s in path.items()},
        "background_cpu_ms_a_request": per_request(seen["cpu_of"].get("background", 0.0), requests),
        "load_generator_cpu_ms_a_request": per_request(seen["cpu_s"], requests),
        "replicas_cpu_ms_a_request_by_stage": {
            stage: per_request(s, requests) for stage, s in stages.items()
        }
        | {"event loop and the rest": per_request(path["replicas"] - stages.total(), requests)},
    }


def per_request(seconds: float, requests: int) -> float:
    return round(seconds * 1000 / requests, 2)


def cost(served: Served, seconds: float, rounds: int) -> dict[str, Any]:
    """Of an image that is cached, and no instances: nothing is decoded, no mask is made."""
    from perf.serving_apps import InstantReplica, empty, simulated

    served.run("sam3", simulated(InstantReplica, 1, cache=True))
    served.run("empty", empty())
    nothing = "&mask_format=none&threshold=0.99"
    for name in ("sam3", "empty"):
        served.load(name, nothing if name == "sam3" else "", clients=4, requests=200, different=24)
    found: dict[str, list[Any]] = {"sam3": [], "empty": []}
    for _ in range(rounds):
        for name, runs in found.items():
            query = nothing if name == "sam3" else ""
            runs.append(served.load(name, query, clients=4, seconds=seconds, different=24))
    idle = cpu_seconds()
    time.sleep(5)
    background = (cpu_seconds().total() - idle.total()) / 5
    result: dict[str, Any] = {
        "idle_cpu_share_of_a_core": round(background, 3),
        "body_bytes": round(statistics.mean(p.stat().st_size for p in served.pictures.iterdir())),
    }
    for name, runs in found.items():
        costs = [per_request(sum(on_path(r["cpu_of"], name).values()), r["requests"]) for r in runs]
        who = {w for r in runs for w in on_path(r["cpu_of"], name)}
        result[name] = {
            "cpu_ms_a_request": statistics.median(costs),
            "of_each_round": costs,
            "by_process": {
                w: round(statistics.median(
                    per_request(on_path(r["cpu_of"], name).get(w, 0.0), r["requests"]) for r in runs
                ), 2)
                for w in sorted(who)
            },
            "load_generator_cpu_ms_a_request": statistics.median(
                per_request(r["cpu_s"], r["requests"]) for r in runs
            ),
            "per_s": round(statistics.median(r["per_s"] for r in runs), 1),
        }  # fmt: skip
    result["more_than_empty_ms"] = round(
        result["sam3"]["cpu_ms_a_request"] - result["empty"]["cpu_ms_a_request"], 2
    )
    return result


def latency(served: Served, requests: int, rounds: int) -> dict[str, Any]:
    """One client. ``layer`` has an image that is cached and no masks; ``new`` decodes and makes masks."""
    from perf.serving_apps import (
        IMAGE_S,
        PROMPT_S,
        InstantReplica,
        SimulatedReplica,
        empty,
        simulated,
    )

    served.run("instant", simulated(InstantReplica, 1, cache=True))
    served.run("sam3", simulated(SimulatedReplica, 1, cache=False))
    served.run("empty", empty())
    runs: dict[str, tuple[str, str, int]] = {
        "empty": ("empty", "", 0),
        "layer": ("instant", "&mask_format=none&threshold=0.99", 24),
        "new": ("sam3", "&mask_format=rle", 0),
    }
    for name, query, different in runs.values():
        served.load(name, query, clients=1, requests=60, different=different)
    found: dict[str, list[float]] = {what: [] for what in runs}
    stages: dict[str, list[float]] = {}
    for number in range(rounds):
        for what, (name, query, different) in runs.items():
            seen = served.load(
                name, query, clients=1, requests=requests, different=different, keep=what == "new",
                first=0 if different else 60 + number * requests,
            )  # fmt: skip
            found[what] += seen["latency_ms"]
            for answer in seen["answers"]:
                for stage, ms in json.loads(answer)["timing_ms"].items():
                    stages.setdefault(stage, []).append(ms)
    chip_ms = (IMAGE_S + len(PROMPTS) * PROMPT_S) * 1000
    p50 = {what: statistics.median(times) for what, times in found.items()}
    stage_ms = {stage: round(statistics.median(times), 2) for stage, times in stages.items()}
    host_ms = stage_ms["decode"] + stage_ms["masks"] + stage_ms["encode"]
    return {
        "chip_ms": chip_ms,
        "p50_ms": {what: round(ms, 2) for what, ms in p50.items()},
        "p99_ms": {w: round(statistics.quantiles(t, n=100)[98], 2) for w, t in found.items()},
        "layer_more_than_empty_ms": round(p50["layer"] - p50["empty"], 2),
        "new_more_than_empty_and_chip_ms": round(p50["new"] - p50["empty"] - chip_ms, 2),
        "of_that_decode_masks_encode_ms": round(host_ms, 2),
        "new_stages_p50_ms": stage_ms,
    }


def together(served: Served) -> dict[str, Any]:
    """Four clients with a phrase each for one new image, while the chip has another one."""
    import threading

    import httpx

    from perf.serving_apps import SimulatedReplica, simulated

    served.run("sam3", simulated(SimulatedReplica, 1, cache=True))
    files = [path.read_bytes() for path in sorted(served.pictures.iterdir())[:2]]
    url = f"http://127.0.0.1:{served._port}/sam3/predict"
    answers: list[Any] = []

    def ask(data: bytes, *phrases: str) -> None:
        response = httpx.post(
            url, content=data, params={"prompts": phrases}, headers={"content-type": "image/jpeg"},
            timeout=60,
        )  # fmt: skip
        answers.append((response.status_code, response.json()))

    # The canary has had its image part, too.
    before = served.get("/sam3/info")["replicas"][0]
    # The chip is busy with these for 0.46 s while the four arrive.
    other = [f"other {number}" for number in range(20)]
    threads = [threading.Thread(target=ask, args=(files[0], *other))]
    threads += [
        threading.Thread(target=ask, args=(files[1], phrase))
        for phrase in ("car", "person", "dog", "tree")
    ]
    threads[0].start()
    while served.get("/sam3/info")["replicas"][0]["image_parts"] == before["image_parts"]:
        time.sleep(0.001)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    after = served.get("/sam3/info")["replicas"][0]
    runs = Counter({int(k): v for k, v in after["prompt_runs"].items()})
    runs.subtract({int(k): v for k, v in before["prompt_runs"].items()})
    runs[4] -= len(other) // 4
    return {
        "statuses": sorted(status for status, _ in answers),
        "image_parts": after["image_parts"] - before["image_parts"] - 1,
        "prompt_runs_by_phrases": {str(size): count for size, count in runs.items() if count},
    }


def run_part(part: str, mode: str, chips: list[int], work: Path, arguments: Any) -> dict[str, Any]:
    """One part in one mode, in this process."""
    import ray

    served = Served(mode, work)
    try:
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "throughput": lambda: {
                str(count): throughput(served, count, arguments.seconds) for count in chips
            },
            "cost": lambda: cost(served, arguments.seconds, arguments.rounds),
            "latency": lambda: latency(served, arguments.requests, arguments.rounds),
            "together": lambda: together(served),
        }
        return steps[part]()
    finally:
        ray.shutdown()
        served.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--chips", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of cost and latency")
    parser.add_argument("--requests", type=int, default=60, help="of each round of latency")
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--out", type=Path, default=ROOT / "perf/results/serving.json")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    if arguments.child:
        # Beside Ray's, whose warnings are no result.
        found = run_part(
            arguments.parts[0], arguments.mode[0], arguments.chips, arguments.child, arguments
        )
        (arguments.child / "found.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(prefix="sam3-serving-") as folder:
        drawn = pictures(Path(folder) / "pictures")
        for part in arguments.parts or PARTS:
            for mode in arguments.mode:
                counts = arguments.chips if part == "throughput" else [1]
                for count in counts:
                    measure(part, mode, count, drawn, arguments)


def settled(below: float = 0.1, most_s: float = 60.0) -> float:
    """Wait, but not for ever, until what was measured last has ended: the share of the CPU in use then."""
    deadline = time.monotonic() + most_s
    while True:
        busy = psutil.cpu_percent(interval=2.0) / 100
        if busy < below or time.monotonic() > deadline:
            return round(busy, 3)


def measure(part: str, mode: str, chips: int, drawn: Path, arguments: Any) -> None:
    """One part in a process of its own, added to the results."""
    busy_before = settled()
    with tempfile.TemporaryDirectory(prefix="sam3-serving-") as folder:
        work = Path(folder)
        (work / "pictures").symlink_to(drawn)
        command = [
            sys.executable, __file__, part, "--mode", mode, "--chips", str(chips), "--child", folder,
            "--seconds", str(arguments.seconds), "--rounds", str(arguments.rounds),
            "--requests", str(arguments.requests),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        found = json.loads((work / "found.json").read_text())
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    told = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python perf/serving.py", *sys.argv[1:]]),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        "cpu_share_before": busy_before,
        "note": arguments.note,
    }
    of_mode = results.setdefault(part, {}).setdefault(mode, {})
    if part == "throughput":
        of_mode[str(chips)] = told | {"result": found[str(chips)]}
    else:
        of_mode.update(told | {"result": found})
    print(json.dumps({part: {mode: found}}, indent=2), flush=True)
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
