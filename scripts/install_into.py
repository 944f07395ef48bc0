"""Install this package beside a torch and a ttnn that are already there, and keep those.

Run it with the Python of the environment (``make install-into ENV=/path/to/environment`` does):

    /path/to/environment/bin/python scripts/install_into.py [--extra test]

Tenstorrent's environments bring builds of torch and ttnn of their own (``2.7.1+cpu``, a source build),
and ttnn wants numpy 1. A plain install replaces them: the newest torchvision and triton want the newest
torch, so the resolver takes that. Here the versions that are installed become
constraints, so that the resolver has to choose everything else around them or say that it cannot.
Afterwards the versions are read again and torch and torchvision are imported.

Only the standard library is used: the environment need not have anything of ours yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

KEPT = ("torch", "torchvision", "torchaudio", "triton", "pytorch-triton", "ttnn", "numpy")
"""Packages that come in builds of the machine's own, or that those builds are compiled against."""


def installed_versions() -> dict[str, str]:
    """The version of each package of :data:`KEPT` that this Python has."""
    found = {}
    for name in KEPT:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def installer(kept: Iterable[str]) -> list[str]:
    """uv where it is at hand, else pip; neither replaces what satisfies the requirements.

    Always pip where a kept package lies outside the environment (``--system-site-packages``, PYTHONPATH):
    uv does not see it there and would install another one.
    """
    inside = Path(sys.prefix).resolve()
    if not all(
        Path(str(distribution(name).locate_file(""))).resolve().is_relative_to(inside)
        for name in kept
    ):
        return pip()
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    return pip()


def pip() -> list[str]:
    """pip's command."""
    if importlib.util.find_spec("pip") is None:
        raise SystemExit(f"{sys.executable} has no pip: run '{sys.executable} -m ensurepip' first.")
    return [sys.executable, "-m", "pip", "install", "--upgrade-strategy", "only-if-needed"]


def main() -> int:
    checkout = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="NAME",
        help="an extra, such as test; repeatable",
    )
    parser.add_argument(
        "--package", metavar="PATH", help="a wheel to install; without it this checkout, editable"
    )
    options = parser.parse_args()
    if sys.version_info[:2] != (3, 12):
        print(
            f"{sys.executable} is Python {sys.version.split()[0]}; sam3_ray needs 3.12.",
            file=sys.stderr,
        )
        return 1

    before = installed_versions()
    kept = ", ".join(f"{name} {number}" for name, number in before.items())
    print(f"Keeping {kept}" if before else "This environment has no torch, ttnn or numpy to keep.")
    extras = f"[{','.join(options.extra)}]" if options.extra else ""
    target = [f"{options.package}{extras}"] if options.package else ["-e", f"{checkout}{extras}"]
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={number}\n" for name, number in before.items()))
        done = subprocess.run(
            [*installer(before), "--constraint", str(constraints), *target], check=False
        )
    after = installed_versions()
    replaced = [
        f"{name} {number} -> {after.get(name, 'gone')}"
        for name, number in before.items()
        if after.get(name) != number
    ]
    if replaced:
        print(
            f"REPLACED: {', '.join(replaced)}. Install the versions before the arrows again.",
            file=sys.stderr,
        )
        return 1
    if done.returncode:
        print(
            f"\nNothing that works could be found with {kept or 'these ranges'} (see above); nothing was "
            "replaced. docs/install.md says what to try.",
            file=sys.stderr,
        )
        return 1
    # A torchvision of another build of torch installs but does not import.
    check = subprocess.run(
        [sys.executable, "-c", "import torch, torchvision"],
        check=False,
        capture_output=True,
        text=True,
    )
    if check.returncode:
        print(
            f"{check.stderr}\ntorch {after.get('torch')} and torchvision {after.get('torchvision')} do not "
            "work together. Install the torchvision of the same build, from where torch came, then run "
            "this again.",
            file=sys.stderr,
        )
        return 1
    print(f"Installed sam3_ray {version('sam3-ray')}; kept {kept or 'nothing'}.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
