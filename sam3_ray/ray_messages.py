"""What Ray's messages come down to: they are walls of tracebacks, in colour."""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RAISED = re.compile(
    r"^(?:ray\.exceptions\.)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b(?::.*)?)$"
)
_WRAPPERS = (
    "RayTaskError",
    "ActorDiedError",
    "RayActorError",
    "RuntimeError: Traceback",
    "UserCodeException",
)


def cause_of(message: str) -> str:
    """The last error of a wall of tracebacks, in one line; the message's last line where there is none."""
    lines = [line.strip() for line in _ANSI.sub("", message).splitlines() if line.strip()]
    raised = [found.group(1) for line in lines if (found := _RAISED.match(line))]
    for line in reversed(raised):
        if not line.startswith(_WRAPPERS):
            return line
    return (raised or lines or [""])[-1]


def one_line(text: str) -> str:
    """A message without colours and line breaks."""
    return " ".join(_ANSI.sub("", text).split())
