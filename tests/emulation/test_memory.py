"""Device memory aliases as a chip's does, and reading what is not there is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulation import DeviceMemoryError
from tests.emulation.memory import merged
from tests.emulation.samples import down, random, up

SHAPE = (1, 1, 64, 96)


def test_memory_never_written(chip: Any) -> None:
    import ttnn

    empty = ttnn.allocate_tensor_on_device(
        ttnn.Shape(list(SHAPE)), ttnn.bfloat16, ttnn.TILE_LAYOUT, chip
    )
    with pytest.raises(
        DeviceMemoryError, match=r"ttnn\.gelu: DRAM tensor bfloat16 .* never written"
    ):
        ttnn.gelu(empty)
    with pytest.raises(DeviceMemoryError, match=r"ttnn\.to_torch: .* never written"):
        down(ttnn.empty(SHAPE, ttnn.bfloat16, ttnn.TILE_LAYOUT, chip))


def test_a_new_allocation_does_not_show_what_was_there(chip: Any) -> None:
    import ttnn

    old = up(chip, random(*SHAPE))
    address = old.buffer_address()
    ttnn.deallocate(old)
    new = ttnn.empty(SHAPE, ttnn.bfloat16, ttnn.TILE_LAYOUT, chip)
    assert new.buffer_address() == address
    with pytest.raises(DeviceMemoryError, match="never written"):
        down(new)


def test_a_deallocated_tensor(chip: Any) -> None:
    import ttnn

    tensor = up(chip, random(*SHAPE))
    ttnn.deallocate(tensor)
    with pytest.raises(DeviceMemoryError, match=r"ttnn\.gelu: .* was deallocated"):
        ttnn.gelu(tensor)


def test_views_show_what_is_written_later(chip: Any) -> None:
    import ttnn

    tensor = up(chip, torch.ones(SHAPE))
    view = ttnn.reshape(tensor, (1, 2, 32, 96))
    assert view.buffer_address() == tensor.buffer_address()
    value = random(*SHAPE)
    waiting = ttnn.from_torch(value, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT)
    ttnn.copy_host_to_device_tensor(waiting, tensor)
    assert torch.equal(down(view), value.reshape(1, 2, 32, 96))


def test_an_upload_is_a_copy(chip: Any) -> None:
    import ttnn

    value = random(1, 1, 32, 32)
    rows = value.to(torch.bfloat16)
    waiting = ttnn.from_torch(rows, dtype=ttnn.bfloat16)  # shares torch's memory, as ttnn allows
    tensors = [
        ttnn.from_torch(rows, dtype=ttnn.bfloat16, device=chip),
        ttnn.to_device(waiting, chip),
    ]
    rows.zero_()
    for tensor in tensors:
        assert torch.equal(down(tensor), value)


def test_reading_back_is_a_copy(chip: Any) -> None:
    import ttnn

    tensor = up(chip, torch.ones(SHAPE))
    ttnn.to_torch(tensor).zero_()
    assert bool((down(tensor) == 1).all())


def test_l1_and_dram_addresses_do_not_meet(chip: Any) -> None:
    import ttnn

    values = random(*SHAPE), random(*SHAPE, seed=1)
    places = ttnn.DRAM_MEMORY_CONFIG, ttnn.L1_MEMORY_CONFIG
    tensors = [
        up(chip, value, memory_config=place) for value, place in zip(values, places, strict=True)
    ]
    for tensor, value in zip(tensors, values, strict=True):
        assert torch.equal(down(tensor), value)


def test_sharded_tensors(chip: Any) -> None:
    import ttnn

    value = random(1, 1, 128, 64)
    config = ttnn.create_sharded_memory_config(
        (1, 1, 128, 64), ttnn.CoreGrid(y=4, x=1), ttnn.ShardStrategy.HEIGHT
    )
    sharded = ttnn.to_memory_config(up(chip, value), config)
    assert sharded.is_sharded()
    assert torch.equal(down(ttnn.to_memory_config(sharded, ttnn.DRAM_MEMORY_CONFIG)), value)


def test_what_the_device_refuses_stays_an_error(chip: Any) -> None:
    import ttnn

    with pytest.raises(RuntimeError, match=r"[Oo]ut of [Mm]emory|Not enough space"):
        ttnn.allocate_tensor_on_device(
            ttnn.Shape([1, 1, 200_000, 100_000]), ttnn.bfloat16, ttnn.TILE_LAYOUT, chip
        )
    with pytest.raises(RuntimeError):
        ttnn.matmul(up(chip, random(1, 1, 32, 64)), up(chip, random(1, 1, 32, 64)))


def test_values_of_freed_buffers_are_dropped(emulator: Any, chip: Any) -> None:
    import ttnn

    kept = up(chip, random(*SHAPE))
    before = emulator.memory.host_bytes()
    for seed in range(5):
        up(chip, random(1, 1, 256 + 32 * seed, 256))  # let go by Python, without deallocate
    ttnn.synchronize_device(chip)
    emulator.memory.collect_when_full(0)
    assert emulator.memory.host_bytes() <= before
    assert torch.equal(down(kept), random(*SHAPE))


def test_spans_are_merged() -> None:
    spans = [(10, 20, "b"), (0, 12, "a"), (15, 18, "c"), (30, 40, "d")]
    assert merged(spans) == [(0, 12, "a"), (12, 20, "b"), (30, 40, "d")]
