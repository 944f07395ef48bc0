"""The overlay of ttnn's data files: three are patched, the rest are links, unknown files are refused."""

from __future__ import annotations

import base64
import hashlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from sam3_ray.backends.blackhole import overlay
from sam3_ray.backends.blackhole.overlay import (
    KNOWN_FILES,
    UnknownTtnnFilesError,
    build_overlay,
    has_eth_patch,
    overlay_root,
    overlay_source,
    patched_files,
    tree_key,
    ttnn_version,
)
from tests.blackhole.stock_root import (
    ETH_DESCRIPTOR,
    LINKER_SCRIPT,
    PATCHED,
    WORKER_DESCRIPTOR,
    make_stock_root,
    patch_linker_script,
    without_a_machine,
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    without_a_machine(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    return make_stock_root(tmp_path / "stock")


def contents(folder: Path) -> dict[str, str]:
    """What is in a folder, links not followed: where they point, or what the files hold."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(place, name)
            if path.is_symlink():
                found[str(path.relative_to(folder))] = f"-> {os.readlink(path)}"
            elif path.is_file():
                found[str(path.relative_to(folder))] = path.read_text()
    return found


def test_the_known_files_are_those_of_the_wheel() -> None:
    """By the wheel's own list of hashes, which the packager wrote."""
    distribution = metadata.distribution("ttnn")
    recorded = {str(file): file.hash for file in distribution.files or []}
    for name, expected in KNOWN_FILES[distribution.version].items():
        listed = recorded[f"ttnn/{name}"]
        assert listed is not None
        assert listed.mode == "sha256"
        assert base64.urlsafe_b64decode(listed.value + "=").hex() == expected, name


def test_the_eth_descriptor_names_twelve_cores_and_is_else_the_same(stock: Path) -> None:
    before = yaml.safe_load((stock / ETH_DESCRIPTOR).read_text())
    after = yaml.safe_load(patched_files(stock)[ETH_DESCRIPTOR])
    assert set(before) == set(after) == {"unharvested", "1xharvested", "2xharvested"}
    for harvesting in before:
        for queues in (1, 2):
            old, new = before[harvesting]["col"][queues], after[harvesting]["col"][queues]
            assert old.pop("dispatch_cores") == [[0, core] for core in range(14)]
            assert new.pop("dispatch_cores") == [[0, core] for core in range(12)]
    assert before == after


def test_the_worker_descriptor_gains_the_twelfth_column_where_two_are_harvested(
    stock: Path,
) -> None:
    before = yaml.safe_load((stock / WORKER_DESCRIPTOR).read_text())
    after = yaml.safe_load(patched_files(stock)[WORKER_DESCRIPTOR])
    for queues in (1, 2):
        old = before["2xharvested"]["col"][queues]["compute_with_storage_grid_range"]
        new = after["2xharvested"]["col"][queues]["compute_with_storage_grid_range"]
        assert (old["end"], new["end"]) == ([10, 9], [11, 9])
        new["end"] = old["end"]
    assert before == after


def test_one_line_of_the_linker_script_changes(stock: Path) -> None:
    before = (stock / LINKER_SCRIPT).read_text().splitlines()
    after = patched_files(stock)[LINKER_SCRIPT].decode().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert [(old.strip(), new.strip()) for old, new in changed] == [
        ("LONG((24 * 1024)", "LONG((40 * 1024)")
    ]


def test_the_rest_are_links_and_the_source_stays_as_it_was(stock: Path, tmp_path: Path) -> None:
    before = contents(stock)
    target = tmp_path / "overlay"
    build_overlay(stock, target)
    assert contents(stock) == before
    found = contents(target)
    expected = {name: content.decode() for name, content in patched_files(stock).items()}
    for name in (
        "tt_metal/hw",
        "tt_metal/core_descriptors/other.yaml",
        "runtime/hw/lib",
        "runtime/hw/toolchain/blackhole/three.ld",
    ):
        expected[name] = f"-> {stock / name}"
    found.pop("sam3_ray_overlay.json")
    assert found == expected
    assert overlay_source(target) == stock
    assert overlay_source(stock) is None
    assert set(os.listdir(tmp_path)) == {"stock", "overlay"}


def test_of_the_installed_ttnn(tmp_path: Path) -> None:
    """All of its files are reached through the overlay, and three of them differ."""
    source = overlay.default_root()
    target = tmp_path / "overlay"
    build_overlay(source, target)
    names = [
        str(path.relative_to(source))
        for folder in ("tt_metal/core_descriptors", "runtime/hw/toolchain")
        for path in (source / folder).rglob("*")
        if path.is_file()
    ]
    assert len(names) > 20
    different = {
        name for name in names if (source / name).read_bytes() != (target / name).read_bytes()
    }
    assert different == set(PATCHED)


@pytest.mark.parametrize("name", PATCHED)
def test_an_unknown_file_is_refused_and_nothing_is_left(
    name: str, stock: Path, tmp_path: Path
) -> None:
    (stock / name).write_text((stock / name).read_text() + "\n")
    with pytest.raises(UnknownTtnnFilesError) as refused:
        build_overlay(stock, tmp_path / "cache/overlay")
    assert isinstance(refused.value, ValueError)
    found = hashlib.sha256((stock / name).read_bytes()).hexdigest()
    for part in (name, found, str(ttnn_version())):
        assert part in str(refused.value)
    assert not (tmp_path / "cache").exists()


def test_an_unknown_version_is_refused(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlay, "ttnn_version", lambda: "0.99.0")
    with pytest.raises(UnknownTtnnFilesError, match=r"ttnn 0\.99\.0.*known are.*0\.81\.1"):
        patched_files(stock)


def test_a_folder_that_is_no_runtime_root(tmp_path: Path) -> None:
    with pytest.raises(UnknownTtnnFilesError, match="TT_METAL_RUNTIME_ROOT"):
        build_overlay(tmp_path, tmp_path / "overlay")


def test_a_place_that_is_taken_is_left_alone(stock: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="mine"):
        build_overlay(stock, target)
    assert contents(target) == {"notes.txt": "mine"}
    other = make_stock_root(tmp_path / "other")
    build_overlay(other, tmp_path / "overlay")
    with pytest.raises(FileExistsError, match="overlay"):
        build_overlay(stock, tmp_path / "overlay")


def test_a_build_that_fails_leaves_nothing(
    stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(overlay.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        build_overlay(stock, tmp_path / "cache/overlay")
    assert os.listdir(tmp_path / "cache") == []


def test_an_overlay_gains_what_was_installed_later_and_is_mended(
    stock: Path, tmp_path: Path
) -> None:
    target = tmp_path / "overlay"
    build_overlay(stock, target)
    compiler = stock / "runtime/sfpi/compiler"
    compiler.mkdir(parents=True)
    (target / LINKER_SCRIPT).write_text("spoilt")
    build_overlay(stock, target)
    assert (target / "runtime/sfpi/compiler").is_dir()
    assert (target / LINKER_SCRIPT).read_bytes() == patched_files(stock)[LINKER_SCRIPT]


def _build(arguments: tuple[Path, Path]) -> str:
    source, target = arguments
    build_overlay(source, target)
    return tree_key(target)  # complete for this process, whoever made it


def test_many_processes_at_once(stock: Path, tmp_path: Path) -> None:
    targets = [tmp_path / "cache" / f"overlay-{number}" for number in range(6)]
    work = [(stock, target) for target in targets for _ in range(4)]
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        keys = set(pool.map(_build, work, timeout=60))
    assert keys == {overlay.files_key(patched_files(stock))}
    assert sorted((tmp_path / "cache").iterdir()) == targets  # no half-made one beside them
    assert contents(targets[0]).keys() == contents(targets[5]).keys()


def test_its_place(stock: Path, tmp_path: Path, cache: Path) -> None:
    root = overlay_root(stock)
    assert root.parent == cache / "eth-dispatch"
    assert str(ttnn_version()) in root.name
    assert overlay.files_key(patched_files(stock)) in root.name
    assert overlay_root(make_stock_root(tmp_path / "other")) != root
    assert not root.exists()


def test_its_place_is_that_of_the_root_in_use(stock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TT_METAL_RUNTIME_ROOT", str(stock))
    root = overlay_root()
    assert root == overlay_root(stock)
    build_overlay(stock, root)
    monkeypatch.setenv("TT_METAL_RUNTIME_ROOT", str(root))
    assert overlay_root() == root


def test_what_counts_as_patched(stock: Path, tmp_path: Path) -> None:
    assert not has_eth_patch(stock)
    build_overlay(stock, tmp_path / "overlay")
    assert has_eth_patch(tmp_path / "overlay")
    patch_linker_script(stock)
    assert has_eth_patch(stock)
    assert not has_eth_patch(tmp_path)
