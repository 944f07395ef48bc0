"""The page at ``/``: plain HTML, CSS and JavaScript modules, served as they are; and its example pictures."""

from __future__ import annotations

from pathlib import Path

_WEB = Path(__file__).resolve().parent

INDEX = _WEB / "index.html"
"""The page itself."""


FAVICON = _WEB / "static" / "favicon.svg"
"""What a browser asks for at ``/favicon.ico`` where a page names no icon."""


def static_folder() -> Path:
    """What ``/static/`` serves: the page's modules and style sheet."""
    return _WEB / "static"


def examples_folder() -> Path:
    """What ``/examples/`` serves: the pictures and ``examples.json``.

    A folder in a wheel; in a checkout a link to the repository's ``examples/``.
    """
    return _WEB / "examples"
