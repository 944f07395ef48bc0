"""The arguments a chip is opened with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sam3_ray import device_open_kwargs
from sam3_ray.chips import look
from tests.blackhole.stock_root import without_a_machine


@pytest.fixture
def nothing_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_a_machine(monkeypatch, tmp_path)


def test_worker_dispatch_needs_no_ttnn() -> None:
    kwargs = device_open_kwargs(3, "worker")
    assert kwargs["device_id"] == 3
    assert kwargs["l1_small_size"] == 65536
    assert kwargs["trace_region_size"] > 0
    assert "dispatch_core_config" not in kwargs


@pytest.mark.usefixtures("nothing_tried")
def test_auto_without_a_trial_is_worker_and_says_so() -> None:
    with pytest.warns(RuntimeWarning, match="ETH dispatch"):
        kwargs = device_open_kwargs()
    assert kwargs == device_open_kwargs(0, "worker")


@pytest.mark.usefixtures("nothing_tried")
def test_eth_dispatch_without_a_chip_or_a_trial_says_so() -> None:
    expected = "sam3-ray chips enable-eth" if look().visible() else "no chip"
    with pytest.raises(RuntimeError, match=expected):
        device_open_kwargs(0, "eth")


@pytest.mark.device
def test_eth_dispatch_uses_one_command_queue() -> None:
    """On a chip, after `sam3-ray chips enable-eth`."""
    kwargs = device_open_kwargs(0, "eth")
    assert kwargs["num_command_queues"] == 1
    import ttnn

    assert kwargs["dispatch_core_config"].type == ttnn.DispatchCoreType.ETH


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((-1, "worker"), ValueError), (("0", "worker"), TypeError), ((0, "dma"), ValueError)],
)
def test_what_does_not_fit(arguments: tuple[Any, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        device_open_kwargs(*arguments)
