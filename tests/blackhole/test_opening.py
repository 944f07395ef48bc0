"""Opening a chip: each way it can fail is a ``ChipUnavailableError`` that says what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sam3_ray import chips, device_open_kwargs
from sam3_ray.backends.blackhole import opening
from sam3_ray.errors import ChipUnavailableError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a machine in the place of this one."""

    def put(found: chips.Machine, visible: str | None = None) -> None:
        monkeypatch.setattr(chips, "look", lambda *_: found)
        if visible is not None:
            monkeypatch.setenv(chips.VISIBLE_DEVICES, visible)
        else:
            monkeypatch.delenv(chips.VISIBLE_DEVICES, raising=False)

    return put


CHIP = chips.Chip(index=0, device=0, pci_address="0000:01:00.0", iommu=True)


@pytest.mark.parametrize(
    ("found", "visible", "device_id", "message"),
    [
        (chips.Machine(), None, 0, "no Tenstorrent chip here: the kernel driver is not loaded"),
        (chips.Machine(driver="2.5.0"), None, 0, "driver 2.5.0 shows none in /dev/tenstorrent"),
        (chips.Machine((CHIP,)), None, 1, r"device_id=1, but 1 chip\(s\) are visible"),
        (chips.Machine((CHIP,)), "3", 0, "names chip '3', which is not here"),
        (chips.Machine((CHIP,)), "0,0", 0, "names a chip twice"),
    ],
)
def test_what_is_known_before_opening(
    machine: Any, found: chips.Machine, visible: str | None, device_id: int, message: str
) -> None:
    machine(found, visible)
    with pytest.raises(ChipUnavailableError, match=message):
        opening.open_device(device_id, "worker")


@pytest.mark.parametrize(
    ("chip", "free_pages", "hint"),
    [
        (
            chips.Chip(0, 0, iommu=True, holders=(chips.Holder(4711, "python"),)),
            0,
            "it is open in .*4711",
        ),
        (chips.Chip(0, 7, iommu=True, readable=False), 0, "/dev/tenstorrent/7 is not readable"),
        (chips.Chip(0, 0, iommu=False), 0, "no 1 GiB huge page is free and no IOMMU"),
    ],
)
def test_why_a_chip_does_not_open(
    machine: Any, chip: chips.Chip, free_pages: int, hint: str
) -> None:
    """tt-metal's own message, and what is known of the chip."""
    machine(chips.Machine((chip,), hugepages=free_pages, free_hugepages=free_pages))
    thrown = RuntimeError("TT_FATAL @ cluster.cpp: found\ninfo:\nNo chips detected\nbacktrace:\n 1")
    message = opening._why_not(0, thrown)
    assert "chip 0 does not open: No chips detected" in message
    assert "sam3-ray doctor" in message
    with pytest.raises(AssertionError, match=hint):
        raise AssertionError(message)


def test_ttnn_imported_before_the_variable_was_set(
    emulator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the chips of that moment; a replica would share its chip with others."""
    monkeypatch.setenv(chips.VISIBLE_DEVICES, "0,1")
    with pytest.raises(ChipUnavailableError, match=r"names 2 chip\(s\), but ttnn sees 1.*imported"):
        opening.open_device(0, "worker")


def test_a_failure_of_ttnn_is_told_as_ours(emulator: Any) -> None:
    with pytest.raises(ChipUnavailableError, match="chip 7 does not open"):
        opening.open_device(7, "worker")
    opening.open_device(0, "worker").close()  # and chip 0 is as free as before


def test_a_device_that_is_none(emulator: Any) -> None:
    with pytest.raises(TypeError, match="device must be an open ttnn device, got 3"):
        opening.open_device(0, "worker", device=3)


def test_kernels_of_each_chip_have_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SAM3_CACHE_DIR", str(tmp_path))
    names = set()
    for visible, device_id in (("0", 0), ("3", 0), ("0000:41:00.0", 0), ("2,5", 1)):
        monkeypatch.setenv(chips.VISIBLE_DEVICES, visible)
        names.add(opening.kernel_cache(device_id).relative_to(tmp_path).as_posix())
    assert names == {"kernels/0", "kernels/3", "kernels/0000-41-00.0", "kernels/5"}


@pytest.mark.parametrize(
    ("boards", "visible", "given", "named"),
    [
        (["p300c", "p300c"], "1", None, True),  # one of a board's two
        (["p300c", "p300c"], None, None, False),  # tt-metal knows the whole board
        (["p150a"], None, None, False),
        (["p150a", "p150b"], "1", None, False),
        (["galaxy"] * 4, "0000:04:00.0", None, True),
        (["p300c", "p300c"], "1", "/my/own.textproto", False),
        ([None], None, None, False),  # the driver does not tell: left to tt-metal
    ],
)
def test_the_mesh_of_one_chip_of_many_is_named(
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    boards: list[str | None],
    visible: str | None,
    given: str | None,
    named: bool,
) -> None:
    found = tuple(
        chips.Chip(i, i, pci_address=f"0000:0{i + 1}:00.0", card=board)
        for i, board in enumerate(boards)
    )
    machine(chips.Machine(found), visible)
    monkeypatch.delenv("TT_METAL_MOCK_CLUSTER_DESC_PATH", raising=False)
    monkeypatch.setenv("TT_MESH_GRAPH_DESC_PATH", given or "")
    device_open_kwargs(0, "worker")
    value = os.environ["TT_MESH_GRAPH_DESC_PATH"]
    if named:
        # The stock wheel's own file, of one Blackhole chip.
        assert re.search(r"arch:\s*BLACKHOLE", Path(value).read_text())
        assert re.search(r"device_topology\s*{\s*dims:\s*\[\s*1\s*,\s*1", Path(value).read_text())
    else:
        assert value == (given or "")


def test_the_environment_is_set_before_ttnn_is_imported(tmp_path: Path) -> None:
    """In a process of its own: the log is quiet and kernels go to the chip's folder."""
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
os.environ["SAM3_CACHE_DIR"] = {str(tmp_path / "cache")!r}
from tests import emulation
from pathlib import Path
from tests.emulation.mock import prepare
variables = prepare(Path({str(tmp_path / "mock")!r}))
del variables["TT_METAL_CACHE"], variables["TT_LOGGER_LEVEL"], variables["LOGURU_LEVEL"]
os.environ.update(variables)
emulation.emulate_on_import()
from sam3_ray import Sam3
model = Sam3.from_pretrained(
    "demo", backend="blackhole", dispatch="worker", image_cache_bytes=0, warmup=0
)
print(os.environ["TT_METAL_CACHE"], os.environ["TT_LOGGER_LEVEL"])
"""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "cache/kernels/0"), "error"]
    assert done.stderr == ""
    assert list((tmp_path / "cache/kernels/0").iterdir())  # kernels were built there
    # The model was left open: it closes at exit, without a word.
