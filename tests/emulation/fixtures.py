"""Fixtures for every test that needs an emulated chip: ``pytest_plugins = ["tests.emulation.fixtures"]``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sam3_ray.backends.blackhole.device import L1_SMALL_SIZE
from tests import emulation

TRACE_REGION = 64 * 1024 * 1024


@pytest.fixture(scope="session")
def emulator() -> Any:
    """The emulator of this test process, started where nothing started it before."""
    try:
        return emulation.current()
    except emulation.EmulationError:
        return emulation.start()


@pytest.fixture
def chip(emulator: Any) -> Iterator[Any]:
    """An open emulated p150, 11x10 cores, with empty records."""
    import ttnn

    device = ttnn.open_device(
        device_id=0, l1_small_size=L1_SMALL_SIZE, trace_region_size=TRACE_REGION
    )
    emulator.records.clear()
    yield device
    ttnn.close_device(device)
