"""The page at ``/``: plain HTML, CSS and JavaScript modules, served as they are; and its example pictures."""

from __future__ import annotations

from pathlib import Path

_WEB = Path(__file__).resolve().parent

INDEX = _WEB / "index.html"
"""The page itself."""


def static_folder() -> Path:
    """What ``/static/`` serves: the page's modules and style sheet."""
    return _WEB / "static"


def examples_folder() -> Path:
    """What ``/examples/`` serves: the pictures and ``examples.json``.

    In a wheel they lie beside this file, in a working tree in the repository's ``examples/``. Where neither
    is so, the folder does not exist; the page then offers no examples.
    """
    packaged = _WEB / "examples"
    return packaged if packaged.is_dir() else _WEB.parents[2] / "examples"
