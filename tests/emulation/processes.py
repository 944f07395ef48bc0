"""Run a piece of Python in a process of its own, for what a process can do only once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent

TIME_LIMIT = 120
"""Seconds; a process takes about 6 on an idle core."""


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without the mock, and with the repository importable."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("TT_", "TTNN_"))
    }
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **more}


def launch(code: str, environment: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
    """Start ``python -c code`` in a folder."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=dict(environment),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a process; what it printed.

    Raises:
        AssertionError: it failed; with what it wrote to stderr.
    """
    try:
        output, errors = process.communicate(timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode == 0, errors[-4000:]
    return output
