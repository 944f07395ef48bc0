"""A deadline a request: the configuration's, or a shorter one that the client asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from sam3_ray.serve.errors import Problem, ProblemError, ProblemType, invalid

HEADER = "X-Request-Timeout-Ms"


def deadline_of(headers: Mapping[str, str], most_s: float) -> float:
    """Seconds that a request may take: at most ``most_s``, whatever it asks for.

    Args:
        headers: of the request, their names in any case.
        most_s: the configuration's deadline.

    Raises:
        ProblemError: 422, the header is no whole number of milliseconds above 0.
    """
    text = headers.get(HEADER)
    if text is None:
        return most_s
    # Some digits more than any deadline has; int() of a megabyte of them would take its time.
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) > 0):
        raise invalid(HEADER, f"must be a whole number of milliseconds above 0, got {text[:40]!r}")
    return min(most_s, int(text) / 1000.0)


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Cancel what runs inside after so many seconds.

    Cancelling takes a request out of the router's queue and out of a batch that has not started.

    Raises:
        ProblemError: 504.
    """
    try:
        async with asyncio.timeout(seconds) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise ProblemError(
            Problem(ProblemType.DEADLINE, f"no answer within {seconds:g} s", retry_after_s=seconds)
        ) from error
