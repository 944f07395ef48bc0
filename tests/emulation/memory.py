"""Device memory: values under the addresses where ttnn's own allocator put the tensors.

A value belongs to (device, DRAM or L1, address), as on a chip, so that views, outputs into given tensors,
copies and trace buffers alias as they do there. Beside it stands the number of the allocation that it was
written through: reading an address through another allocation's tensor is an error, not a value.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tests.emulation.errors import DeviceMemoryError
from tests.emulation.formats import round_to
from tests.emulation.records import MemoryUse, TensorRecord

Key = tuple[int, Literal["DRAM", "L1"], int]
"""Device id, kind of memory, address in each bank."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device tensor lives and how it is read, without a handle that keeps it allocated.

    Attributes:
        uid: the number of the allocation (``buffer_unique_id``).
        per_bank: bytes from the address on that it takes in each bank.
    """

    key: Key
    uid: int
    per_bank: int
    record: TensorRecord

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    @property
    def dtype(self) -> str:
        return self.record.dtype


@dataclass(frozen=True, slots=True)
class Prepared:
    """Weights that ttnn laid out for a convolution: the value keeps PyTorch's shape, not the buffer's."""

    value: torch.Tensor


@dataclass(slots=True)
class Cell:
    """What an address holds; ``value`` is None where it was allocated and not written, or was lost."""

    value: torch.Tensor | None
    uid: int
    per_bank: int
    prepared: bool = False
    lost_to: str = ""


class DeviceMemory:
    """The memory of every open device of one process. One thread at a time may use it."""

    def __init__(self, ttnn: Any) -> None:
        self._ttnn = ttnn
        self._cells: dict[Key, Cell] = {}
        self._banks: dict[tuple[int, str], int] = {}
        self._devices: dict[int, Any] = {}
        self._written = 0

    # Places

    def place_of(self, tensor: Any, reader: str) -> Place:
        """Where a device tensor lives.

        Raises:
            DeviceMemoryError: it was deallocated; ``reader`` is named.
        """
        ttnn = self._ttnn
        shape, dtype = tuple(tensor.shape), tensor.dtype.name.lower()
        if not tensor.is_allocated():
            raise DeviceMemoryError(f"{reader}: its tensor {dtype} {shape} was deallocated")
        config = tensor.memory_config()
        buffer: Literal["DRAM", "L1"] = (
            "DRAM" if config.buffer_type == ttnn.BufferType.DRAM else "L1"
        )
        device = tensor.device()
        number = device.id()
        self._devices.setdefault(number, device)
        pages, page = tensor.buffer_num_pages(), tensor.buffer_aligned_page_size()
        sharded = config.is_sharded()
        if sharded and config.shard_spec is not None:
            banks = max(1, config.shard_spec.grid.num_cores())
        else:
            banks = self._bank_count(device, number, buffer)
        record = TensorRecord(
            shape,
            tuple(tensor.padded_shape),
            dtype,
            "TILE" if tensor.layout == ttnn.TILE_LAYOUT else "ROW_MAJOR",
            buffer,
            sharded,
            pages * page,
            banks,
        )
        return Place(
            (number, buffer, tensor.buffer_address()),
            tensor.buffer_unique_id(),
            math.ceil(pages / banks) * page,
            record,
        )

    def _bank_count(self, device: Any, number: int, buffer: str) -> int:
        count = self._banks.get((number, buffer))
        if count is None:
            grid = (
                device.dram_grid_size()
                if buffer == "DRAM"
                else device.compute_with_storage_grid_size()
            )
            count = self._banks[number, buffer] = grid.x * grid.y
        return count

    # Values

    def read(self, place: Place, reader: str) -> torch.Tensor:
        """The value at a place, in the tensor's shape, as stored (bfloat16, float32 or an integer type).

        Raises:
            DeviceMemoryError: nothing was written there, or not through this allocation; ``reader`` is named.
        """
        cell = self._cells.get(place.key)
        what = f"{reader}: {place.record.buffer} tensor {place.dtype} {place.shape} at {place.key[2]:#x}"
        if cell is None:
            raise DeviceMemoryError(f"{what} was never written")
        if cell.uid != place.uid:
            raise DeviceMemoryError(
                f"{what} holds another tensor's data, written after it was freed"
            )
        if cell.value is None:
            raise DeviceMemoryError(f"{what} {cell.lost_to or 'was never written'}")
        if cell.prepared:
            return cell.value
        if cell.value.numel() != place.record.elements:
            raise DeviceMemoryError(
                f"{what} is a view of {tuple(cell.value.shape)}: the sizes differ"
            )
        return cell.value.reshape(place.shape)

    def write(self, place: Place, value: torch.Tensor | Prepared, writer: str) -> None:
        """Store a value, rounded to the tensor's data type.

        Raises:
            DeviceMemoryError: its size is not the tensor's; ``writer`` is named.
        """
        prepared = isinstance(value, Prepared)
        if isinstance(value, Prepared):
            stored = value.value
        else:
            if value.numel() != place.record.elements:
                raise DeviceMemoryError(
                    f"{writer}: its value of shape {tuple(value.shape)} does not fit the output {place.shape}"
                )
            stored = round_to(value.detach().reshape(place.shape), place.dtype)
        self._cells[place.key] = Cell(stored, place.uid, place.per_bank, prepared)
        self._written += stored.numel() * stored.element_size()

    def claim(self, place: Place, why: str = "was never written") -> None:
        """An allocation without data, unless the place already holds this allocation's data."""
        cell = self._cells.get(place.key)
        if cell is None or cell.uid != place.uid:
            self._cells[place.key] = Cell(None, place.uid, place.per_bank, lost_to=why)

    def forget(self, key: Key) -> None:
        """The buffer at this address was freed."""
        self._cells.pop(key, None)

    def holds(self, place: Place) -> bool:
        """True where the address belongs to the place's allocation."""
        cell = self._cells.get(place.key)
        return cell is not None and cell.uid == place.uid

    def is_value_of(self, place: Place, value: torch.Tensor) -> bool:
        """True where a place's own buffer holds this very value: a view of it changes no byte."""
        cell = self._cells.get(place.key)
        return (
            cell is not None
            and cell.uid == place.uid
            and cell.value is not None
            and cell.value.dtype == value.dtype
            and cell.value.numel() == value.numel()
            and cell.value.data_ptr() == value.data_ptr()
            and value.is_contiguous()
        )

    def overwrite(
        self, spans: Sequence[tuple[int, int, str]], number: int, buffer: str, spare: set[int]
    ) -> dict[Key, Cell]:
        """Lose every tensor that overlaps the written spans; the lost ones.

        Args:
            spans: (first byte, last byte + 1, who wrote) in each bank, sorted, not overlapping each other.
            spare: allocations that the writer owns.
        """
        starts = [span[0] for span in spans]
        lost = {}
        for (device, kind, address), cell in self._cells.items():
            if device != number or kind != buffer or cell.uid in spare:
                continue
            first = max(0, bisect.bisect_right(starts, address) - 1)
            for low, high, writer in spans[first:]:
                if low >= address + cell.per_bank:
                    break
                if high > address:
                    if cell.value is not None:
                        cell.value, cell.lost_to = None, f"was overwritten: {writer} wrote over it"
                    lost[device, kind, address] = cell
                    break
        return lost

    def restore_lost(self, lost: dict[Key, Cell]) -> None:
        """Note the lost tensors again where the writer has dropped its own values since."""
        for key, cell in lost.items():
            self._cells.setdefault(key, cell)

    # Devices

    def live(self, number: int) -> set[Key]:
        """The buffers that ttnn's allocator has handed out on a device."""
        dram = self._ttnn.BufferType.DRAM
        return {
            (number, "DRAM" if buffer.buffer_type == dram else "L1", buffer.address)
            for buffer in self._ttnn._ttnn.reports.get_buffers([self._devices[number]])
        }

    def collect_when_full(self, limit: int) -> None:
        """Drop the values of freed buffers after ``limit`` bytes of writes; Python frees tensors silently."""
        if self._written < limit:
            return
        live: set[Key] = set()
        for number in self._devices:
            live |= self.live(number)
        for key in [key for key in self._cells if key not in live]:
            del self._cells[key]
        self._written = 0

    def watch(self, device: Any) -> int:
        """Remember a device; its id."""
        number: int = device.id()
        self._devices[number] = device
        return number

    def close(self, number: int) -> None:
        """A device was closed: its memory is gone."""
        self._devices.pop(number, None)
        for key in [key for key in self._cells if key[0] == number]:
            del self._cells[key]
        for bank in [bank for bank in self._banks if bank[0] == number]:
            del self._banks[bank]

    def use(self, device: Any, buffer: Literal["DRAM", "L1"], peak: int = 0) -> MemoryUse:
        """Bytes in use on a device."""
        view = self._ttnn.get_memory_view(device, getattr(self._ttnn.BufferType, buffer))
        now = view.num_banks * view.total_bytes_allocated_per_bank
        return MemoryUse(now, max(now, peak), view.num_banks * view.total_bytes_per_bank)

    def device(self, number: int) -> Any:
        """The open device of an id."""
        return self._devices[number]

    def host_bytes(self) -> int:
        """Bytes of the values held, which is this process's memory and not the chip's."""
        return sum(
            cell.value.numel() * cell.value.element_size()
            for cell in self._cells.values()
            if cell.value is not None
        )


def merged(spans: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Sort spans and cut the overlaps, so that each byte is in one; the first writer is named."""
    result: list[tuple[int, int, str]] = []
    for low, high, writer in sorted(spans):
        start = max(low, result[-1][1]) if result else low
        if high > start:
            result.append((start, high, writer))
    return result
