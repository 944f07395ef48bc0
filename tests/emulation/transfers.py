"""Operations between host and device, and allocations: what each does to the emulated memory.

Each function takes the emulator, ttnn's own function (which places, allocates and validates) and the call's
arguments, and returns what ttnn returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tests.emulation.errors import EmulationError

if TYPE_CHECKING:
    from tests.emulation.emulator import Emulator

Original = Callable[..., Any]
Transfer = Callable[["Emulator", str, Original, tuple[Any, ...], dict[str, Any]], Any]


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, *names: str) -> Any:
    """An argument given by place or by one of its names, or None."""
    if len(args) > index:
        return args[index]
    return next((kwargs[name] for name in names if name in kwargs), None)


def from_torch(
    emulator: Emulator, name: str, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    source = argument(args, kwargs, 0, "tensor")
    if argument(args, kwargs, 99, "device") is not None:
        emulator.traces.refuse_host(name)
    tensor = original(*args, **kwargs)
    if tensor is not None and emulator.on_device(tensor):
        value = torch.as_tensor(source)
        if kwargs.get("col_tilize"):
            value = value.transpose(-2, -1)
        emulator.upload(tensor, value.clone(), name)  # the caller keeps and may change its tensor
    return tensor


def to_torch(
    emulator: Emulator, name: str, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tensor = argument(args, kwargs, 0, "tensor")
    if not isinstance(tensor, emulator.ttnn.Tensor) or not emulator.is_ours(tensor):
        return original(*args, **kwargs)
    return original(
        emulator.as_host_tensor(tensor, name),
        *args[1:],
        **{key: item for key, item in kwargs.items() if key != "tensor"},
    )


def to_device(
    emulator: Emulator, name: str, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tensor = argument(args, kwargs, 0, "tensor", "input_tensor")
    if emulator.on_device(tensor):
        return tensor
    emulator.traces.refuse_host(name)
    result = original(*args, **kwargs)
    emulator.upload(result, emulator.host_value(tensor), name)
    return result


def from_device(
    emulator: Emulator, name: str, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tensor = argument(args, kwargs, 0, "tensor", "input_tensor")
    return emulator.as_host_tensor(tensor, name) if emulator.on_device(tensor) else tensor


def host_to_device(
    emulator: Emulator, name: str, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    emulator.traces.refuse_host(name)
    host = argument(args, kwargs, 0, "host_tensor")
    device = argument(args, kwargs, 1, "device_tensor")
    result = original(*args, **kwargs)
    emulator.upload(device, emulator.host_value(host), name)
    return result


def device_to_host(
    emulator: Emulator, name: str, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    device = argument(args, kwargs, 0, "device_tensor")
    host = argument(args, kwargs, 1, "host_tensor")
    value = emulator.download(device, name)
    result = original(*args, **kwargs)
    emulator.keep_host_value(host, value)
    return result


def deallocate(
    emulator: Emulator, name: str, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tensor = argument(args, kwargs, 0, "tensor")
    place = None
    if emulator.on_device(tensor) and tensor.is_allocated() and emulator.traces.capture is None:
        place = emulator.memory.place_of(tensor, name)
    result = original(*args, **kwargs)
    if place is not None and not tensor.is_allocated() and emulator.memory.holds(place):
        emulator.memory.forget(place.key)
    return result


def allocate(
    emulator: Emulator, name: str, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    emulator.traces.refuse_allocation(name)
    tensor = original(*args, **kwargs)
    if emulator.on_device(tensor):
        emulator.memory.claim(emulator.memory.place_of(tensor, name))
    return tensor


def _filled(value: Callable[..., torch.Tensor]) -> Transfer:
    """An operation that builds its value on the host and uploads it."""

    def fill(
        emulator: Emulator,
        name: str,
        original: Original,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        emulator.traces.refuse_host(f"{name} (it uploads a tensor built on the host)")
        tensor = original(*args, **kwargs)
        if emulator.on_device(tensor):
            emulator.upload(tensor, value(tuple(tensor.shape), args, kwargs), name)
        return tensor

    return fill


def _constant(
    shape: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    return torch.full(shape, argument(args, kwargs, 1, "fill_value"))


def _range(shape: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    bounds = [item for item in args if isinstance(item, (int, float))]
    for key in ("start", "end", "step"):
        if kwargs.get(key) is not None:
            bounds.append(kwargs[key])
    if not bounds:
        raise EmulationError("ttnn.arange: without bounds")
    return torch.arange(*bounds).reshape(shape)


_zeros = _filled(lambda shape, _args, _kwargs: torch.zeros(shape))
_ones = _filled(lambda shape, _args, _kwargs: torch.ones(shape))
_full = _filled(_constant)

TRANSFERS: dict[str, Transfer] = {
    "ttnn.from_torch": from_torch,
    "ttnn.to_torch": to_torch,
    "ttnn.to_device": to_device,
    "ttnn.from_device": from_device,
    "ttnn.copy_host_to_device_tensor": host_to_device,
    "ttnn.copy_device_to_host_tensor": device_to_host,
    "ttnn.deallocate": deallocate,
    "ttnn.allocate_tensor_on_device": allocate,
    "ttnn.empty": allocate,
    "ttnn.empty_like": allocate,
    "ttnn.zeros": _zeros,
    "ttnn.zeros_like": _zeros,
    "ttnn.ones": _ones,
    "ttnn.ones_like": _ones,
    "ttnn.full": _full,
    "ttnn.full_like": _full,
    "ttnn.arange": _filled(_range),
}

COMPOSITES = frozenset(
    {
        "ttnn.Tensor.__getitem__",
        "ttnn.allocate_tensor_on_host",
        "ttnn.as_tensor",
        "ttnn.dump_tensor",
        "ttnn.load_tensor",
    }
)
"""Written in Python over other operations, which are emulated one by one, or host only."""
