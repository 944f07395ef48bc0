"""Tenstorrent Blackhole chips through ttnn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sam3_ray.backends.blackhole.backend import BlackholeBackend


def open_backend(
    checkpoint_path: Path,
    *,
    device_id: int = 0,
    device: Any = None,
    dispatch: str = "auto",
    **options: Any,
) -> BlackholeBackend:
    """Open a chip and load the model onto it.

    ttnn reads its environment when it is imported, so the chip is opened, which sets it, before anything
    else here imports ttnn.

    Args:
        checkpoint_path: a file in ``sam3.pt``'s layout.
        device_id: the chip; 0 where TT_VISIBLE_DEVICES pins one.
        device: an open ttnn device to use instead; ``close`` leaves it open.
        dispatch: ``auto``, ``eth`` or ``worker``.
        **options: ``precision``, ``image_cache_bytes`` and ``num_threads`` of ``BlackholeBackend``.

    Raises:
        ImportError: ttnn is not installed.
        ChipUnavailableError: the chip does not open.
        CheckpointError: the file is broken or does not fit its configuration.
    """
    from sam3_ray.backends.blackhole.opening import open_device

    opened = open_device(device_id, dispatch, device=device)
    try:
        from sam3_ray.backends.blackhole.backend import BlackholeBackend

        return BlackholeBackend(checkpoint_path, opened, **options)
    except BaseException:
        opened.close()
        raise
