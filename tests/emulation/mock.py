"""A runtime folder and an environment with which the stock ttnn opens a mock p150.

Three things stand in for the machine: a cluster descriptor instead of chips, a runtime root of links to
the wheel's data, and in it a "compiler" that answers every link with the null kernel. ttnn reads the
environment when it is imported, so all of it must be there before.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import stat
from pathlib import Path
from typing import Literal

from tests.emulation.null_kernel import null_kernel

Dispatch = Literal["worker", "eth"]

MOST_CHIPS = 4

# A p150 has 12 of its 14 Tensix columns and 12 of its 14 Ethernet cores: 11x10 cores with worker dispatch.
_HARVESTED_COLUMNS = 0b11
_HARVESTED_ETHERNET_CORES = 0b1_0010_0000
_HARVESTED_PCIE = 0b10

# In sh, because it runs three times a kernel: Python would take 30 ms each time.
_COMPILER = """#!/bin/sh
# Not a compiler: compiling makes an empty object and a list of prerequisites, linking copies the null kernel.
output= compiling= prerequisites= last=
for word in "$@"; do
  case "$word" in
    --version) echo {version}; exit 0 ;;
    -c | c++-header) compiling=1 ;;
    -MMD) prerequisites=1 ;;
  esac
  if [ "$last" = -o ]; then output=$word; fi
  last=$word
done
folder=${{output%/*}}
[ -d "$folder" ] || mkdir -p "$folder"
if [ -z "$compiling" ]; then exec cp {kernel} "$output"; fi
: > "$output"
if [ -n "$prerequisites" ]; then echo "$output:" > "${{output%.*}}.d"; fi
"""


def ttnn_package() -> Path:
    """The installed ttnn's folder, found without importing it.

    Raises:
        ImportError: ttnn is not installed.
    """
    spec = importlib.util.find_spec("ttnn")
    if spec is None or spec.origin is None:
        raise ImportError(
            "the emulation needs ttnn, which is not installed: pip install 'sam3-ray[blackhole]'"
        )
    return Path(spec.origin).parent


def prepare(root: Path, *, chips: int = 1, dispatch: Dispatch = "worker") -> dict[str, str]:
    """Lay out the runtime root of a mock machine.

    Several processes may share the result (kernels are cached under it), but only one may lay it out.

    Args:
        root: an empty or missing folder; everything that ttnn writes goes below it.
        chips: how many p150, 1 to 4, not connected to each other.
        dispatch: ``eth`` lays the three patched files of the ETH overlay over the wheel's, so that a device
            opened with ETH dispatch has 12x10 cores; ``worker`` is the stock wheel.

    Returns:
        The environment variables to set before ttnn is imported.

    Raises:
        ValueError: ``chips`` or ``dispatch`` is out of range.
        ImportError: ttnn is not installed.
    """
    if not 1 <= chips <= MOST_CHIPS:
        raise ValueError(f"chips must be 1 to {MOST_CHIPS}, got {chips}")
    if dispatch not in ("worker", "eth"):
        raise ValueError(f"dispatch must be 'worker' or 'eth', got {dispatch!r}")
    root = root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    source = ttnn_package()
    runtime = root / "runtime-root"
    if dispatch == "eth":
        # Imported here: worker dispatch must not need the overlay.
        from sam3_ray.backends.blackhole.overlay import build_overlay

        build_overlay(source, runtime)
    else:
        _link_entries(source, runtime)
    _install_compiler(runtime, root)
    descriptor = root / "cluster.yaml"
    # JSON is YAML, and no YAML library is needed to write it.
    descriptor.write_text(json.dumps(cluster_descriptor(chips), indent=1))
    return {
        "TT_METAL_RUNTIME_ROOT": str(runtime),
        "TT_METAL_MOCK_CLUSTER_DESC_PATH": str(descriptor),
        "TT_METAL_CACHE": str(root / "kernel-cache"),
        "TT_METAL_LOGS_PATH": str(
            root / "logs"
        ),  # else generated/ appears in the working directory
        "TT_METAL_INSPECTOR_RPC": "0",  # it would listen on one port for all processes
        "TT_LOGGER_LEVEL": "error",
        "LOGURU_LEVEL": "WARNING",
    }


def cluster_descriptor(chips: int) -> dict[str, object]:
    """A cluster of unconnected p150, in the form that tt-umd reads."""
    harvesting = {
        "noc_translation": True,
        "harvest_mask": _HARVESTED_COLUMNS,
        "dram_harvesting_mask": 0,
        "eth_harvesting_mask": _HARVESTED_ETHERNET_CORES,
        "pcie_harvesting_mask": _HARVESTED_PCIE,
        "l2cpu_harvesting_mask": 0,
    }
    each = range(chips)
    return {
        "arch": dict.fromkeys(each, "blackhole"),
        "chips": {},
        "chip_unique_ids": {chip: 1001 + chip for chip in each},
        "ethernet_connections": [],
        "ethernet_connections_to_remote_devices": [],
        "chips_with_mmio": [{chip: chip} for chip in each],
        "harvesting": dict.fromkeys(each, harvesting),
        # Of a p150's form: the board kind is in the number's upper bits.
        "boards": [
            [{"board_id": 4476187513037 + chip}, {"board_type": "p150"}, {"chips": [chip]}]
            for chip in each
        ],
    }


def _link_entries(source: Path, target: Path) -> None:
    """Make ``target`` a folder of links to ``source``'s entries, ``runtime`` a folder of its own."""
    target.mkdir()
    for entry in source.iterdir():
        if entry.name != "runtime":
            (target / entry.name).symlink_to(entry)
    (target / "runtime").mkdir()
    for entry in (source / "runtime").iterdir():
        (target / "runtime" / entry.name).symlink_to(entry)


def _install_compiler(runtime_root: Path, root: Path) -> None:
    """Put the stand-in for the RISC-V compiler where ttnn looks for it."""
    kernel = root / "null_kernel.elf"
    kernel.write_bytes(null_kernel())
    tools = runtime_root / "runtime" / "sfpi"
    if tools.is_symlink():
        tools.unlink()
    elif tools.exists():
        shutil.rmtree(tools)
    compiler = tools / "compiler" / "bin" / "riscv-tt-elf-g++"
    compiler.parent.mkdir(parents=True)
    # The same answer as the compiler that the wheel's firmware was built with: ttnn then uses that firmware.
    pinned = (runtime_root / "tt_metal" / "sfpi-version").read_text()
    release, build = (
        re.search(rf"^{name}='([^']*)'", pinned, re.MULTILINE)[1]  # type: ignore[index]
        for name in ("sfpi_version", "sfpi_build")
    )
    version = f"riscv-tt-elf-g++ (tenstorrent/sfpi:{release}[{build}]) 15.1.0"
    compiler.write_text(_COMPILER.format(version=_quoted(version), kernel=_quoted(str(kernel))))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)


def _quoted(text: str) -> str:
    """A word of sh."""
    return "'" + text.replace("'", "'\\''") + "'"
