"""What the first calls cost: the table of spec/PYTHON.md ("Measured"), for the backend that is here.

    python perf/first_call.py [--checkpoint demo] [--backend auto] [--calls 20] [--rows "1 prompt"]

One fresh process for each cell; every call uses a new image. Columns: seconds of ``from_pretrained``, then
milliseconds of call 1, 2, 10 and the median of calls 3 to the last ("steady"), before warm-up, with the
default warm-up, and with the prompts listed. The figures that the one-chip server's author published stand
beside them: another program, on a chip, with SAM3's own weights.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
LISTED = ["car", "person", "tree", "road"]
JPEG_SIZES = (
    (333, 500), (500, 375), (640, 480), (640, 427), (800, 600),
    (1024, 683), (1200, 800), (1280, 720), (1600, 900),
)  # fmt: skip
"""(width, height): nine, from 333x500 to 1600x900, as in the published set."""


@dataclass(frozen=True)
class Row:
    """One kind of call.

    Attributes:
        prompts: the phrases of a call.
        images: ``png`` and ``numpy`` of 1920x1080, ``square`` PNG of 1008x1008, ``jpeg`` files of nine sizes.
        options: of the call.
        new_prompt: another phrase on every call.
    """

    prompts: tuple[str, ...]
    images: str = "png"
    options: dict[str, Any] = field(default_factory=dict)
    new_prompt: bool = False


PUBLISHED = json.loads((ROOT / "perf/published/first_call.json").read_text())

ROWS = {
    "1 prompt": Row(("car",)),
    "2 prompts": Row(("car", "person")),
    "4 prompts": Row(("car", "person", "tree", "road")),
    "1 prompt, numpy input": Row(("car",), "numpy"),
    "1 prompt, mask logits only": Row(
        ("car",), options={"return_masks": False, "return_mask_logits": True}
    ),
    "1 prompt, 200 instances": Row(("car",), options={"threshold": 0.05, "max_instances": 200}),
    "1 prompt, square": Row(("car",), "square"),
    "1 prompt, jpeg": Row(("car",), "jpeg"),
    "a new prompt on every call": Row(("car",), new_prompt=True),
}
WARM_UPS: dict[str, Any] = {"before": False, "defaults": None, "listed": {"prompts": LISTED}}


def images_of(kind: str, count: int, folder: Path) -> Iterator[Any]:
    """``count`` different photo-like images, as a call takes them."""
    from sam3_ray.warmup import photo_like

    for i in range(count):
        width, height = {
            "square": (1008, 1008),
            "jpeg": JPEG_SIZES[i % len(JPEG_SIZES)],
        }.get(kind, (1920, 1080))
        pixels = np.roll(photo_like(height, width), (17 * i, 31 * i), (0, 1))
        if kind == "numpy":
            yield pixels
            continue
        path = folder / f"{i}.{'jpg' if kind == 'jpeg' else 'png'}"
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "JPEG" if kind == "jpeg" else "PNG")
        path.write_bytes(content.getvalue())
        yield path


def measure(name: str, warm_up: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One cell, in this process."""
    from sam3_ray import Sam3

    row = ROWS[name]
    where = (
        {"repo_id": "demo"}
        if arguments.checkpoint == "demo"
        else {"checkpoint_path": arguments.checkpoint}
        if arguments.checkpoint
        else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        images = list(images_of(row.images, arguments.calls, Path(folder)))
        started = time.perf_counter()
        model = Sam3.from_pretrained(
            **where, backend=arguments.backend, warmup_variants=WARM_UPS[warm_up]
        )
        load_s = time.perf_counter() - started
        calls = []
        for i, image in enumerate(images):
            phrases = [f"{row.prompts[0]} number {i}"] if row.new_prompt else list(row.prompts)
            started = time.perf_counter()
            model(image, phrases, **row.options)
            calls.append(round((time.perf_counter() - started) * 1e3, 1))
        info = model.info
        model.close()
    return {
        "from_pretrained_s": round(load_s, 1),
        "call_1_ms": calls[0],
        "call_2_ms": calls[1],
        "call_10_ms": calls[9],
        "steady_ms": round(statistics.median(calls[2:]), 1),
        "calls_ms": calls,
        "backend": {
            key: info[key]
            for key in ("backend", "checkpoint", "grid", "dispatch", "precision", "num_threads")
            if key in info
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", default="", help="demo, or a path; default: facebook/sam3")
    parser.add_argument("--backend", default="auto", choices=("auto", "cpu", "blackhole"))
    parser.add_argument("--calls", type=int, default=20, help="of each cell, at least 10")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--out", type=Path, default=ROOT / "perf/results/first_call.json")
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.calls < 10:
        parser.error(f"--calls must be at least 10, got {arguments.calls}")
    if arguments.cell:
        print(json.dumps(measure(*arguments.cell, arguments)))
        return 0
    rows: dict[str, dict[str, Any]] = {}
    for name in arguments.rows:
        rows[name] = {}
        for warm_up in WARM_UPS:
            if ROWS[name].new_prompt and warm_up == "listed":
                continue
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--cell", name, warm_up],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            cell = json.loads(done.stdout.splitlines()[-1])
            rows[name][warm_up] = cell | {"published": PUBLISHED["rows"][name].get(warm_up)}
            print(
                f"{name:28} {warm_up:9} {cell['from_pretrained_s']:6.1f} s, "
                + " / ".join(
                    f"{cell[k]:.0f}" for k in ("call_1_ms", "call_2_ms", "call_10_ms", "steady_ms")
                ),
                flush=True,
            )
    result = {
        "what": "from_pretrained in seconds, calls in ms",
        "published": {key: PUBLISHED[key] for key in ("source", "columns")},
        "machine": {"cpus": len(os.sched_getaffinity(0)), "machine": platform.machine()},
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
