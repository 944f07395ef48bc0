"""What holds for every test."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.emulation.fixtures import chip, emulator

__all__ = ["chip", "emulator"]

# Threads cost a small model more than they bring: tenfold where cores are shared. For subprocesses too.
os.environ.setdefault("SAM3_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

MOCK_VARIABLES = (
    "TT_METAL_RUNTIME_ROOT",
    "TT_METAL_MOCK_CLUSTER_DESC_PATH",
    "TT_METAL_CACHE",
    "TT_METAL_LOGS_PATH",
    "TT_METAL_INSPECTOR_RPC",
)
"""What ``tests.emulation.mock.prepare`` sets and ttnn needs only when it is imported and first opened."""


# In a shell's background SIGINT is ignored, and what the tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Converted weights and kernels of the tests are no business of the user's cache folder."""
    os.environ["SAM3_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    """What fails once must fail again: a bound that one draw in eight misses is found when it is written."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_mock_by_accident(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation's environment lasts as long as the process; other tests, and what they start, do not
    see it."""
    if "emulator" not in request.fixturenames:
        for name in MOCK_VARIABLES:
            monkeypatch.delenv(name, raising=False)
