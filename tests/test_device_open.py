"""The arguments a chip is opened with."""

from __future__ import annotations

from typing import Any

import pytest

from sam3_ray import device_open_kwargs
from sam3_ray.chips import look


def test_worker_dispatch_needs_no_ttnn() -> None:
    kwargs = device_open_kwargs(3, "worker")
    assert kwargs["device_id"] == 3
    assert kwargs["l1_small_size"] == 65536
    assert kwargs["trace_region_size"] > 0
    assert "dispatch_core_config" not in kwargs


def test_auto_without_a_trial_is_worker_and_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="ETH dispatch"):
        kwargs = device_open_kwargs()
    assert kwargs == device_open_kwargs(0, "worker")


def test_eth_dispatch_without_a_chip_says_so() -> None:
    if look().visible():
        assert device_open_kwargs(0, "eth")["num_command_queues"] == 1
        return
    with pytest.raises(RuntimeError, match="no chip"):
        device_open_kwargs(0, "eth")


@pytest.mark.device
def test_eth_dispatch_uses_one_command_queue() -> None:
    import ttnn

    kwargs = device_open_kwargs(0, "eth")
    assert kwargs["num_command_queues"] == 1
    assert kwargs["dispatch_core_config"].type == ttnn.DispatchCoreType.ETH


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((-1, "worker"), ValueError), (("0", "worker"), TypeError), ((0, "dma"), ValueError)],
)
def test_what_does_not_fit(arguments: tuple[Any, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        device_open_kwargs(*arguments)
