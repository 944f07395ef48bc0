"""Throughput and memory of ``label_images``.

chips: 1, 2 and 4 simulated chips (60 ms an image, 20 ms a prompt, JPEG 720p, 2 prompts): how busy each is
from its first image to its last, and the host's CPU time. cpu: the demo checkpoint on the CPU against a loop
of ``model(image, prompts)`` at its best number of threads. memory: 5,000 small pictures, then 200 of 8000 x
6000, through 2 actors: memory of all processes over time. coco: peak memory of writing a million instances.

    python perf/labelling.py [chips] [cpu] [memory] [coco] [--out perf/results/labelling.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.data.simulated import open_simulated  # noqa: E402

PROMPTS = ["car", "person"]
IMAGE_S, PROMPT_S = 0.060, 0.020
CPU_PROMPTS = ["red circle", "blue star"]


def photo(path: Path, number: int, size: tuple[int, int]) -> None:
    """A JPEG with about the detail of a photo: noise of several scales."""
    draw = np.random.default_rng(number)
    picture = np.zeros((size[1], size[0], 3), np.float32)
    for scale, weight in ((160, 1.0), (40, 0.5), (8, 0.2)):
        small = draw.random((max(2, size[1] // scale), max(2, size[0] // scale), 3), np.float32)
        layer = Image.fromarray((small * 255).astype(np.uint8)).resize(
            size, Image.Resampling.BICUBIC
        )
        picture += weight * np.asarray(layer, np.float32)
    Image.fromarray((picture / 1.7).astype(np.uint8)).save(path, "JPEG", quality=85)


def pictures(folder: Path, count: int, size: tuple[int, int], different: int) -> Path:
    """So many files, of which so many are drawn and the others differ in their last bytes only."""
    folder.mkdir()
    for number in range(different):
        photo(folder / f"{number:05d}.jpg", number, size)
    for number in range(different, count):
        data = (folder / f"{number % different:05d}.jpg").read_bytes()
        (folder / f"{number:05d}.jpg").write_bytes(data + number.to_bytes(4, "big"))
    return folder


def on_chips(count: int, work: Path, images: int) -> dict[str, Any]:
    """One run on simulated chips that Ray counts as TTNPU."""
    import ray

    from sam3_ray.data import label_images

    source = work / "720p"
    if not source.exists():
        pictures(source, 1600, (1280, 720), 40)
    names = sorted(source.iterdir())[: images * count]
    listed = work / f"chips{count}.txt"
    listed.write_text("\n".join(map(str, names)))
    reports = work / f"reports{count}"
    reports.mkdir()
    ray.init(
        address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        resources={"TTNPU": count}, object_store_memory=256 << 20,
    )  # fmt: skip
    try:
        summary = label_images(
            listed, PROMPTS, work / f"out{count}", chips=count, formats=["parquet"],
            open_engine=open_simulated(
                image_s=IMAGE_S, prompt_s=PROMPT_S, image_size=1008, upstreams_resize=True, report=reports
            ),
        )  # fmt: skip
    finally:
        ray.shutdown()
    told = [json.loads(path.read_text()) for path in reports.iterdir()]
    told = [one for one in told if one["images"]]
    busy = [one["busy_s"] / (one["end"] - one["start"]) for one in told]
    span = max(one["end"] for one in told) - min(one["start"] for one in told)
    return {
        "chips": count,
        "images": summary.images,
        "busy_share_of_each": [round(share, 3) for share in busy],
        "busy_share": round(sum(one["busy_s"] for one in told) / (span * count), 3),
        "images_per_s": round(summary.images / span, 2),
        "ideal_images_per_s": round(count / (IMAGE_S + len(PROMPTS) * PROMPT_S), 2),
        "actors_cpu_ms_an_image": round(
            sum(one["cpu_s"] for one in told) / summary.images * 1000, 1
        ),
    }


def host_stages(work: Path) -> dict[str, float]:
    """Host milliseconds of each stage for one 720p image, one thread."""
    from sam3_ray.data.labels import label_of
    from sam3_ray.images import ImageSource
    from sam3_ray.prompt import Prompt, Request

    data = next((work / "720p").iterdir()).read_bytes()
    engine = open_simulated(image_size=1008, upstreams_resize=True)()
    spent = dict.fromkeys(("decode", "prepare", "masks_and_rle"), 0.0)
    rounds = 20
    for round_ in range(rounds + 1):
        if round_ == 1:  # the first one imports
            spent = dict.fromkeys(spent, 0.0)
        start = time.perf_counter()
        pixels = ImageSource.of(data).pixels()
        decoded = time.perf_counter()
        engine.backend.prepare(pixels)
        prepared = time.perf_counter()
        [grounded] = engine.ground([Request(ImageSource.of(pixels), tuple(map(Prompt, PROMPTS)))])
        before = time.perf_counter()
        label_of(grounded, "rle")
        spent["decode"] += decoded - start
        spent["prepare"] += prepared - decoded
        spent["masks_and_rle"] += time.perf_counter() - before
    return {name: round(seconds / rounds * 1000, 1) for name, seconds in spent.items()}


LOOP = """
import json, sys, time
from sam3_ray import Sam3
paths = sys.argv[2:]
with Sam3.from_pretrained("demo", backend="cpu", num_threads=int(sys.argv[1])) as model:
    model(paths[0], {prompts})
    start = time.perf_counter()
    for path in paths:
        model(path, {prompts})
    print(json.dumps(len(paths) / (time.perf_counter() - start)))
"""


def on_cpu(work: Path, images: int, rounds: int = 5) -> dict[str, Any]:
    """The loop at each number of threads, then labelling, in turns: a machine that is shared with others has
    fast and slow minutes. Medians of the rounds."""
    source = work / "cpu"
    pictures(source, images, (960, 640), 20)
    paths = sorted(map(str, source.iterdir()))
    cpus = len(os.sched_getaffinity(0))
    loops: dict[int, list[float]] = {threads: [] for threads in range(1, cpus + 1)}
    labelled: list[float] = []
    for number in range(rounds):
        for threads, rates in loops.items():
            done = subprocess.run(
                [sys.executable, "-c", LOOP.format(prompts=CPU_PROMPTS), str(threads), *paths],
                capture_output=True, text=True, check=True, timeout=1200,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip
            rates.append(round(float(done.stdout), 2))
        labelled.append(round(label_rate(source, work / f"cpu-out{number}"), 2))
    best = max(loops, key=lambda threads: statistics.median(loops[threads]))
    return {
        "images": images,
        "loop_images_per_s_by_threads": loops,
        "label_images_per_s": labelled,
        "best_threads": best,
        "ratio_to_best_loop": round(
            statistics.median(labelled) / statistics.median(loops[best]), 2
        ),
    }


def label_rate(source: Path, out: Path) -> float:
    """Images a second from the first batch to the last, as the loop is timed without its first image."""
    from sam3_ray.data import label_images

    told: list[tuple[float, int]] = []
    label_images(
        source, CPU_PROMPTS, out, chips="cpu", formats=["parquet"], repo_id="demo",
        on_progress=lambda progress: told.append((time.perf_counter(), progress.done)),
    )  # fmt: skip
    (start, before), (end, after) = told[0], told[-1]
    return (after - before) / (end - start)


def watched(run: Callable[[], object], every_s: float = 2.0) -> list[dict[str, Any]]:
    """Memory of this process and all below it, and what Ray has in its object store, while something runs."""
    samples: list[dict[str, Any]] = []
    ended = threading.Event()
    started = time.monotonic()

    def look() -> None:
        while not ended.wait(every_s):
            actors, driver, others = [], 0, 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    title = " ".join(process.cmdline())
                    memory = process.memory_info()
                except psutil.NoSuchProcess:
                    continue
                own = (memory.rss - memory.shared) >> 20
                if process.pid == os.getpid():
                    driver = own
                elif title.startswith("ray::MapWorker"):
                    actors.append(own)
                else:
                    others += own
            spilled = sum(
                p.stat().st_size for p in Path("/tmp/ray").glob("session_latest/ray_spilled*/*")
            )
            samples.append(
                {
                    "s": round(time.monotonic() - started), "driver_mib": driver, "actors_mib": actors,
                    "other_ray_mib": others, "all_mib": driver + sum(actors) + others,
                    "object_store_mib": psutil.disk_usage("/dev/shm").used >> 20, "spilled_bytes": spilled,
                }
            )  # fmt: skip
            print(samples[-1], "load", round(os.getloadavg()[0], 1), flush=True)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        run()
    finally:
        ended.set()
        thread.join()
    return samples


def memory(work: Path, small: int, huge: int) -> dict[str, Any]:
    """Two actors on simulated chips."""
    import ray

    from sam3_ray.data import label_images

    found = {}
    for name, count, size, different in (
        ("small", small, (640, 480), 50),
        ("huge", huge, (8000, 6000), 2),
    ):
        source = pictures(work / name, count, size, different)
        ray.init(
            address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            resources={"TTNPU": 2}, object_store_memory=256 << 20,
        )  # fmt: skip
        try:
            samples = watched(
                lambda source=source, name=name: label_images(
                    source, PROMPTS, work / f"{name}-out", chips=2,
                    open_engine=open_simulated(image_s=0.005, image_size=1008, upstreams_resize=True),
                )
            )  # fmt: skip
        finally:
            ray.shutdown()
        shutil.rmtree(source)
        both = [sample for sample in samples if len(sample["actors_mib"]) == 2]
        half = len(both) // 2
        found[name] = {
            "images": count,
            "size": size,
            "largest_actor_mib_first_half": max(
                (max(s["actors_mib"]) for s in both[:half]), default=0
            ),
            "largest_actor_mib_second_half": max(
                (max(s["actors_mib"]) for s in both[half:]), default=0
            ),
            "largest_all_mib": max((sample["all_mib"] for sample in samples), default=0),
            "object_store_mib": max((sample["object_store_mib"] for sample in samples), default=0),
            "spilled_bytes": max((sample["spilled_bytes"] for sample in samples), default=0),
            "over_time": samples[:: max(1, len(samples) // 40)],
        }
    return found


def coco(work: Path, instances: int) -> dict[str, Any]:
    """In a process of its own, whose peak is measured."""
    done = subprocess.run(
        [sys.executable, __file__, "--coco-child", str(work), "--instances", str(instances)],
        capture_output=True, text=True, check=True, timeout=3000,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def coco_child(work: Path, instances: int) -> None:
    from sam3_ray.data.coco import write_coco
    from sam3_ray.data.manifest import Arguments
    from sam3_ray.data.schema import labels_file_schema

    schema = labels_file_schema("rle")
    counts = (
        "miR;>^c07J6I5H7H9J5N3N1O2M201N1O1O1O2N100O1O2N1O1O2N1O1O2O0O101N;F1N1O2O0O2O1N1O2N2O1N2N"
        * 3
    )
    one = {"prompt": "car", "score": 0.9, "box": [1.0, 2.0, 3.0, 4.0], "area": 4.0}
    one["mask"] = {"size": [720, 1280], "counts": counts}
    files, per_image, per_file = [], 20, 512
    images = instances // per_image
    for first in range(0, images, per_file):
        rows = [
            {
                "image_id": n + 1, "path": f"/data/{n}.jpg", "digest": "", "width": 1280, "height": 720,
                "presence": [], "instances": [one] * per_image,
            }
            for n in range(first, min(first + per_file, images))
        ]  # fmt: skip
        files.append(work / f"part-{len(files):05d}.parquet")
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), files[-1], compression="zstd")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    asked = Arguments("/data", ["car"], 0.5, 50, "rle", 512, "demo", "", "cpu", True, 1)
    write_coco(work / "instances.json", files, asked, (f"/data/{n}.jpg" for n in range(images)))
    print(
        json.dumps(
            {
                "instances": images * per_image,
                "seconds": round(time.perf_counter() - start, 1),
                "file_mib": (work / "instances.json").stat().st_size >> 20,
                "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                "peak_mib_before_writing": round(before),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="of chips, cpu, memory, coco (default: all)")
    parser.add_argument("--images", type=int, default=300, help="for each chip (default: 300)")
    parser.add_argument("--small", type=int, default=5000, help="small pictures of memory")
    parser.add_argument("--huge", type=int, default=200, help="huge pictures of memory")
    parser.add_argument("--instances", type=int, default=1_000_000, help="of the COCO file")
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--out", type=Path, default=ROOT / "perf/results/labelling.json")
    parser.add_argument("--coco-child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.coco_child:
        coco_child(arguments.coco_child, arguments.instances)
        return
    from sam3_ray.local_ray import keep_ray_on_loopback

    keep_ray_on_loopback()
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for part in arguments.parts or ("chips", "cpu", "memory", "coco"):
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            if part == "chips":
                found: Any = [on_chips(count, work, arguments.images) for count in (1, 2, 4)]
                found = {"runs": found, "host_ms_an_image_by_stage": host_stages(work)}
            elif part == "cpu":
                found = on_cpu(work, arguments.images)
            elif part == "memory":
                found = memory(work, arguments.small, arguments.huge)
            elif part == "coco":
                found = coco(work, arguments.instances)
            else:
                parser.error(f"{part!r} is none of chips, cpu, memory, coco")
        results[part] = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python perf/labelling.py", *sys.argv[1:]]),
            "cpus": len(os.sched_getaffinity(0)),
            "load_after": round(os.getloadavg()[0], 2),
            "note": arguments.note,
            "result": found,
        }
        print(json.dumps({part: found}, indent=2), flush=True)
        arguments.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
