"""A ttnn runtime root with ETH dispatch: links to the installed data files, three of them patched.

The stock ttnn cannot open a Blackhole with dispatch on its Ethernet cores: ``No core coordinate found at
location: (0, 12, ETH, LOGICAL)`` (tt-metal issue 49701). Three of its data files stand in the way, and ttnn
reads its data from the folder that TT_METAL_RUNTIME_ROOT names, so a folder of links with those three
replaced does it without a rebuild. On a chip it has to prove itself first: ``enable.py`` tries it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath

from sam3_ray.settings import cache_folder

RUNTIME_ROOT = "TT_METAL_RUNTIME_ROOT"
"""The variable that ttnn takes its data folder from when it is imported."""

_ETH_DESCRIPTOR = "tt_metal/core_descriptors/blackhole_140_arch_eth_dispatch.yaml"
_WORKER_DESCRIPTOR = "tt_metal/core_descriptors/blackhole_140_arch.yaml"
_IDLE_ETH_LINKER_SCRIPT = "runtime/hw/toolchain/blackhole/kernel_ierisc.ld"

KNOWN_FILES: dict[str, dict[str, str]] = {
    "0.81.1": {
        _ETH_DESCRIPTOR: "4a1e81d73d349dcac277132cf2a7052e644ba6381b01a518232de52569490a4f",
        _WORKER_DESCRIPTOR: "a74bbec1be32402cf0033550085f3364d9b31be62d314a7bde525d0748400348",
        _IDLE_ETH_LINKER_SCRIPT: "dd2902548916eac4df89ba3c58bb2a1e02f9a1e286b4a57975d5c2079d0fb97a",
    },
}
"""SHA-256 of the files that the patches were written for, by ttnn version (of PyPI's wheels)."""

_MARKER = "sam3_ray_overlay.json"
_STOCK_IDLE_ETH_KIB = 24
_PATCHED_IDLE_ETH_KIB = 40  # as tt-metal pull request 57142, revision 2


class UnknownTtnnFilesError(ValueError):
    """This ttnn's data files are not those that the patches were written for."""


def ttnn_version() -> str | None:
    """Version of the installed ttnn; None where there is none. ttnn is not imported."""
    try:
        return metadata.version("ttnn")
    except metadata.PackageNotFoundError:
        return None


def default_root() -> Path:
    """The data folder that ttnn takes where TT_METAL_RUNTIME_ROOT is not set (ttnn/__init__.py, 0.81.1).

    Raises:
        ImportError: ttnn is not installed.
    """
    spec = importlib.util.find_spec("ttnn")
    if spec is None or spec.origin is None:
        raise ImportError("ttnn is not installed: pip install 'sam3-ray[blackhole]'")
    package = Path(spec.origin).resolve().parent
    installed = {"site-packages", "dist-packages"} & set(package.parts)
    return package if installed else package.parent.parent


def runtime_root() -> Path:
    """The data folder that ttnn takes, or took: TT_METAL_RUNTIME_ROOT, else :func:`default_root`."""
    chosen = os.environ.get(RUNTIME_ROOT, "").strip()
    return Path(chosen).absolute() if chosen else default_root()


def overlay_source(root: Path) -> Path | None:
    """What the overlay ``root`` links to; None where ``root`` is no overlay of ours."""
    try:
        return Path(json.loads((root / _MARKER).read_text())["source"])
    except FileNotFoundError:
        return None


def has_eth_patch(root: Path) -> bool:
    """Whether a runtime root was made for ETH dispatch: an overlay, or a tt-metal built with the patch.

    The mark is the room for an idle Ethernet core's kernel: the dispatch kernel does not link in the stock
    24 KiB, so every working tree has more. A tree that only drops the harvested cores does not pass.
    """
    try:
        script = (root / _IDLE_ETH_LINKER_SCRIPT).read_text()
    except FileNotFoundError:
        return False
    room = re.search(r"LONG\(\((\d+) \* 1024\)", script)
    return room is not None and int(room[1]) > _STOCK_IDLE_ETH_KIB


def patched_files(source: Path) -> dict[str, bytes]:
    """The three patched files, by their place in a runtime root.

    Args:
        source: a runtime root with the stock files.

    Raises:
        UnknownTtnnFilesError: a file is not the one of a version known here.
    """
    version = ttnn_version()
    known = KNOWN_FILES.get(version or "")
    patched = {}
    for name, patch in _PATCHES.items():
        try:
            content = (source / name).read_bytes()
        except FileNotFoundError:
            raise UnknownTtnnFilesError(
                f"ttnn {version} has no {name} in {source}: is {RUNTIME_ROOT} right?"
            ) from None
        found = hashlib.sha256(content).hexdigest()
        if known is None or known[name] != found:
            raise UnknownTtnnFilesError(
                f"{name} of ttnn {version} is not a file that sam3_ray can patch for ETH dispatch (SHA-256 "
                f"{found}, in {source}); known are the wheels of {', '.join(KNOWN_FILES)}. Install one of "
                "them, or use dispatch='worker'"
            )
        patched[name] = patch(content.decode()).encode()
    return patched


def files_key(files: Mapping[str, bytes]) -> str:
    """A short name of these contents: 12 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()[:12]


def tree_key(root: Path) -> str:
    """:func:`files_key` of the three files as they are in a patched runtime root.

    Raises:
        FileNotFoundError: one is not there.
    """
    return files_key({name: (root / name).read_bytes() for name in _PATCHES})


def eth_folder() -> Path:
    """Where overlays and the answers of their trials are kept. Deleting it undoes ``enable-eth``."""
    return cache_folder() / "eth-dispatch"


def overlay_root(source: Path | None = None) -> Path:
    """Where the overlay of ``source`` belongs, there or not.

    It is named after the ttnn version, the patched contents and the place of ``source``: two environments
    with the same ttnn do not share one, since an overlay dies with what it links to.

    Args:
        source: a stock runtime root; default the one ttnn takes.

    Raises:
        ImportError, UnknownTtnnFilesError: as :func:`default_root` and :func:`patched_files`.
    """
    source = (_stock(runtime_root()) if source is None else source).absolute()
    key = files_key(patched_files(source))
    place = hashlib.sha256(os.fsencode(source)).hexdigest()[:8]
    return eth_folder() / f"ttnn-{ttnn_version()}-{key}-{place}"


def build_overlay(source: Path, target: Path) -> None:
    """Make ``target`` a runtime root of links to ``source`` with three patched files, or complete it.

    Any number of processes may do so at once, and while others run from it: it is made beside its place and
    renamed; one that is there already only gains the links that ``source`` has new (a compiler that was
    installed later) and gets its patched files back.

    Args:
        source: the ttnn package's folder, or another stock runtime root.
        target: the overlay's place.

    Raises:
        UnknownTtnnFilesError: see :func:`patched_files`; nothing is written then.
        FileExistsError: ``target`` is there and is no overlay of ``source``.
        OSError: it cannot be written.
    """
    source = source.absolute()
    files = patched_files(source)
    marker = {"source": str(source), "ttnn": ttnn_version(), "key": files_key(files)}
    files[_MARKER] = json.dumps(marker, indent=2).encode()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            fresh.chmod(0o755)  # mkdtemp's 0700 would lock out other users of a shared cache
            _fill(fresh, source, files)
            fresh.rename(target)
        except OSError as error:
            # Another process was first, and a folder is not renamed onto one that is not empty.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            if fresh.exists():
                shutil.rmtree(fresh)  # links are removed, not followed
    if not target.is_dir() or overlay_source(target) != source:
        raise FileExistsError(f"{target} is not an overlay of {source}: move it away")
    _fill(target, source, files)


def _fill(target: Path, source: Path, files: Mapping[str, bytes]) -> None:
    """Links for everything of ``source`` that is not there yet; real folders only on the way to a patched
    file."""
    own = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    for folder in sorted(own):  # "." first, parents before their children
        (target / folder).mkdir(exist_ok=True)
        for entry in (source / folder).iterdir():
            name = str(PurePosixPath(folder, entry.name))
            if name in own or name in files or entry.name == "__pycache__":
                continue
            with contextlib.suppress(FileExistsError):
                (target / name).symlink_to(entry)
    for name, content in files.items():
        _write(target / name, content)


def _write(path: Path, content: bytes) -> None:
    """Replace a file at once, so that no reader sees half of it; leave it where it is the same."""
    if path.is_file() and path.read_bytes() == content:
        return
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise


def _stock(root: Path) -> Path:
    return overlay_source(root) or root


def _twelve_dispatch_cores(text: str) -> str:
    """A Blackhole has 14 Ethernet cores, cards have two of them harvested: the list ends at the twelfth."""
    return _replaced(text, ", [0, 12], [0, 13]]", "]", times=6)


def _twelfth_column(text: str) -> str:
    """0.81.1 checks where a program is placed against the *worker* descriptor, whatever the dispatch is: with
    two columns harvested (p150) that one leaves the twelfth column out."""
    before, section, after = text.partition("2xharvested:")
    return before + section + _replaced(after, "end: [10, 9]", "end: [11, 9]", times=2)


def _room_for_dispatch_kernel(text: str) -> str:
    """The dispatch kernel needs 16.6 KiB on an idle Ethernet core, the script's 24 KiB less the firmware's
    share leave 10.9 (tt-metal pull request 57142). A limit of linking only: the memory map stays."""
    stock, patched = _STOCK_IDLE_ETH_KIB, _PATCHED_IDLE_ETH_KIB
    return _replaced(text, f"LONG(({stock} * 1024)", f"LONG(({patched} * 1024)", times=1)


_PATCHES: dict[str, Callable[[str], str]] = {
    _ETH_DESCRIPTOR: _twelve_dispatch_cores,
    _WORKER_DESCRIPTOR: _twelfth_column,
    _IDLE_ETH_LINKER_SCRIPT: _room_for_dispatch_kernel,
}


def _replaced(text: str, old: str, new: str, *, times: int) -> str:
    assert text.count(old) == times, old  # the SHA-256 has told which text this is
    return text.replace(old, new)
