"""No operation has a value that no test looked at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.emulation.ops.golden import VERIFIED
from tests.emulation.ops.registry import known_operations


def test_every_value_is_compared_with_torch_somewhere(emulator: Any) -> None:
    tests = Path(__file__).parent.glob("test_*_values.py")
    words = set(re.findall(r"\w+", " ".join(path.read_text() for path in tests)))
    untested = [
        name for name in (*known_operations(), *VERIFIED) if name.rsplit(".", 1)[-1] not in words
    ]
    assert untested == []


def test_every_name_is_one_of_ttnns(emulator: Any) -> None:
    for name in (*known_operations(), *VERIFIED):
        owner = emulator
        for part in name.split("."):
            owner = getattr(owner, part)
        # An alias, such as div_, carries another name of the same family.
        assert owner.python_fully_qualified_name.rsplit(".", 1)[0] == name.rsplit(".", 1)[0]
