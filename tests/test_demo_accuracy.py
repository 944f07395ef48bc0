"""The shipped demo checkpoint on 40 of the frozen pictures, through the script that measures all 200."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_forty_frozen_pictures_meet_every_bar() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/evaluate_demo_checkpoint.py", "--pictures", "40"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert (figures["phrases"], len(figures["sizes"])) == (240, 6)
