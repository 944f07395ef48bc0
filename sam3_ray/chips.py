"""Which Tenstorrent chips are here, read from the kernel's files: no chip is opened, ttnn is not imported.

The driver (tt-kmd) has one character device a chip, ``/dev/tenstorrent/<number>``, and beside them a folder
``by-id``. ``TT_VISIBLE_DEVICES`` counts otherwise: its integers are positions in PCI-address order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

VISIBLE_DEVICES = "TT_VISIBLE_DEVICES"

RAY_RESOURCE = "TTNPU"
"""Ray's own name for a chip: an actor with one of it gets that chip's TT_VISIBLE_DEVICES."""

MOCK_CLUSTER = "TT_METAL_MOCK_CLUSTER_DESC_PATH"
"""tt-metal's variable that puts an emulated cluster in place of the chips."""

NO_CHIPS = "NoDevFiles"
"""A value of TT_VISIBLE_DEVICES that hides every chip (Ray writes it so)."""

_HIDE_ALL = {"", "none", "nodevfiles"}
_PCI_ADDRESS = re.compile(r"(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_HUGEPAGES = "sys/kernel/mm/hugepages/hugepages-1048576kB"


@dataclass(frozen=True)
class Holder:
    """A process that has a chip open.

    Attributes:
        pid: its id.
        name: of its program, as far as the kernel tells.
    """

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


@dataclass(frozen=True)
class Chip:
    """One chip.

    Attributes:
        index: what TT_VISIBLE_DEVICES calls it.
        device: number of its file in ``/dev/tenstorrent``.
        pci_address: such as ``0000:01:00.0``; None where the kernel does not tell.
        card: such as ``p150a``; None where the driver does not tell.
        firmware: version of its firmware bundle; None where the driver does not tell.
        readable: whether this user may open it.
        iommu: whether an IOMMU translates for it; None where the kernel does not tell.
        holders: the processes that have it open, as far as this user may see.
    """

    index: int
    device: int
    pci_address: str | None = None
    card: str | None = None
    firmware: str | None = None
    readable: bool = True
    iommu: bool | None = None
    holders: tuple[Holder, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether a process has it open. One that only watches it (a monitor) counts too."""
        return bool(self.holders)


@dataclass(frozen=True)
class Machine:
    """What the kernel tells of the chips and of what they need.

    Attributes:
        chips: all of them, in PCI-address order.
        driver: version of the kernel driver; None where it is not loaded.
        hugepages: 1 GiB pages set aside; None where the kernel has none of that size.
        free_hugepages: those that nobody has taken.
    """

    chips: tuple[Chip, ...] = ()
    driver: str | None = None
    hugepages: int | None = None
    free_hugepages: int | None = None

    def visible(self, environment: Mapping[str, str] | None = None) -> tuple[Chip, ...]:
        """The chips that ``TT_VISIBLE_DEVICES`` leaves; all where it is not set.

        Raises:
            ValueError: it names a chip that is not here, or one twice.
        """
        value = (os.environ if environment is None else environment).get(VISIBLE_DEVICES)
        if value is None:
            return self.chips
        if value.strip().lower() in _HIDE_ALL:
            return ()
        chosen = [self._named(name.strip(), value) for name in value.split(",")]
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"{VISIBLE_DEVICES}={value!r} names a chip twice")
        return tuple(chosen)

    def _named(self, name: str, value: str) -> Chip:
        for chip in self.chips:
            if name.isdigit() and int(name) == chip.index:
                return chip
            if _PCI_ADDRESS.fullmatch(name) and chip.pci_address in (
                name.lower(),
                f"0000:{name.lower()}",
            ):
                return chip
        here = ", ".join(str(chip.index) for chip in self.chips) or "none"
        raise ValueError(
            f"{VISIBLE_DEVICES}={value!r} names chip {name!r}, which is not here (chips here: {here})"
        )


def look(root: Path = Path("/")) -> Machine:
    """The chips of this machine.

    Args:
        root: where ``dev``, ``proc`` and ``sys`` are; another folder in tests.
    """
    numbers = [int(path.name) for path in _entries(root / "dev/tenstorrent") if path.name.isdigit()]
    addresses = {number: _pci_address(root, number) for number in numbers}
    # Without every address the order of the driver's numbers is the best guess.
    known = all(address is not None for address in addresses.values())
    order = sorted(numbers, key=lambda number: (addresses[number] or "" if known else "", number))
    holders = _holders(root, numbers)
    return Machine(
        chips=tuple(
            Chip(
                index=index,
                device=number,
                pci_address=addresses[number],
                card=_text(_class_folder(root, number) / "tt_card_type"),
                firmware=_text(_class_folder(root, number) / "tt_fw_bundle_ver"),
                readable=os.access(root / f"dev/tenstorrent/{number}", os.R_OK | os.W_OK),
                iommu=_iommu(root, number),
                holders=tuple(holders.get(number, ())),
            )
            for index, number in enumerate(order)
        ),
        driver=_text(root / "sys/module/tenstorrent/version"),
        hugepages=_integer(root / _HUGEPAGES / "nr_hugepages"),
        free_hugepages=_integer(root / _HUGEPAGES / "free_hugepages"),
    )


def visible_devices_value(chips: Iterable[Chip]) -> str:
    """TT_VISIBLE_DEVICES for these chips. Set before Ray starts, it is what Ray counts as TTNPU: left to
    itself, Ray 2.60 takes the driver's ``by-id`` folder for one more chip."""
    return ",".join(str(chip.index) for chip in chips) or NO_CHIPS


def _class_folder(root: Path, number: int) -> Path:
    return root / f"sys/class/tenstorrent/tenstorrent!{number}"


def _pci_address(root: Path, number: int) -> str | None:
    name = os.path.basename(os.path.realpath(_class_folder(root, number) / "device"))
    return name.lower() if _PCI_ADDRESS.fullmatch(name) else None


def _iommu(root: Path, number: int) -> bool | None:
    kind = _text(_class_folder(root, number) / "device/iommu_group/type")
    # "DMA" and "DMA-FQ" translate, "identity" passes addresses through.
    return None if kind is None else kind.startswith("DMA")


def _holders(root: Path, numbers: Iterable[int]) -> dict[int, list[Holder]]:
    """Who has which chip open: the driver's own list, or else every process's open files."""
    found: dict[int, list[Holder]] = {}
    unlisted = set()
    for number in numbers:
        listed = _text(root / f"proc/driver/tenstorrent/{number}/pids")
        if listed is None:
            unlisted.add(str(root / f"dev/tenstorrent/{number}"))
        else:
            pids = dict.fromkeys(int(word) for word in listed.split() if word.isdigit())
            found[number] = [_holder(root, pid) for pid in pids]
    if not unlisted:
        return found
    for process in _entries(root / "proc"):
        if not process.name.isdigit():
            continue
        opened = {_link(path) for path in _entries(process / "fd")}
        for device in sorted(opened & unlisted):
            found.setdefault(int(os.path.basename(device)), []).append(
                _holder(root, int(process.name))
            )
    return found


def _holder(root: Path, pid: int) -> Holder:
    return Holder(pid, _text(root / f"proc/{pid}/comm") or "a process")


def _entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing where it is not there, is another user's, or has just gone."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _text(path: Path) -> str | None:
    """A kernel file's text; None where it is not there or not for this user (or the chip does not answer)."""
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _integer(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None
