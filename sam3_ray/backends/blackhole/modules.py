"""A small module system: every tensor on the device has a key of the checkpoint, a shape and a conversion.

A part declares its parameters while it is built; nothing is read then. ``WeightStore.load`` compares all
of them with the checkpoint at once, converts, and uploads. Converted tensors are kept in files, so that a
second start only reads and uploads.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import ttnn
from torch import Tensor

from sam3_ray.errors import CheckpointError

logger = logging.getLogger("sam3_ray")

Convert = Callable[..., Tensor]


@dataclass
class Parameter:
    """One tensor on the device, made of one or more of the checkpoint's.

    Attributes:
        name: dotted, unique; names the file of its converted form.
        sources: the checkpoint's keys and their shapes, in the order ``convert`` takes them.
        convert: float32 tensors -> the float32 tensor to upload.
        dtype: a ``ttnn.DataType``.
        layout: a ``ttnn.Layout``.
        on_host: keep it on the host: a convolution prepares its weights itself.
    """

    name: str
    sources: dict[str, tuple[int, ...]]
    convert: Convert
    dtype: Any
    layout: Any
    on_host: bool = False
    _value: Any = None

    @property
    def value(self) -> Any:
        """The ``ttnn.Tensor``.

        Raises:
            RuntimeError: it has not been loaded, with its name.
        """
        if self._value is None:
            raise RuntimeError(f"{self.name} is used before it was loaded")
        return self._value


@dataclass(frozen=True)
class Scope:
    """A place in the checkpoint: ``scope / "blocks" / 3`` is the place of that block's tensors."""

    store: WeightStore
    prefix: str = ""

    def __truediv__(self, name: str | int) -> Scope:
        return Scope(self.store, f"{self.prefix}{name}.")

    def parameter(
        self,
        sources: Mapping[str, tuple[int, ...]],
        convert: Convert,
        *,
        dtype: Any,
        layout: Any = ttnn.TILE_LAYOUT,
        name: str | None = None,
        on_host: bool = False,
    ) -> Parameter:
        """Declare a parameter.

        Args:
            sources: keys under this scope and their shapes.
            convert: float32 tensors, in that order -> the tensor to upload.
            dtype, layout: of the tensor on the device.
            name: under this scope; default the first key.
            on_host: whether it stays on the host.
        """
        parameter = Parameter(
            name=self.prefix + (name or next(iter(sources))),
            sources={self.prefix + key: shape for key, shape in sources.items()},
            convert=convert,
            dtype=dtype,
            layout=layout,
            on_host=on_host,
        )
        self.store.add(parameter)
        return parameter


@dataclass
class WeightStore:
    """All parameters of a model, and how they come onto the device.

    Attributes:
        owned: prefixes of the checkpoint that belong to this model: what nobody takes there is an error.
        ignored: endings or prefixes of owned keys that are left alone on purpose.
    """

    owned: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    parameters: dict[str, Parameter] = field(default_factory=dict)

    @property
    def root(self) -> Scope:
        return Scope(self)

    def add(self, parameter: Parameter) -> None:
        if parameter.name in self.parameters:
            raise ValueError(f"two parameters are called {parameter.name}")
        self.parameters[parameter.name] = parameter

    def load(
        self,
        weights: Mapping[str, Tensor],
        device: Any,
        *,
        path: Path,
        cache: ConvertedWeights | None = None,
    ) -> None:
        """Check, convert and upload everything.

        Args:
            weights: the checkpoint's tensors, of any floating data type.
            device: an open ttnn device.
            path: of the checkpoint, for messages.
            cache: where converted tensors are kept.

        Raises:
            CheckpointError: missing, misshapen and unexpected keys, all at once; or a tensor that cannot be
                converted, with its name.
        """
        self._check(weights, path)
        for parameter in self.parameters.values():
            try:
                if cache is None:
                    tensor = _converted(parameter, weights)
                else:
                    tensor = cache.read_or_convert(parameter, weights)
                parameter._value = (
                    tensor
                    if parameter.on_host
                    else ttnn.to_device(tensor, device, memory_config=ttnn.DRAM_MEMORY_CONFIG)
                )
            except (RuntimeError, ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{path}: {parameter.name} cannot be put on the device: {error}"
                ) from error

    def release(self) -> None:
        """Free the device's memory."""
        for parameter in self.parameters.values():
            tensor, parameter._value = parameter._value, None
            if tensor is not None and not parameter.on_host:
                ttnn.deallocate(tensor)

    def _check(self, weights: Mapping[str, Tensor], path: Path) -> None:
        wanted: dict[str, tuple[int, ...]] = {}
        for parameter in self.parameters.values():
            wanted.update(parameter.sources)
        missing = sorted(set(wanted) - set(weights))
        misshapen = [
            f"{key}: {tuple(weights[key].shape)}, expected {shape}"
            for key, shape in sorted(wanted.items())
            if key in weights and tuple(weights[key].shape) != shape
        ]
        unexpected = sorted(
            key
            for key in weights
            if key.startswith(self.owned) and key not in wanted and not self._is_ignored(key)
        )
        if missing or misshapen or unexpected:
            raise CheckpointError(
                f"{path} does not fit the Blackhole model: missing {missing}, of another shape "
                f"{misshapen}, unexpected {unexpected}"
            )

    def _is_ignored(self, key: str) -> bool:
        return key.startswith(self.ignored) or key.endswith(self.ignored)


@dataclass(frozen=True)
class ConvertedWeights:
    """Files of converted tensors; a folder holds those of one checkpoint, ttnn version and precision.

    Several processes may fill one folder: a file appears whole or not at all, and each tensor is converted
    by one of them while the others wait for its file (the replicas of a host start together).
    """

    folder: Path

    def read_or_convert(self, parameter: Parameter, weights: Mapping[str, Tensor]) -> Any:
        """The host tensor, from its file, which is written where it is missing."""
        tensor = self.read(parameter)
        if tensor is not None:
            return tensor
        with self._alone():
            tensor = self.read(parameter)  # another process may have had the lock
            if tensor is None:
                tensor = _converted(parameter, weights)
                self.write(parameter, tensor)
        return tensor

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder's lock, which the kernel takes back from a process that dies. Where no lock can be
        had (a read-only disk, a network file system without locks) each process works for itself."""
        with ExitStack() as held:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((self.folder / ".lock").open("a"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                logger.info("%s cannot be locked (%s)", self.folder, error)
            yield

    def read(self, parameter: Parameter) -> Any:
        """The host tensor, or None where it has not been written, or cannot be read any more."""
        path = self._path(parameter)
        if not path.is_file():
            return None
        try:
            tensor = ttnn.load_tensor(str(path))
        except (RuntimeError, ValueError, OSError) as error:
            logger.warning("%s cannot be read (%s): it is converted again", path, error)
            return None
        return tensor if tensor.dtype == parameter.dtype else None

    def write(self, parameter: Parameter, tensor: Any) -> None:
        """Keep a host tensor. A full or read-only disk costs the next start its time, not this one."""
        path = self._path(parameter)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(suffix=path.suffix, dir=path.parent)
            os.close(handle)
            try:
                ttnn.dump_tensor(name, tensor)
                os.replace(name, path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            logger.warning(
                "converted weights cannot be kept in %s (%s): the next start converts them again",
                self.folder,
                error,
            )

    def _path(self, parameter: Parameter) -> Path:
        return self.folder / f"{parameter.name}.tensorbin"


def _converted(parameter: Parameter, weights: Mapping[str, Tensor]) -> Any:
    tensors = [weights[key].float() for key in parameter.sources]
    return ttnn.from_torch(
        parameter.convert(*tensors).contiguous(), dtype=parameter.dtype, layout=parameter.layout
    )


def transposed(weight: Tensor) -> Tensor:
    """(out, in) as torch keeps a linear layer's -> (in, out) as ttnn multiplies."""
    return weight.t()


def as_row(vector: Tensor) -> Tensor:
    """(n,) -> (1, 1, 1, n): a bias or a norm's parameters."""
    return vector.reshape(1, 1, 1, -1)


def constant(device: Any, value: Tensor, *, dtype: Any = ttnn.bfloat16) -> Any:
    """A table that follows from the dimensions alone, on the device, in tiles."""
    return ttnn.from_torch(
        value.contiguous().to(torch.float32),
        dtype=dtype,
        layout=ttnn.TILE_LAYOUT,
        device=device,
        memory_config=ttnn.DRAM_MEMORY_CONFIG,
    )
