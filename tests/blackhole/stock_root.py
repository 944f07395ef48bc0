"""A small runtime root with the installed ttnn's own three files, for tests that change or patch them."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

ETH_DESCRIPTOR = "tt_metal/core_descriptors/blackhole_140_arch_eth_dispatch.yaml"
WORKER_DESCRIPTOR = "tt_metal/core_descriptors/blackhole_140_arch.yaml"
LINKER_SCRIPT = "runtime/hw/toolchain/blackhole/kernel_ierisc.ld"
PATCHED = (ETH_DESCRIPTOR, WORKER_DESCRIPTOR, LINKER_SCRIPT)


def ttnn_package() -> Path:
    """The installed ttnn's folder; it is not imported."""
    spec = importlib.util.find_spec("ttnn")
    assert spec is not None, "these tests need ttnn: make install"
    assert spec.origin is not None
    return Path(spec.origin).parent


def make_stock_root(folder: Path) -> Path:
    """Copies of the three files, and a few neighbours that an overlay has to link."""
    for name in PATCHED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ttnn_package() / name, folder / name)
    for name in (
        "tt_metal/hw/inc/one.h",
        "tt_metal/core_descriptors/other.yaml",
        "runtime/hw/lib/two.o",
        "runtime/hw/toolchain/blackhole/three.ld",
        "__pycache__/four.pyc",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def patch_linker_script(root: Path) -> None:
    """What a tt-metal tree that is built with the ETH patch has."""
    script = root / LINKER_SCRIPT
    text = script.read_text()
    assert "(24 * 1024)" in text
    script.write_text(text.replace("(24 * 1024)", "(40 * 1024)"))


def without_a_machine(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """No chip, no emulation, no variable of tt-metal, and an empty cache folder."""
    for name in ("TT_METAL_MOCK_CLUSTER_DESC_PATH", "TT_METAL_RUNTIME_ROOT", "TT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SAM3_CACHE_DIR", str(cache))
