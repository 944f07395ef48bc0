"""Slots in DRAM: a hit has the bits of its miss, and nothing is lost or mixed up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

SHAPES = [(1, 1, 64, 64), (1, 1, 1, 32)]


@pytest.fixture
def slots(chip: Any) -> Any:
    from sam3_ray.backends.blackhole.image_cache import SlotCache

    return SlotCache(chip, SHAPES, 3)


def fill(slots: Any, seed: int) -> list[torch.Tensor]:
    """Write an image's features into the buffers, as the image part does."""
    import ttnn

    generator = torch.Generator().manual_seed(seed)
    slots.invalidate()
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    for value, buffer in zip(values, slots.buffers, strict=True):
        host = ttnn.from_torch(value, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT)
        ttnn.copy_host_to_device_tensor(host, buffer)
    return values


def read(slots: Any) -> list[torch.Tensor]:
    import ttnn

    return [ttnn.to_torch(buffer) for buffer in slots.buffers]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_hit_has_the_bits_of_its_miss(slots: Any) -> None:
    images = [(fill(slots, seed), slots.store()) for seed in range(3)]
    for i in (0, 2, 2, 1, 0):
        slots.load(images[i][1])
        assert same(read(slots), images[i][0])


def test_what_is_in_the_buffers_is_not_copied_again(slots: Any, emulator: Any) -> None:
    fill(slots, 0)
    features = slots.store()
    copies = count_copies(emulator)
    slots.load(features)
    assert count_copies(emulator) == copies
    fill(slots, 1)
    slots.load(features)
    assert count_copies(emulator) == copies + len(SHAPES)


def count_copies(emulator: Any) -> int:
    return sum(record.name == "ttnn.copy" for record in emulator.records.operations)


def test_a_released_slot_is_used_again(slots: Any) -> None:
    held = [(fill(slots, seed), slots.store()) for seed in range(3)]
    fill(slots, 3)
    with pytest.raises(RuntimeError, match="all 3 slots"):
        slots.store()
    held[1][1].release()
    held[1][1].release()  # a second time is nothing
    assert slots.free_slots == 1
    values = fill(slots, 4)
    features = slots.store()
    slots.load(held[0][1])
    slots.load(features)
    assert same(read(slots), values)
    with pytest.raises(RuntimeError, match="released"):
        slots.load(held[1][1])


def test_a_copy_that_fails_half_way_leaves_no_image_in_the_buffers(
    slots: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a slot lost: what comes after is another image's or nothing, never half of one."""
    import ttnn

    values, first = fill(slots, 0), slots.store()
    other, second = fill(slots, 1), slots.store()
    real, calls = ttnn.copy, []

    def failing(source: Any, target: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("planted")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(ttnn, "copy", failing)
        with pytest.raises(OSError, match="planted"):
            slots.load(first)
        free = slots.free_slots
        calls.clear()
        with pytest.raises(OSError, match="planted"):
            slots.store()
        assert slots.free_slots == free
    slots.load(second)
    assert same(read(slots), other)
    slots.load(first)
    assert same(read(slots), values)


def test_bytes_are_those_the_allocator_takes(chip: Any, slots: Any) -> None:
    """(1, 1, 64, 64) is four tiles, (1, 1, 1, 32) one, of 2,048 bytes."""
    assert slots.slot_nbytes == 5 * 2048
    fill(slots, 0)
    assert slots.store().nbytes == slots.slot_nbytes
