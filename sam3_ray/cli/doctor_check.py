"""What one check of ``sam3-ray doctor`` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "missing"]


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what.
        status: ok, warning or missing.
        found: what is here.
        todo: what to do about it; empty where it is ok.
    """

    name: str
    status: Status
    found: str
    todo: str = ""
