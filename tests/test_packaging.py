"""The wheel, the pins, `make install`, and installing beside a torch and a ttnn that must stay."""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(
    *command: str | Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- the wheel ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = run(
        sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_all_that_runs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(
            next(name for name in names if name.endswith(".dist-info/METADATA"))
        ).decode()
        entry_points = archive.read(
            next(name for name in names if name.endswith(".dist-info/entry_points.txt"))
        ).decode()
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "sam3_ray")
    files = {name for name in listed.stdout.split() if (ROOT / name).is_file()}
    assert files <= names, "a file of the package is not in its wheel"
    pictures = {f"sam3_ray/serve/web/examples/{path.name}" for path in ROOT.glob("examples/*")}
    assert pictures
    assert pictures <= names
    assert {"sam3_ray/py.typed", "sam3_ray/demo/sam3_demo.pt"} <= names
    strangers = {name.split("/")[0] for name in names} - {"sam3_ray"}
    assert all(name.endswith(".dist-info") for name in strangers), strangers
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: <3.13,>=3.12" in metadata
    assert "sam3-ray = sam3_ray.cli:main" in entry_points


# --- the dependencies ---------------------------------------------------------------------------


def imported_packages() -> set[str]:
    """The distributions that the package's code imports, anywhere in it."""
    found = set()
    for path in (ROOT / "sam3_ray").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).split(".")[0])
    providers = packages_distributions()
    outside = found - set(sys.stdlib_module_names) - {"sam3_ray"}
    return {canonicalize_name(providers[name][0]) for name in outside}


def test_what_the_package_imports_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *extras["blackhole"], *extras["supervision"]]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    imported = imported_packages()
    assert {"numpy", "ray", "torch", "ttnn"} <= imported
    assert imported <= declared


# --- the pins ----------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    found = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        statement = line.partition("#")[0].strip()
        if statement:
            name, _, number = statement.partition("==")
            assert number, f"requirements.txt: {line!r} pins no version"
            found[canonicalize_name(name)] = number
    return found


def test_every_dependency_is_pinned_inside_its_range() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = [*PROJECT["dependencies"], *(line for extra in extras.values() for line in extra)]
    pinned = pins()
    for line in declared:
        requirement = Requirement(line)
        number = pinned.get(canonicalize_name(requirement.name))
        assert number is not None, f"{line} has no pin: run 'make requirements'"
        assert requirement.specifier.contains(number, prereleases=True), (
            f"{line}, but pinned to {number}"
        )


def test_ttnn_is_no_dependency_of_the_package_itself() -> None:
    names = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    assert "ttnn" not in names


# --- make install ------------------------------------------------------------------------------


def test_a_second_make_does_nothing(tmp_path: Path) -> None:
    (tmp_path / ".sam3-ray").write_text(str(ROOT))
    done = run("make", "install", f"VENV={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "Nothing to be done for 'install'" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [".sam3-ray"]


def test_a_moved_checkout_is_installed_again(tmp_path: Path) -> None:
    (tmp_path / ".sam3-ray").write_text("/somewhere/else")
    done = run("make", "--dry-run", "install", f"VENV={tmp_path}")
    assert "scripts/install.sh" in done.stdout


def fake_python(path: Path, number: str) -> Path:
    path.write_text(
        f'#!/bin/sh\ncase $1 in -c) echo {number} ;; *) echo "Python {number}.9" ;; esac\n'
    )
    path.chmod(0o755)
    return path


def test_another_python_than_3_12_is_refused_by_name(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python3.13", "3.13")
    done = run("make", "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}")
    assert done.returncode != 0
    assert f"PYTHON={python} is not Python 3.12 (Python 3.13.9)" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_no_python_3_12_at_all_says_where_to_get_one(tmp_path: Path) -> None:
    for name in ("python3.12", "python3", "python"):
        fake_python(tmp_path / name, "3.11")
    done = run(
        "/bin/sh",
        "scripts/install.sh",
        tmp_path / "venv",
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )
    assert done.returncode == 1
    assert "Python 3.12 was not found" in done.stderr
    assert "make install PYTHON=" in done.stderr


def test_an_environment_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    done = run("make", "install", f"VENV={tmp_path}", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert f"make install-into ENV={tmp_path}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mark"]


def test_a_link_to_the_environment_of_another_checkout_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / ".sam3-ray").write_text("/somewhere/else")
    link = tmp_path / "link"
    link.symlink_to(other)
    for value in (link, f"{link}/"):
        done = run("make", "install", f"VENV={value}", f"PYTHON={sys.executable}")
        assert done.returncode != 0
        assert f"{link} is a link to {other}" in done.stderr
        assert [path.name for path in other.iterdir()] == [".sam3-ray"]


TALKATIVE_PYTHON = """#!/bin/sh
# Python 3.12 with venv, pip and uv, as far as scripts/install.sh sees.
case "$1 $2" in
    "-c "*) echo 3.12 ;;
    "-m venv") for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
    "-m uv" | "-m pip")
        [ "$3" = --version ] && exit FOUND_UV
        case "$*$NO_NETWORK" in *requirements.txt*no) echo "error: no network" >&2; exit 1 ;; esac
        case "$*" in *--quiet*) ;; *) seq -f " + package-%g==1.0" 170 ;; esac ;;
esac
"""


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_installing_says_one_line_and_every_error(tmp_path: Path, installer: str) -> None:
    python = tmp_path / "python3.12"
    python.write_text(TALKATIVE_PYTHON.replace("FOUND_UV", "0" if installer == "uv" else "1"))
    python.chmod(0o755)
    done = run("make", "install", f"VENV={tmp_path / 'venv'}", f"PYTHON={python}")
    assert done.returncode == 0, done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "make" not in line]
    assert lines == [f"Installing into {tmp_path / 'venv'}; the first time takes a few minutes ..."]
    assert (tmp_path / "venv" / ".sam3-ray").is_file()

    failed = run(
        "make", "install", f"VENV={tmp_path / 'other'}", f"PYTHON={python}", NO_NETWORK="no"
    )
    assert failed.returncode != 0
    assert "error: no network" in failed.stderr
    assert not (tmp_path / "other" / ".sam3-ray").exists()


# --- make install-into -------------------------------------------------------------------------

OWN = {"torch": "2.7.1+tt", "ttnn": "0.70.0+tt", "numpy": "1.26.3+tt"}
"""What the environment of a machine with chips brings: builds that no registry has."""

NEWER = "99.0"


def make_wheel(folder: Path, name: str, number: str, requires: tuple[str, ...] = ()) -> Path:
    """A wheel with one empty module, its metadata, and nothing else."""
    stem = name.replace("-", "_").replace(".", "_")
    info = f"{stem}-{number}.dist-info"
    files = {
        f"{stem}.py": f"__version__ = {number!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        + "".join(f"Requires-Dist: {line}\n" for line in requires)
        + "".join(f"Provides-Extra: {extra}\n" for extra in ("serve", "data")),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={digest_of(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    path = folder / f"{stem}-{number}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


def digest_of(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels in the place of a registry: newer torch and ttnn, and all dependencies."""
    folder = tmp_path_factory.mktemp("registry")
    special = {"torch", "torchvision", "triton", "numpy"}
    for line in PROJECT["dependencies"]:
        requirement = Requirement(line)
        if requirement.name not in special:
            make_wheel(folder, requirement.name, pins()[canonicalize_name(requirement.name)])
    make_wheel(
        folder, "ray", "2.60.9", (f"torch>={NEWER}",)
    )  # as any dependency's next release may
    make_wheel(folder, "torch", NEWER, (f"triton=={NEWER}",))
    make_wheel(folder, "torchvision", NEWER, (f"torch=={NEWER}",))
    make_wheel(folder, "torchvision", "0.22.1", ("torch==2.7.1",))
    make_wheel(folder, "triton", NEWER)
    make_wheel(folder, "triton", "3.3.1")
    make_wheel(folder, "numpy", "1.26.4")
    make_wheel(folder, "ttnn", NEWER)
    return folder


def environment_with(tmp_path: Path, own: dict[str, str]) -> Path:
    """A virtual environment that has ``own`` installed already; its Python."""
    python = tmp_path / "venv" / "bin" / "python"
    assert run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv").returncode == 0
    if not own:
        return python
    brought = tmp_path / "brought"
    brought.mkdir()
    wheels = [make_wheel(brought, name, number) for name, number in own.items()]
    done = run(uv(), "pip", "install", "--offline", "--no-deps", "--python", python, *wheels)
    assert done.returncode == 0, done.stderr
    return python


def uv() -> Path:
    return Path(sys.executable).parent / "uv"


def versions(python: Path, **environment: str) -> dict[str, str]:
    """The version of each distribution that ``python`` has."""
    shown = run(
        python,
        "-c",
        "from importlib.metadata import distributions\n"
        "for d in distributions(): print(d.metadata['Name'], d.version)",
        **environment,
    )
    return dict(line.split() for line in shown.stdout.splitlines())


@pytest.fixture
def offline(tmp_path: Path, registry: Path) -> dict[str, str]:
    """The environment variables that leave uv and pip nothing but the wheels of ``registry``."""
    return {
        "UV_OFFLINE": "1",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_FIND_LINKS": str(registry),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(registry),
        "PIP_CONFIG_FILE": os.devnull,
        "PATH": f"{uv().parent}{os.pathsep}{os.environ['PATH']}",
    }


def test_a_plain_install_would_replace_torch(
    tmp_path: Path, wheel: Path, offline: dict[str, str]
) -> None:
    # The danger is real: without it the tests below would show nothing.
    python = environment_with(tmp_path, OWN)
    done = run(uv(), "pip", "install", "--dry-run", "--python", python, wheel, **offline)
    assert done.returncode == 0, done.stderr
    assert "- torch==2.7.1+tt" in done.stderr
    assert f"+ torch=={NEWER}" in done.stderr


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_install_into_keeps_torch_ttnn_and_numpy(
    tmp_path: Path, wheel: Path, offline: dict[str, str], installer: str
) -> None:
    if installer == "uv":
        python = environment_with(tmp_path, OWN)
    else:
        # They lie outside the environment, where uv does not look: pip has to be chosen.
        python = environment_with(tmp_path, {})
        outside = tmp_path / "outside"
        wheels = [make_wheel(tmp_path, name, number) for name, number in OWN.items()]
        done = run(uv(), "pip", "install", "--no-deps", "--target", outside, *wheels, **offline)
        assert done.returncode == 0, done.stderr
        assert run(python, "-m", "ensurepip").returncode == 0
        offline["PYTHONPATH"] = str(outside)
    done = run(python, ROOT / "scripts/install_into.py", "--package", wheel, **offline)
    assert done.returncode == 0, done.stdout + done.stderr
    now = versions(python, **offline)
    assert {name: now[name] for name in OWN} == OWN
    assert now["torchvision"] == "0.22.1", "the one that fits the torch that is there"
    assert now["ray"] == "2.60.0", "likewise"
    assert now["sam3-ray"] == wheel.name.split("-")[1]
    assert "kept torch 2.7.1+tt" in done.stdout


def test_install_into_says_so_when_nothing_fits(
    tmp_path: Path, wheel: Path, offline: dict[str, str]
) -> None:
    own = {**OWN, "numpy": "2.1.0+tt"}
    python = environment_with(tmp_path, own)
    done = run(python, ROOT / "scripts/install_into.py", "--package", wheel, **offline)
    assert done.returncode == 1
    assert "nothing was replaced" in done.stderr
    assert "numpy 2.1.0+tt" in done.stderr
    now = versions(python)
    assert {name: now[name] for name in own} == own
    assert "sam3-ray" not in now
