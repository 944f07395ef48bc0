"""pydantic's findings in a request as one problem: names as the client wrote them, and not endlessly many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from pydantic import ValidationError

from sam3_ray.serve.errors import Problem, ProblemError, ProblemType

MOST_FAULTS = 20
"""So many are told; a client that sends thousands of wrong fields has no use for more."""

_NAME_CHARACTERS = 80
_SHOWN_CHARACTERS = 80


def validation_problem(error: ValidationError, what: str) -> ProblemError:
    """The problem of a request that does not fit its model. Takes time in proportion to its faults.

    Args:
        error: pydantic's.
        what: an option is called, ``field`` or ``query parameter``.
    """
    faults = error.errors(include_url=False, include_context=False)
    # A prompt of neither form is reported once for each form: keep the finer report.
    finer: set[str] = set()
    for fault in faults:
        location = fault["loc"]
        own = field_name(location)
        finer |= {
            name for n in range(1, len(location)) if (name := field_name(location[:n])) != own
        }
    found: dict[str, str] = {}
    for fault in faults:
        if fault["type"] == "json_invalid":
            return ProblemError(
                Problem(ProblemType.UNPARSEABLE_BODY, f"the JSON cannot be parsed: {fault['msg']}")
            )
        field, message = field_name(fault["loc"]), fault_message(fault, what)
        if fault["loc"][:1] == ("prompts",) and fault["loc"][2:] in (("str",), ("PromptBody",)):
            message = 'must be a phrase, or an object {"text": ..., "threshold": ...}'
        if field not in finer:
            found.setdefault(field, message)
    errors = tuple(found.items())[:MOST_FAULTS]
    told = [f"{field}: {message}" if field else message for field, message in errors]
    if len(found) > MOST_FAULTS:
        told.append(f"and {len(found) - MOST_FAULTS} more")
    return ProblemError(Problem(ProblemType.INVALID_REQUEST, "; ".join(told), errors))


def field_name(location: Sequence[int | str]) -> str:
    """("prompts", 1, "PromptBody", "threshold") -> "prompts[1].threshold"; a long name is cut."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in ("str", "PromptBody"):
            short = part if len(part) <= _NAME_CHARACTERS else f"{part[:_NAME_CHARACTERS]}..."
            name += f".{short}" if name else short
    return name


def fault_message(fault: Mapping[str, Any], what: str) -> str:
    """What is wrong with one option, and the value where it is short."""
    if fault["type"] == "extra_forbidden":
        return f"unknown {what}"
    given = fault.get("input")
    if fault["type"] == "too_long" and isinstance(given, Sized):
        return f"{len(given)} are too many for one request"
    small = (isinstance(given, str) and len(given) <= _SHOWN_CHARACTERS) or (
        isinstance(given, (int, float)) and abs(given) < 1e30
    )
    return f"{fault['msg']}, got {given!r}" if small else str(fault["msg"])
