"""Do something when a module is imported, and not before.

The emulator must patch ttnn, but importing ttnn takes seconds and must happen after the environment is set;
Ray runs the hook in every worker process, and most never import ttnn.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _AfterImport(importlib.abc.Loader):
    """Loads as another loader does, then calls back."""

    def __init__(
        self, loader: importlib.abc.Loader, callback: Callable[[ModuleType], None]
    ) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._callback(module)


class ImportHook(importlib.abc.MetaPathFinder):
    """A finder that lets the others find the module and wraps its loader."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback
        self._searching = False

    def install(self) -> None:
        """Call back when the module is imported; at once where it has been."""
        module = sys.modules.get(self._name)
        if module is not None:
            self._callback(module)
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Take the hook away if it has not fired."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterImport(spec.loader, self._fire)
        return spec

    def _fire(self, module: ModuleType) -> None:
        self.remove()
        self._callback(module)
