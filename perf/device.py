"""Everything for the first person with a chip, into one file (``make device``).

    python perf/device.py [--checkpoint demo] [--requests 1000] [--out perf/results/device-report.json]
    python perf/device.py --emulated        # the same to the end on an emulated chip: its times mean nothing

What the machine has; the tests marked ``device``; the table of first calls; times of each stage beside the
roofline's predictions; mixed requests, of which every repetition must give the same bits. Exits with 2 where
no chip is visible, with 1 where something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

ROOT = Path(__file__).parents[1]
for folder in (ROOT, ROOT / "perf"):
    sys.path.insert(0, str(folder))

EMULATED = "emulated: no meaning"
OPERATION_TIMEOUT_S = "30"
"""A hang becomes an error; 5 s gave false alarms in long traces (docs/blackhole.md)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", default="", help="demo, or a path; default: facebook/sam3")
    parser.add_argument("--requests", type=int, default=1000, help="mixed ones, for stability")
    parser.add_argument(
        "--emulated", action="store_true", help="on an emulated chip, demo checkpoint"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "perf/results/device-report.json")
    arguments = parser.parse_args()
    os.environ.setdefault("TT_METAL_TRACE_ALLOC_TRACKING", "1")
    os.environ.setdefault("TT_METAL_OPERATION_TIMEOUT_SECONDS", OPERATION_TIMEOUT_S)
    from sam3_ray import chips

    machine = chips.look()
    if arguments.emulated:
        from tests import emulation

        emulation.start()
        arguments.checkpoint = "demo"
    elif not machine.visible():
        print("no Tenstorrent chip is visible here: `sam3-ray doctor` tells more", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "times": EMULATED if arguments.emulated else "measured on this machine",
        "ttnn": metadata.version("ttnn"),
        "driver": machine.driver,
        "boards": [chip.card for chip in machine.visible()],
        "doctor": doctor(),
    }
    with tempfile.TemporaryDirectory() as folder:
        if arguments.emulated:
            report["tests"] = f"{EMULATED}: they are tests/blackhole there"
            report["first_call"] = first_call_here()
        else:
            report["tests"] = run_tests(Path(folder) / "tests.xml")
            report["first_call"] = first_calls(Path(folder) / "calls.json", arguments.checkpoint)
    with open_model(arguments) as model:
        report["model"] = {key: value for key, value in model.info.items() if key != "config"}
        report["stages"] = stages(model)
        report["stability"] = stability(model, arguments.requests)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    return summary(report, arguments.out)


def open_model(arguments: argparse.Namespace) -> Any:
    """The model, with the best dispatch that is known to work."""
    from sam3_ray import Sam3

    where: dict[str, Any] = {}
    if arguments.checkpoint == "demo":
        where = {"repo_id": "demo"}
    elif arguments.checkpoint:
        where = {"checkpoint_path": arguments.checkpoint}
    return Sam3.from_pretrained(**where, backend="blackhole", warmup=0, precision="fast")


def doctor() -> str:
    """What ``sam3-ray doctor`` prints."""
    done = subprocess.run(
        [sys.executable, "-c", "from sam3_ray.cli import main; raise SystemExit(main(['doctor']))"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout


def run_tests(report: Path) -> dict[str, Any]:
    """The tests marked ``device``."""
    subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "device", f"--junitxml={report}"],
        cwd=ROOT,
        check=False,
    )
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"passed": len(cases) - len(failed), "failed": failed}


def first_calls(out: Path, checkpoint: str) -> Any:
    """What ``perf/first_call.py`` measures; None where it fails."""
    command = [sys.executable, str(ROOT / "perf/first_call.py"), "--out", str(out)]
    if checkpoint:
        command += ["--checkpoint", checkpoint]
    done = subprocess.run(command, cwd=ROOT, check=False)
    return json.loads(out.read_text()) if done.returncode == 0 else None


def first_call_here() -> Any:
    """One cell of that table in this process, where the emulation is."""
    import first_call

    options = argparse.Namespace(checkpoint="demo", backend="blackhole", calls=10)
    return {"1 prompt": {"before": first_call.measure("1 prompt", "before", options)}}


def stages(model: Any, repeats: int = 5) -> dict[str, Any]:
    """Milliseconds of each kind of work, medians, beside the roofline's predictions for this grid."""
    import ttnn

    from sam3_ray.warmup import photo_like

    backend = model.engine.backend
    device = backend._open.device
    prepared = backend.prepare(photo_like(1080, 1920))
    image = backend.encode_image(prepared)
    phrases = ["red circle", "car", "person", "tree"]
    text = backend.encode_text(phrases)

    def answer(count: int) -> None:
        grounding = backend.ground(image, text[:count])
        backend.read_masks(grounding.masks, [(i, 0) for i in range(count)])

    work: dict[str, Callable[[], Any]] = {
        "image": lambda: backend.encode_image(prepared).release(),
        "phrase": lambda: backend.encode_text(phrases[:1]),
        "prompt": lambda: answer(1),
        "four prompts": lambda: answer(4),
    }
    predicted = {}
    published = json.loads((ROOT / "perf/results/roofline.json").read_text())["predictions"]
    for p in published:
        if p["grid"] == model.info["grid"] and p["precision"] == model.info["precision"]:
            predicted = {name: kind["predicted_ms"] for name, kind in p["work"].items()}
    found = {}
    for name, run in work.items():
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            run()
            ttnn.synchronize_device(device)
            times.append((time.perf_counter() - started) * 1e3)
        found[name] = {
            "ms": round(statistics.median(times), 2),
            "predicted_ms_at_full_size": predicted.get(name),
        }
    image.release()
    return found


def stability(model: Any, requests: int) -> dict[str, Any]:
    """Mixed requests: new and cached images, 1 to 4 phrases; every repetition must give the same bits."""
    from sam3_ray.warmup import photo_like

    generator = random.Random(0)
    images = [np.roll(photo_like(90 + 13 * i, 160), i, 1) for i in range(6)]
    phrases = ["red circle", "a small star", "car", "black ring", "person", "tree"]
    lists = [tuple(generator.sample(phrases, 1 + i % 4)) for i in range(8)]
    seen: dict[tuple[int, tuple[str, ...]], list[bytes]] = {}
    different, failures = 0, []
    for i in range(requests):
        number = generator.randrange(len(images))
        asked = generator.choice(lists)
        try:
            answer = model(images[number], list(asked), threshold=0.0, max_instances=3)
        except Exception as error:  # noqa: BLE001 - a failure is a finding of the report
            failures.append(f"request {i}: {type(error).__name__}: {error}")
            if len(failures) == 10:
                break
            continue
        bits = [result.scores.tobytes() + result.boxes.tobytes() for result in answer]
        if seen.setdefault((number, asked), bits) != bits:
            different += 1
    return {
        "requests": requests,
        "repeated": requests - len(seen) - len(failures),
        "with_other_bits": different,
        "failures": failures,
    }


def summary(report: dict[str, Any], out: Path) -> int:
    """Say what came out, in a few lines; 0 where all is well."""
    print(f"times: {report['times']}")
    tests = report["tests"]
    if isinstance(tests, dict):
        print(f"device tests: {tests['passed']} passed, failed: {tests['failed'] or 'none'}")
    for name, stage in report["stages"].items():
        print(
            f"{name:13} {stage['ms']:9.1f} ms, predicted at full size {stage['predicted_ms_at_full_size']}"
        )
    stable = report["stability"]
    print(
        f"{stable['requests']} mixed requests, {stable['repeated']} of them repeated: "
        f"{stable['with_other_bits']} with other bits, {len(stable['failures'])} failed"
    )
    print(out)
    failed = isinstance(tests, dict) and tests["failed"]
    wrong = stable["with_other_bits"] or stable["failures"] or report["first_call"] is None
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
