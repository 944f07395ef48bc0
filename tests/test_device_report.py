"""``make device`` on an emulated chip: it runs to the end, and says that its times mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(400)
def test_the_report_is_made(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "perf/device.py", "--emulated", "--requests", "60", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"SAM3_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "emulated: no meaning" in done.stdout
    report = json.loads(out.read_text())
    assert report["times"] == "emulated: no meaning"
    assert report["model"]["backend"] == "blackhole"
    assert set(report["stages"]) == {"image", "phrase", "prompt", "four prompts"}
    stability = report["stability"]
    assert stability["repeated"] > 10
    assert (stability["with_other_bits"], stability["failures"]) == (0, [])


def test_no_chip_is_said_plainly() -> None:
    done = subprocess.run(
        [sys.executable, "perf/device.py"],
        cwd=ROOT,
        env=os.environ | {"TT_VISIBLE_DEVICES": "none"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert (
        done.stderr.strip() == "no Tenstorrent chip is visible here: `sam3-ray doctor` tells more"
    )
