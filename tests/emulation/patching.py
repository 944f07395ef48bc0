"""Where the emulator takes hold of ttnn, once it is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.emulation.emulator import Emulator
from tests.emulation.errors import EmulationError
from tests.emulation.memory import Prepared

_TRACE_FUNCTIONS = ("begin_trace_capture", "end_trace_capture", "execute_trace", "release_trace")
# The mock's command queue crashes when it waits; everything here is synchronous.
_WAITS = ("wait_for_event", "event_synchronize")
_CLOSERS = ("close_device", "close_mesh_device", "CloseDevice")
_PREPARERS = (
    "prepare_conv_weights",
    "prepare_conv_bias",
    "prepare_conv_transpose2d_weights",
    "prepare_conv_transpose2d_bias",
)
_READERS = ("to_torch", "to_list", "to_numpy", "item", "__repr__", "__str__")


class Patches:
    """The changes made to ttnn, to be taken back."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def take_back(self) -> None:
        for owner, name, value in reversed(self._saved):
            setattr(owner, name, value)
        self._saved.clear()


def install(emulator: Emulator) -> Patches:
    """Patch ttnn so that every operation, transfer and trace goes through the emulator.

    Raises:
        EmulationError: ttnn runs operations in its slow mode, which does not pass where the emulator listens.
    """
    ttnn, patches = emulator.ttnn, Patches()
    if not ttnn.CONFIG.enable_fast_runtime_mode:
        raise EmulationError(
            "the emulation needs ttnn's fast runtime mode (TTNN_CONFIG_OVERRIDES turned it off)"
        )
    operation_class = ttnn.decorators.FastOperation
    patches.put(
        operation_class,
        "__call__",
        lambda operation, *args, **kwargs: emulator.call(operation, args, kwargs),
    )
    for name in _TRACE_FUNCTIONS:
        patches.put(ttnn, name, getattr(emulator, name))
    for name in _WAITS:
        patches.put(ttnn, name, lambda *_args, **_kwargs: None)
    for name in _CLOSERS:
        patches.put(ttnn, name, _closing(emulator, getattr(ttnn, name)))
    for name in _PREPARERS:
        patches.put(ttnn, name, _preparing(emulator, name, getattr(ttnn, name)))
    _patch_tensor(emulator, patches)
    files = ttnn._ttnn.tensor
    patches.put(files, "load_tensor_flatbuffer", _loading(emulator, files.load_tensor_flatbuffer))
    patches.put(files, "dump_tensor_flatbuffer", _dumping(emulator, files.dump_tensor_flatbuffer))
    return patches


def _patch_tensor(emulator: Emulator, patches: Patches) -> None:
    """The methods of ttnn.Tensor that move data without an operation."""
    tensor_class = emulator.ttnn.Tensor
    for name in _READERS:
        patches.put(tensor_class, name, _reading(emulator, name, getattr(tensor_class, name)))
    original_cpu, original_to = tensor_class.cpu, tensor_class.to
    original_deallocate = tensor_class.deallocate

    def cpu(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if emulator.inside or not emulator.on_device(tensor):
            return original_cpu(tensor, *args, **kwargs)
        return emulator.as_host_tensor(tensor, "ttnn.Tensor.cpu")

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if emulator.inside:
            return original_to(tensor, *args, **kwargs)
        target = args[0] if args else kwargs.get("device", kwargs.get("layout"))
        if emulator.on_device(tensor):
            # A change of layout, or back to the device it is on: as the operations do it.
            if isinstance(target, emulator.ttnn.Layout):
                return emulator.ttnn.to_layout(tensor, target)
            return original_to(tensor, *args, **kwargs)
        if not isinstance(target, emulator.ttnn.Layout):
            emulator.traces.refuse_host("ttnn.Tensor.to")
        with emulator.within_ttnn():
            result = original_to(tensor, *args, **kwargs)
        if emulator.on_device(result):
            emulator.upload(result, emulator.host_value(tensor), "ttnn.Tensor.to")
        return result

    def deallocate(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if emulator.inside:
            return original_deallocate(tensor, *args, **kwargs)
        return emulator.ttnn.deallocate(tensor, *args, **kwargs)

    for name, method in (("cpu", cpu), ("to", to), ("deallocate", deallocate)):
        patches.put(tensor_class, name, method)


def _reading(emulator: Emulator, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if emulator.inside or not emulator.is_ours(tensor):
            return original(tensor, *args, **kwargs)
        host = emulator.as_host_tensor(tensor, f"ttnn.Tensor.{name}")
        return original(host, *args, **kwargs)

    return read


def _closing(emulator: Emulator, original: Callable[..., Any]) -> Callable[..., Any]:
    def close(device: Any, *args: Any, **kwargs: Any) -> Any:
        number = device.id()
        result = original(device, *args, **kwargs)
        emulator.forget_device(number)
        return result

    return close


def _preparing(emulator: Emulator, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(*args: Any, **kwargs: Any) -> Any:
        names = ("weight_tensor", "bias_tensor")
        source = next((kwargs[key] for key in names if key in kwargs), args[0] if args else None)
        emulator.traces.refuse_host(f"ttnn.{name}")
        if emulator.on_device(source):
            value: Any = emulator.value(source)
        else:
            value = emulator.host_value(source)
        with emulator.within_ttnn():
            result = original(*args, **kwargs)
        prepared = Prepared(value.float())
        if emulator.on_device(result):
            emulator.upload(result, prepared, f"ttnn.{name}")
        else:
            emulator.keep_host_value(result, prepared)
        return result

    return prepare


def _loading(emulator: Emulator, original: Callable[..., Any]) -> Callable[..., Any]:
    def load(file_name: str, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if device is None:
            return original(file_name, device, *args, **kwargs)
        emulator.traces.refuse_host("ttnn.load_tensor")
        with emulator.within_ttnn():
            result = original(file_name, device, *args, **kwargs)
            value = original(file_name, None).to_torch().clone()
        emulator.upload(result, value, "ttnn.load_tensor")
        return result

    return load


def _dumping(emulator: Emulator, original: Callable[..., Any]) -> Callable[..., Any]:
    def dump(file_name: str, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if emulator.is_ours(tensor):
            tensor = emulator.as_host_tensor(tensor, "ttnn.dump_tensor")
        return original(file_name, tensor, *args, **kwargs)

    return dump
