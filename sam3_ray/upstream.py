"""Importing upstream's ``sam3`` without its import-time warnings.

On a machine without CUDA it warns once per autocast decorator, and about ``torch.jit.script``; numba, where
it is installed, about its TBB version. These are hidden while it is imported, and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_KNOWN_WARNINGS = (
    ".*CUDA is not available.*",
    ".*User provided device_type of 'cuda'.*",
    ".*`torch.jit.script` is deprecated.*",
    ".*The TBB threading layer requires TBB version.*",
)


@contextmanager
def quiet_import() -> Iterator[None]:
    """Hide the known warnings of ``import sam3`` inside the block."""
    with warnings.catch_warnings():
        for message in _KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield
