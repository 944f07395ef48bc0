"""How a Blackhole chip is opened: the arguments of ``ttnn.open_device``."""

from __future__ import annotations

import os
import warnings
from typing import Any

DISPATCH_MODES = ("auto", "eth", "worker")

L1_SMALL_SIZE = 64 * 1024
"""Bytes of each core's L1 for convolutions' scratch; 32 KiB overflowed (shared notes of other ports)."""

TRACE_REGION_SIZE = 256 * 1024 * 1024
"""Bytes of DRAM for traces: others used 80 MB for 700 operations and 512 MiB for 946."""


def device_open_kwargs(device_id: int = 0, dispatch: str = "auto") -> dict[str, Any]:
    """The arguments that ``from_pretrained`` opens a chip with: ``ttnn.open_device(**device_open_kwargs())``.

    Args:
        device_id: the chip; 0 where TT_VISIBLE_DEVICES pins one.
        dispatch: ``worker`` is the stock dispatch (11x10 cores on a p150); ``eth`` moves it to the
            Ethernet cores (12x10) and needs a ttnn that is patched for it; ``auto`` is ``eth`` where that
            was tried and works, else ``worker`` with a RuntimeWarning.

    Raises:
        TypeError, ValueError: ``device_id`` is no index, or ``dispatch`` is unknown.
        ImportError: ``eth`` without ttnn installed.
        RuntimeError: ``eth`` where ttnn sees no chip.
    """
    if isinstance(device_id, bool) or not isinstance(device_id, int):
        raise TypeError(f"device_id must be an int, got {device_id!r}")
    if device_id < 0:
        raise ValueError(f"device_id must be at least 0, got {device_id}")
    if dispatch not in DISPATCH_MODES:
        raise ValueError(f"dispatch must be one of {DISPATCH_MODES}, got {dispatch!r}")
    kwargs: dict[str, Any] = {
        "device_id": device_id,
        "l1_small_size": L1_SMALL_SIZE,
        "trace_region_size": TRACE_REGION_SIZE,
    }
    if dispatch == "auto":
        warnings.warn(
            "ETH dispatch has not been tried on this machine: the stock dispatch is used (11x10 cores on a "
            "p150 instead of 12x10)",
            RuntimeWarning,
            stacklevel=2,
        )
    if dispatch == "eth":
        try:
            import ttnn
        except ImportError as error:
            raise ImportError(
                "dispatch='eth' needs ttnn, which is not installed: pip install 'sam3-ray[blackhole]'"
            ) from error
        try:
            kwargs["dispatch_core_config"] = ttnn.DispatchCoreConfig(ttnn.DispatchCoreType.ETH)
        except RuntimeError as error:  # ttnn looks at the cluster for it
            raise RuntimeError(
                "dispatch='eth': ttnn sees no chip on this machine; `sam3-ray doctor` tells what is here "
                f"(TT_VISIBLE_DEVICES={os.environ.get('TT_VISIBLE_DEVICES', '')!r})"
            ) from error
        kwargs["num_command_queues"] = 1
    return kwargs
