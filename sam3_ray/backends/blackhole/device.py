"""How a Blackhole chip is opened: the arguments of ``ttnn.open_device``."""

from __future__ import annotations

import os
from typing import Any, get_args

from sam3_ray import chips
from sam3_ray.backends.blackhole.dispatch import Choice, Mode, board_type, prepare_environment
from sam3_ray.backends.blackhole.mesh import describe_mesh

DISPATCH_MODES = get_args(Choice)

L1_SMALL_SIZE = 64 * 1024
"""Bytes of each core's L1 for convolutions' scratch; 32 KiB overflowed (shared notes of other ports)."""

TRACE_PROGRAMS = 3_600
"""Programs in all traces of the full-size model, at most; ttnn's graph capture counts them on the mock
(tests/blackhole/test_acceptance.py)."""

TRACE_BYTES_A_PROGRAM = 114_000
"""80 MB for 700 programs in another's port on a p150 (docs/blackhole.md, "What others measured")."""

TRACE_REGION_SIZE = 2 * TRACE_PROGRAMS * TRACE_BYTES_A_PROGRAM
"""Bytes of DRAM for traces: twice what they are reckoned to need. A p150 has 32 GB."""


def device_open_kwargs(device_id: int = 0, dispatch: str = "auto") -> dict[str, Any]:
    """The arguments that ``from_pretrained`` opens a chip with. Call it before ttnn is imported: where ETH
    dispatch is used it may set TT_METAL_RUNTIME_ROOT, and for one chip of a board with several
    TT_MESH_GRAPH_DESC_PATH, which ttnn reads then::

        arguments = device_open_kwargs()
        import ttnn
        device = ttnn.open_device(**arguments)

    Args:
        device_id: the chip; 0 where TT_VISIBLE_DEVICES pins one.
        dispatch: ``worker`` is the stock dispatch (11x10 cores on a p150); ``eth`` moves it to the
            Ethernet cores (12x10) and needs data files that are patched for it; ``auto`` is ``eth`` where
            that is known to work (``sam3-ray chips enable-eth``), else ``worker`` with a RuntimeWarning.

    Raises:
        TypeError, ValueError: ``device_id`` is no index, or ``dispatch`` is unknown.
        ImportError: ``eth`` without ttnn installed.
        RuntimeError: ``eth`` where there is no chip, where it is not known to work, or where ttnn was
            imported too early for it; the stock dispatch in a process whose ttnn runs from an ETH overlay.
    """
    if isinstance(device_id, bool) or not isinstance(device_id, int):
        raise TypeError(f"device_id must be an int, got {device_id!r}")
    if device_id < 0:
        raise ValueError(f"device_id must be at least 0, got {device_id}")
    if dispatch not in DISPATCH_MODES:
        raise ValueError(f"dispatch must be one of {DISPATCH_MODES}, got {dispatch!r}")
    board = None if dispatch == "worker" else board_type(device_id)
    return open_arguments(device_id, prepare_environment(dispatch, board=board).mode)


def open_arguments(device_id: int, mode: Mode) -> dict[str, Any]:
    """The arguments of ``ttnn.open_device`` for a dispatch that is decided. ``eth`` imports ttnn.

    Raises:
        ValueError: TT_VISIBLE_DEVICES names a chip that is not here.
        RuntimeError: ``eth`` where ttnn sees no chip.
    """
    describe_mesh(device_id)
    arguments: dict[str, Any] = {
        "device_id": device_id,
        "l1_small_size": L1_SMALL_SIZE,
        "trace_region_size": TRACE_REGION_SIZE,
    }
    if mode == "worker":
        return arguments
    import ttnn

    try:
        config = ttnn.DispatchCoreConfig(ttnn.DispatchCoreType.ETH)
    except RuntimeError as error:  # ttnn looks at the cluster for it
        raise RuntimeError(
            "dispatch='eth': ttnn sees no chip on this machine; `sam3-ray doctor` tells what is here "
            f"({chips.VISIBLE_DEVICES}={os.environ.get(chips.VISIBLE_DEVICES, '')!r})"
        ) from error
    return arguments | {"dispatch_core_config": config, "num_command_queues": 1}
