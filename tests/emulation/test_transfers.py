"""Uploads, read-backs and tensor files, and what is recorded of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulation.samples import down, random, up


def test_pixels_go_up_as_bytes(emulator: Any, chip: Any) -> None:
    import ttnn

    pixels = torch.randint(0, 256, (1, 1, 72, 588), dtype=torch.uint8)
    buffer = ttnn.allocate_tensor_on_device(
        ttnn.Shape(list(pixels.shape)), ttnn.uint8, ttnn.ROW_MAJOR_LAYOUT, chip
    )
    for shift in (0, 1):
        waiting = ttnn.from_torch(pixels + shift, dtype=ttnn.uint8)
        ttnn.copy_host_to_device_tensor(waiting, buffer)
        assert torch.equal(ttnn.to_torch(buffer), pixels + shift)
    upload = emulator.records.transfers[0]
    assert (upload.direction, upload.dtype, upload.shape) == ("up", "uint8", (1, 1, 72, 588))
    assert upload.op == "ttnn.copy_host_to_device_tensor"
    # 588 bytes a row, each row a page aligned to 64 bytes.
    assert upload.nbytes == 72 * 640
    assert emulator.records.bytes_up() == 2 * upload.nbytes
    assert emulator.records.bytes_down() == 2 * upload.nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "bfloat8_b", "uint32", "uint16", "int32"])
def test_data_types_survive_the_way_there_and_back(chip: Any, dtype: str) -> None:
    import ttnn

    value = random(1, 1, 33, 45)
    if "int" in dtype:
        value = torch.randint(0, 60_000, (1, 1, 33, 45), dtype=torch.int32)
    waiting = ttnn.from_torch(value, dtype=getattr(ttnn, dtype), layout=ttnn.TILE_LAYOUT)
    expected = waiting.to_torch()
    tensor = ttnn.to_device(waiting, chip)
    for back in (
        ttnn.to_torch(tensor),
        tensor.to_torch(),
        ttnn.from_device(tensor).to_torch(),
        tensor.cpu().to_torch(),
        waiting.to(chip).to_torch(),
    ):
        assert back.dtype == expected.dtype
        assert (
            torch.equal(back.long(), expected.long())
            if "int" in dtype
            else torch.equal(back, expected)
        )


def test_other_ways_to_read(chip: Any) -> None:
    tensor = up(chip, torch.full((32, 32), 3.0))
    assert tensor.to_list()[0][0] == 3.0
    assert "3.0000" in str(tensor)


def test_a_host_tensor_as_target(chip: Any) -> None:
    import ttnn

    value = random(1, 1, 32, 64)
    target = ttnn.allocate_tensor_on_host(
        ttnn.Shape([1, 1, 32, 64]), ttnn.bfloat16, ttnn.TILE_LAYOUT, chip
    )
    ttnn.copy_device_to_host_tensor(up(chip, value), target)
    assert torch.equal(ttnn.to_torch(target).float(), value)
    assert torch.equal(down(ttnn.to_device(target, chip)), value)


def test_host_operations_stay_ttnns_own(emulator: Any, chip: Any) -> None:
    import ttnn

    value = random(1, 1, 32, 64)
    waiting = ttnn.from_torch(value, dtype=ttnn.bfloat16)
    tiled = ttnn.to_layout(waiting, ttnn.TILE_LAYOUT)
    assert torch.equal(tiled.to_torch().float(), value)
    assert emulator.records.operations == []
    assert emulator.records.transfers == []


@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat8_b"])
def test_tensor_files(chip: Any, tmp_path: Path, dtype: str) -> None:
    import ttnn

    value, path = random(1, 1, 64, 96), tmp_path / "weight.tensorbin"
    waiting = ttnn.from_torch(value, dtype=getattr(ttnn, dtype), layout=ttnn.TILE_LAYOUT)
    ttnn.dump_tensor(path, waiting)
    loaded = ttnn.load_tensor(path, device=chip)
    assert loaded.dtype == getattr(ttnn, dtype)
    assert torch.equal(ttnn.to_torch(loaded), waiting.to_torch())
    again = tmp_path / "from_device.tensorbin"
    ttnn.dump_tensor(again, loaded)
    assert torch.equal(ttnn.load_tensor(again).to_torch(), waiting.to_torch())


def test_as_tensor_writes_and_reads_its_cache(emulator: Any, chip: Any, tmp_path: Path) -> None:
    import ttnn

    value = random(64, 96)
    options = {
        "dtype": ttnn.bfloat8_b,
        "layout": ttnn.TILE_LAYOUT,
        "device": chip,
        "memory_config": ttnn.DRAM_MEMORY_CONFIG,
        "cache_file_name": str(tmp_path / "weight"),
    }
    first = down(ttnn.as_tensor(value, **options))
    assert len(list(tmp_path.iterdir())) == 1
    second = down(ttnn.as_tensor(torch.zeros(64, 96), **options))  # read from the file
    assert torch.equal(first, second)
    uploads = [transfer.op for transfer in emulator.records.transfers if transfer.direction == "up"]
    assert uploads == ["ttnn.Tensor.to", "ttnn.load_tensor"]


def test_tensors_built_on_the_host(emulator: Any, chip: Any) -> None:
    import ttnn

    options = {"dtype": ttnn.bfloat16, "layout": ttnn.TILE_LAYOUT, "device": chip}
    assert bool((down(ttnn.zeros((1, 1, 33, 45), **options)) == 0).all())
    assert bool((down(ttnn.ones((1, 1, 33, 45), **options)) == 1).all())
    full = ttnn.full((1, 1, 33, 45), 2.5, **options)
    assert bool((down(full) == 2.5).all())
    assert bool((down(ttnn.zeros_like(full)) == 0).all())
    numbers = ttnn.arange(0, 64, 2, dtype=ttnn.bfloat16, device=chip)
    assert torch.equal(down(numbers).flatten(), torch.arange(0, 64, 2).float())
    assert {transfer.direction for transfer in emulator.records.transfers} == {"up", "down"}
