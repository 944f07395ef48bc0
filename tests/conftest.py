"""What holds for every test."""

from __future__ import annotations

import os

# Threads cost a small model more than they bring: tenfold where cores are shared. For subprocesses too.
os.environ.setdefault("SAM3_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
