"""A real chip under the names that the emulated tests use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sam3_ray import chips


@pytest.fixture(scope="session")
def emulator() -> Any:
    """What says "there is a chip" to the tests that this folder borrows."""
    if not chips.look().visible():
        pytest.fail("no Tenstorrent chip is visible here: `sam3-ray doctor` tells more")
    return None


@pytest.fixture
def chip(emulator: Any) -> Iterator[Any]:
    """An open chip, with the dispatch that ``auto`` finds."""
    from sam3_ray.backends.blackhole.opening import open_device

    opened = open_device(0, "auto")
    yield opened.device
    opened.close()
