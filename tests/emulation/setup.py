"""Starting the emulation in a process, once."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tests.emulation.errors import EmulationError
from tests.emulation.import_hook import ImportHook
from tests.emulation.mock import Dispatch, prepare

if TYPE_CHECKING:
    from tests.emulation.emulator import Emulator

MOCK_VARIABLE = "TT_METAL_MOCK_CLUSTER_DESC_PATH"

_emulator: Emulator | None = None
_hook: ImportHook | None = None
_patches: Any = None


def start(root: Path | None = None, chips: int = 1, dispatch: Dispatch = "worker") -> Emulator:
    """Emulate in this process: lay out the mock, set the environment, import ttnn and patch it.

    Args:
        root: where to; a temporary folder that goes away at exit where None.
        chips, dispatch: as ``mock.prepare`` takes them.

    Raises:
        EmulationError: ttnn was imported before, or the emulation runs here already.
    """
    if _emulator is not None:
        raise EmulationError(
            "the emulation runs in this process already: tests.emulation.current() is it"
        )
    _refuse_late("tests.emulation.start()")
    if root is None:
        folder = tempfile.TemporaryDirectory(
            prefix="sam3-ray-emulation-", ignore_cleanup_errors=True
        )
        atexit.register(folder.cleanup)
        root = Path(folder.name)
    os.environ.update(prepare(root, chips=chips, dispatch=dispatch))
    emulate_on_import()
    return current()


def current() -> Emulator:
    """The emulator of this process; imports ttnn where the hook waits for that.

    Raises:
        EmulationError: there is none.
    """
    if _emulator is None and _hook is not None:
        importlib.import_module("ttnn")
    if _emulator is None:
        raise EmulationError(
            "no emulated chip in this process: call tests.emulation.start() before ttnn is imported"
        )
    return _emulator


def emulate_on_import() -> None:
    """Patch ttnn when it is imported; at once where it was imported with the mock's environment.

    Raises:
        EmulationError: ttnn was imported without the mock.
    """
    global _hook
    if _emulator is not None or _hook is not None:
        return
    if MOCK_VARIABLE not in os.environ:
        _refuse_late("tests.emulation.emulate_on_import()")
    _hook = ImportHook("ttnn", _install)
    _hook.install()


def worker_setup() -> None:
    """For Ray's ``runtime_env={"worker_process_setup_hook": "tests.emulation.worker_setup"}``.

    Imports neither ttnn nor torch. What ``mock.prepare`` returns travels in ``runtime_env["env_vars"]``.
    """
    emulate_on_import()


def uninstall() -> None:
    """Give ttnn its own functions back; the mock stays. ``emulate_on_import`` starts anew, memory empty."""
    global _emulator, _hook, _patches
    if _patches is not None:
        _patches.take_back()
    if _hook is not None:
        _hook.remove()
    _emulator = _hook = _patches = None


def _refuse_late(caller: str) -> None:
    if "ttnn" in sys.modules:
        raise EmulationError(
            f"{caller}: ttnn was imported without the mock's environment, which it reads only once; start "
            "the emulation before anything imports ttnn"
        )


def _keep_session_files_inside(ttnn: ModuleType) -> None:
    """Let ttnn look at its cluster now, with TMPDIR in the mock's folder.

    The MPI library that it starts for that leaves a folder in TMPDIR.
    """
    folder = Path(os.environ[MOCK_VARIABLE]).parent / "tmp"
    folder.mkdir(exist_ok=True)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        ttnn.GetNumAvailableDevices()
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _install(ttnn: ModuleType) -> None:
    global _emulator, _patches
    if MOCK_VARIABLE not in os.environ:
        raise EmulationError(
            f"ttnn is imported for the emulation without {MOCK_VARIABLE}: set what "
            "tests.emulation.mock.prepare() returned (Ray: runtime_env['env_vars'])"
        )
    from tests.emulation.emulator import Emulator
    from tests.emulation.patching import install

    _keep_session_files_inside(ttnn)
    emulator = Emulator(ttnn)
    _patches = install(emulator)
    _emulator = emulator
