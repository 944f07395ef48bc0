"""The checks of ``sam3-ray doctor`` that are about Tenstorrent chips. None is opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sam3_ray import chips
from sam3_ray.backends.blackhole.dispatch import COMMAND, eth_state
from sam3_ray.cli.doctor_check import Check

_TENSTORRENT_VENDOR = "0x1e52"


def check_chips(machine: chips.Machine, visible: tuple[chips.Chip, ...], root: Path) -> Check:
    """Which chips are here, and whether they can be opened.

    Args:
        machine: this one.
        visible: the chips that TT_VISIBLE_DEVICES leaves.
        root: where ``sys`` is; another folder in tests.
    """
    if not machine.chips:
        cards = _cards_on_the_bus(root)
        if cards:
            return Check(
                "chips",
                "missing",
                f"{cards} Tenstorrent card(s) on the PCI bus, but no driver (no /dev/tenstorrent)",
                "install tt-kmd and `modprobe tenstorrent` (docs.tenstorrent.com); in a container pass "
                "--device /dev/tenstorrent",
            )
        return Check("chips", "ok", "none: the model runs on the CPU")
    described = [_describe(chip) for chip in visible]
    hidden = len(machine.chips) - len(visible)
    found = "; ".join(described) or "none"
    if hidden:
        found += f" ({hidden} more hidden by {chips.VISIBLE_DEVICES})"
    locked = [chip for chip in visible if not chip.readable]
    if locked:
        return Check(
            "chips",
            "missing",
            found,
            f"this user may not open /dev/tenstorrent/{locked[0].device}: add it to the file's group",
        )
    if any(chip.busy for chip in visible):
        return Check(
            "chips",
            "warning",
            found,
            f"stop what uses a chip, or leave it out: {chips.VISIBLE_DEVICES}=...",
        )
    return Check("chips", "ok", found)


def _describe(chip: chips.Chip) -> str:
    parts = [chip.card or "unknown card", chip.pci_address or f"/dev/tenstorrent/{chip.device}"]
    if chip.firmware:
        parts.append(f"firmware {chip.firmware}")
    parts.append(f"open in {', '.join(map(str, chip.holders))}" if chip.busy else "free")
    return f"{chip.index}: {', '.join(parts)}"


def _cards_on_the_bus(root: Path) -> int:
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return sum(vendor.read_text().strip() == _TENSTORRENT_VENDOR for vendor in vendors)


def check_what_chips_need(
    machine: chips.Machine, visible: tuple[chips.Chip, ...]
) -> Iterator[Check]:
    """The driver, and memory that a chip can reach."""
    if machine.driver is None:
        yield Check(
            "driver",
            "warning",
            "its version cannot be read",
            "is tt-kmd loaded? `modinfo tenstorrent`",
        )
    else:
        yield Check("driver", "ok", f"tt-kmd {machine.driver}")
    without_iommu = [chip for chip in visible if not chip.iommu]
    pages = machine.hugepages or 0
    if not without_iommu:
        yield Check("hugepages", "ok", "an IOMMU translates: none are needed")
    elif pages >= len(without_iommu):
        free = "" if machine.free_hugepages is None else f", {machine.free_hugepages} free"
        yield Check("hugepages", "ok", f"{pages} of 1 GiB{free}")
    else:
        yield Check(
            "hugepages",
            "missing",
            f"{pages} of 1 GiB, and no IOMMU translates for {len(without_iommu)} chip(s)",
            f"set aside {len(without_iommu)} pages of 1 GiB (tenstorrent's hugepages-setup service does), or "
            "turn the IOMMU on",
        )


def check_dispatch(visible: tuple[chips.Chip, ...]) -> Iterator[Check]:
    """What ``dispatch="auto"`` takes, for each type of board."""
    boards = list(dict.fromkeys(chip.card or "unknown" for chip in visible))
    for board in boards:
        name = "dispatch" if len(boards) == 1 else f"dispatch on {board}"
        eth = eth_state(board)
        if eth.usable:
            yield Check(name, "ok", f"eth: {eth.why}")
        else:
            yield Check(
                name,
                "warning",
                f"worker (a p150 has 11x10 cores instead of 12x10), since ETH dispatch: {eth.why}",
                f"{COMMAND} (needs a free chip)",
            )
