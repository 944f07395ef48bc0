"""Open a chip, with what must be set before ttnn is imported, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sam3_ray import chips
from sam3_ray.backends.blackhole.device import device_open_kwargs
from sam3_ray.errors import ChipUnavailableError
from sam3_ray.settings import cache_folder

KERNEL_CACHE = "TT_METAL_CACHE"
"""tt-metal's variable for the folder of compiled kernels; parallel builds into one folder collide."""


@dataclass
class OpenDevice:
    """A device and who closes it.

    Attributes:
        device: the ttnn device.
        dispatch: ``eth``, ``worker``, or ``given`` where the caller opened it.
        chip: its number among those that this process sees.
    """

    device: Any
    dispatch: Literal["eth", "worker", "given"]
    chip: int

    def close(self) -> None:
        """Close it unless the caller opened it; safe to call more than once."""
        device, self.device = self.device, None
        if device is None:
            return
        _with_model.discard(self.chip)
        if self.dispatch != "given":
            import ttnn

            ttnn.close_device(device)


_with_model: set[int] = set()
"""Chips that have a model in this process. What a second one allocated would lie where the traces of the
first put their intermediate results; and ttnn hands out an open chip again, and closing one handle takes it
from the other."""


def open_device(device_id: int, dispatch: str, *, device: Any = None) -> OpenDevice:
    """Open a chip.

    Args:
        device_id: the chip; 0 where TT_VISIBLE_DEVICES pins one.
        dispatch: ``auto``, ``eth`` or ``worker`` (``device_open_kwargs``).
        device: an open ttnn device to use instead; it stays open when the model is closed.

    Raises:
        ImportError: ttnn is not installed.
        ChipUnavailableError: there is no such chip, it does not open, it has a model already, or ttnn was
            imported before TT_VISIBLE_DEVICES was set.
        RuntimeError: ``eth`` cannot be used.
    """
    if importlib.util.find_spec("ttnn") is None:
        raise ImportError(
            "the Blackhole backend needs ttnn, which is not installed: pip install 'sam3-ray[blackhole]'"
        )
    if device is not None:
        chip = _checked_given(device)
        _with_model.add(chip)
        return OpenDevice(device, "given", chip)
    if device_id in _with_model:
        raise ChipUnavailableError(
            f"chip {device_id} is open in this process already: close the other Sam3 first"
        )
    _check_machine(device_id)
    if "ttnn" not in sys.modules:
        os.environ.setdefault(KERNEL_CACHE, str(kernel_cache(device_id)))
    arguments = device_open_kwargs(device_id, dispatch)
    import ttnn

    _check_visible(ttnn.GetNumAvailableDevices())
    try:
        opened = ttnn.open_device(**arguments)
    except RuntimeError as error:
        raise ChipUnavailableError(_why_not(device_id, error)) from error
    _with_model.add(device_id)
    mode: Literal["eth", "worker"] = "eth" if "dispatch_core_config" in arguments else "worker"
    return OpenDevice(opened, mode, device_id)


def kernel_cache(device_id: int) -> Path:
    """Folder of compiled kernels of one chip, in the user's cache folder."""
    visible = os.environ.get(chips.VISIBLE_DEVICES, "").split(",")
    name = visible[device_id].strip() if device_id < len(visible) else ""
    return cache_folder() / "kernels" / (name.replace(":", "-") or str(device_id))


def _checked_given(device: Any) -> int:
    """The number of its chip."""
    if not hasattr(device, "compute_with_storage_grid_size"):
        raise TypeError(f"device must be an open ttnn device, got {device!r}")
    chip = int(device.get_device_ids()[0])
    if chip in _with_model:
        raise ChipUnavailableError(f"chip {chip} has a model already: close that one first")
    return chip


def _check_machine(device_id: int) -> None:
    """What can be known without opening anything."""
    if os.environ.get(chips.MOCK_CLUSTER):
        return
    machine = chips.look()
    if not machine.chips:
        driver = (
            "the kernel driver is not loaded"
            if machine.driver is None
            else f"the kernel driver {machine.driver} shows none in /dev/tenstorrent"
        )
        raise ChipUnavailableError(
            f"there is no Tenstorrent chip here: {driver}. `sam3-ray doctor` tells more; backend='cpu' needs "
            "no chip"
        )
    try:
        visible = machine.visible()
    except ValueError as error:
        raise ChipUnavailableError(str(error)) from error
    if device_id >= len(visible):
        raise ChipUnavailableError(
            f"device_id={device_id}, but {len(visible)} chip(s) are visible "
            f"({chips.VISIBLE_DEVICES}={os.environ.get(chips.VISIBLE_DEVICES)!r})"
        )


def _check_visible(seen: int) -> None:
    """TT_VISIBLE_DEVICES is read when ttnn is imported; changed later it has no effect."""
    value = os.environ.get(chips.VISIBLE_DEVICES)
    named = len([name for name in (value or "").split(",") if name.strip()])
    if value is not None and seen != named:
        raise ChipUnavailableError(
            f"{chips.VISIBLE_DEVICES}={value!r} names {named} chip(s), but ttnn sees {seen}: it was imported "
            "before the variable was set. Set it before anything imports ttnn"
        )


def _why_not(device_id: int, error: RuntimeError) -> str:
    """The first line of ttnn's message, and what is known of the chip."""
    lines = [line.strip() for line in str(error).splitlines()]
    # "TT_FATAL @ file: condition", "info:", then what happened.
    told = lines[lines.index("info:") + 1] if "info:" in lines[:-1] else (lines or [""])[0]
    machine = chips.look()
    hints = []
    visible = machine.visible() if machine.chips else ()
    if device_id < len(visible):
        chip = visible[device_id]
        if chip.busy:
            hints.append(f"it is open in {', '.join(map(str, chip.holders))}")
        if not chip.readable:
            hints.append(f"/dev/tenstorrent/{chip.device} is not readable for this user")
        if not chip.iommu and not machine.free_hugepages:
            hints.append("no 1 GiB huge page is free and no IOMMU translates")
    known = f" ({'; '.join(hints)})" if hints else ""
    return f"chip {device_id} does not open: {told}{known}. `sam3-ray doctor` tells more"
