"""A trace's life, on the emulated chip that is strict about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture
def doubling(chip: Any) -> Any:
    """A trace that doubles one buffer into another."""
    import ttnn

    from sam3_ray.backends.blackhole.traces import Trace

    source, target = (
        ttnn.from_torch(
            torch.ones(1, 1, 32, 64), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=chip
        )
        for _ in range(2)
    )

    def run() -> None:
        doubled = ttnn.multiply(source, 2.0)
        ttnn.copy(doubled, target)
        ttnn.deallocate(doubled)

    return Trace(chip, "doubling", run), source, target


def write(buffer: Any, value: float) -> None:
    import ttnn

    host = ttnn.from_torch(
        torch.full((1, 1, 32, 64), value), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT
    )
    ttnn.copy_host_to_device_tensor(host, buffer)


def test_it_replays_what_it_recorded(doubling: Any) -> None:
    import ttnn

    trace, source, target = doubling
    trace.compile()
    trace.capture()
    for value in (3.0, -5.0):
        write(source, value)
        trace.execute()
        assert ttnn.to_torch(target).eq(2 * value).all()
    trace.release()
    trace.release()  # a second time is nothing
    with pytest.raises(RuntimeError, match="'doubling' is not captured"):
        trace.execute()


def test_executing_before_capturing_is_an_error(doubling: Any) -> None:
    with pytest.raises(RuntimeError, match="'doubling' is not captured"):
        doubling[0].execute()


def test_a_capture_that_fails_leaves_the_device_usable(chip: Any, doubling: Any) -> None:
    """Without its compilation the emulated chip refuses the capture, as a real one would miscompute."""
    import ttnn

    trace, source, target = doubling
    with pytest.raises(RuntimeError, match="compiled"):
        trace.capture()
    with pytest.raises(RuntimeError, match="not captured"):
        trace.execute()  # what was recorded is released
    trace.compile()
    trace.capture()
    write(source, 4.0)
    trace.execute()
    assert ttnn.to_torch(target).eq(8.0).all()
