"""Everything that needs a chip, into one file: the device tests and the first calls (``make device``).

    python perf/device.py [--checkpoint demo] [--out perf/results/device.json]

Exits with 2 where no chip is visible, with 1 where a test fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--checkpoint", default="", help="of the first calls; default: facebook/sam3"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "perf/results/device.json")
    arguments = parser.parse_args()
    from sam3_ray import chips

    machine = chips.look()
    if not machine.visible():
        print("no Tenstorrent chip is visible here: `sam3-ray doctor` tells more", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        tests = run_tests(Path(folder) / "tests.xml")
        calls = first_calls(Path(folder) / "calls.json", arguments.checkpoint)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "ttnn": metadata.version("ttnn"),
        "driver": machine.driver,
        "boards": [chip.card for chip in machine.visible()],
        "tests": tests,
        "first_call": calls,
        "predicted": json.loads((ROOT / "perf/results/roofline.json").read_text())["predictions"],
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{tests['passed']} device tests passed, {len(tests['failed'])} failed; {arguments.out}")
    return 1 if tests["failed"] or calls is None else 0


def run_tests(report: Path) -> dict[str, Any]:
    """The tests marked ``device``; the overlapping-memory check of traces is on (docs/blackhole.md)."""
    subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "device", f"--junitxml={report}"],
        cwd=ROOT,
        env=os.environ | {"TT_METAL_TRACE_ALLOC_TRACKING": "1"},
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


if __name__ == "__main__":
    raise SystemExit(main())
