"""The full-size model on the mock, both grids and precisions: accepted, within the DRAM it may take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sam3_ray.backends.blackhole.device import TRACE_PROGRAMS

ROOT = Path(__file__).parents[2]
GRIDS = {"worker": [11, 10], "eth": [12, 10]}
DRAM_LIMIT = 3e9


@pytest.mark.parametrize("dispatch", ["worker", "eth"])
def test_the_full_size_model_is_accepted(dispatch: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.blackhole.accept_full_size", "--dispatch", dispatch],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)
    figures = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [f["precision"] for f in figures] == ["accurate", "fast"]
    for f in figures:
        assert f["grid"] == GRIDS[dispatch]
        phases = [144 * 144] * 4 + [72 * 72] * 4
        assert f["shapes"] == [[1, 1, n, 256] for n in (*phases, 72 * 72, 32)]
        assert f["traces"] == 16
        assert 0.8 * TRACE_PROGRAMS <= f["trace_programs"] <= TRACE_PROGRAMS
        assert f["dram_bytes"] <= DRAM_LIMIT
