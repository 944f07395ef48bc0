"""chips.py on fake roots: files as tt-kmd lays them out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sam3_ray.chips import Machine, look, visible_devices_value


def make_chip(
    root: Path,
    number: int,
    *,
    pci: str | None = None,
    card: str | None = None,
    iommu: str | None = None,
    pids: list[int] | None = None,
) -> None:
    """One chip's files."""
    devices = root / "dev/tenstorrent"
    (devices / "by-id").mkdir(parents=True, exist_ok=True)
    (devices / str(number)).touch()
    (devices / "by-id" / f"board-{number}").symlink_to(f"../{number}")
    folder = root / f"sys/class/tenstorrent/tenstorrent!{number}"
    folder.mkdir(parents=True)
    if card is not None:
        (folder / "tt_card_type").write_text(card + "\n")
        (folder / "tt_fw_bundle_ver").write_text("19.2.0.0\n")
    if pci is not None:
        device = root / "sys/bus/pci/devices" / pci
        device.mkdir(parents=True)
        (folder / "device").symlink_to(device)
        if iommu is not None:
            (device / "iommu_group").mkdir()
            (device / "iommu_group/type").write_text(iommu + "\n")
    if pids is not None:
        process_list = root / f"proc/driver/tenstorrent/{number}/pids"
        process_list.parent.mkdir(parents=True)
        process_list.write_text("".join(f"{pid}\n" for pid in pids))


def make_process(root: Path, pid: int, name: str, *opened: str) -> None:
    files = root / f"proc/{pid}/fd"
    files.mkdir(parents=True)
    (root / f"proc/{pid}/comm").write_text(name + "\n")
    for number, target in enumerate(opened):
        (files / str(number)).symlink_to(target)


def test_a_machine_without_chips(tmp_path: Path) -> None:
    assert look(tmp_path) == Machine()


def test_the_by_id_folder_is_no_chip(tmp_path: Path) -> None:
    for number in range(4):
        make_chip(tmp_path, number)
    machine = look(tmp_path)
    assert [chip.device for chip in machine.chips] == [0, 1, 2, 3]
    assert visible_devices_value(machine.chips) == "0,1,2,3"


def test_indices_follow_pci_addresses(tmp_path: Path) -> None:
    make_chip(tmp_path, 0, pci="0000:c1:00.0", card="p150a", iommu="DMA-FQ")
    make_chip(tmp_path, 1, pci="0000:01:00.0", card="p150b", iommu="identity")
    first, second = look(tmp_path).chips
    assert (first.index, first.device, first.pci_address) == (0, 1, "0000:01:00.0")
    assert (second.index, second.device, second.pci_address) == (1, 0, "0000:c1:00.0")
    assert (first.card, first.firmware, first.iommu) == ("p150b", "19.2.0.0", False)
    assert second.iommu is True


def test_ten_chips_without_addresses_keep_number_order(tmp_path: Path) -> None:
    for number in range(11):
        make_chip(tmp_path, number)
    assert [chip.device for chip in look(tmp_path).chips] == list(range(11))


def test_holders_from_the_drivers_list(tmp_path: Path) -> None:
    make_chip(tmp_path, 0, pids=[4242, 4242])
    make_chip(tmp_path, 1, pids=[])
    make_process(tmp_path, 4242, "tt-smi")
    busy, free = look(tmp_path).chips
    assert [str(holder) for holder in busy.holders] == ["tt-smi (pid 4242)"]
    assert busy.busy
    assert not free.busy


def test_holders_from_open_files_where_the_driver_has_no_list(tmp_path: Path) -> None:
    make_chip(tmp_path, 0)
    make_chip(tmp_path, 1)
    make_process(tmp_path, 77, "python", "/dev/null", str(tmp_path / "dev/tenstorrent/1"))
    make_process(tmp_path, 78, "bash", "/dev/null")
    free, busy = look(tmp_path).chips
    assert not free.busy
    assert [holder.pid for holder in busy.holders] == [77]


def test_a_file_held_open_for_real_is_seen(tmp_path: Path) -> None:
    """The process scan on the real /proc: this process holds the chip's file."""
    make_chip(tmp_path, 0)
    (tmp_path / "proc").symlink_to("/proc")
    with (tmp_path / "dev/tenstorrent/0").open():
        (chip,) = look(tmp_path).chips
        assert [holder.pid for holder in chip.holders] == [os.getpid()]
    (chip,) = look(tmp_path).chips
    assert not chip.busy


def test_driver_and_hugepages(tmp_path: Path) -> None:
    (tmp_path / "sys/module/tenstorrent").mkdir(parents=True)
    (tmp_path / "sys/module/tenstorrent/version").write_text("2.6.0\n")
    pages = tmp_path / "sys/kernel/mm/hugepages/hugepages-1048576kB"
    pages.mkdir(parents=True)
    (pages / "nr_hugepages").write_text("4\n")
    (pages / "free_hugepages").write_text("1\n")
    machine = look(tmp_path)
    assert (machine.driver, machine.hugepages, machine.free_hugepages) == ("2.6.0", 4, 1)


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        (None, [1, 0]),
        ("0", [1]),
        ("1,0", [0, 1]),
        (" 1 ", [0]),
        ("0000:c1:00.0", [0]),
        ("01:00.0", [1]),
        ("", []),
        ("none", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(tmp_path: Path, value: str | None, devices: list[int]) -> None:
    make_chip(tmp_path, 0, pci="0000:c1:00.0")
    make_chip(tmp_path, 1, pci="0000:01:00.0")
    environment = {} if value is None else {"TT_VISIBLE_DEVICES": value}
    assert [chip.device for chip in look(tmp_path).visible(environment)] == devices


@pytest.mark.parametrize(
    ("value", "named"), [("2", "'2'"), ("0,x", "'x'"), ("0,0", "twice"), ("0,", "''")]
)
def test_visible_devices_that_cannot_be(tmp_path: Path, value: str, named: str) -> None:
    make_chip(tmp_path, 0)
    with pytest.raises(ValueError, match="TT_VISIBLE_DEVICES") as raised:
        look(tmp_path).visible({"TT_VISIBLE_DEVICES": value})
    assert named in str(raised.value)


def test_no_visible_chip_hides_all_from_ray() -> None:
    from ray._private.accelerators.ttnpu import TTNPUAcceleratorManager

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TT_VISIBLE_DEVICES", visible_devices_value(()))
        assert TTNPUAcceleratorManager.get_current_process_visible_accelerator_ids() == []
