"""How far a run is, and when it has gone wrong too often."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 60.0
"""The rate is that of the last minute: of all before, the start and slower neighbours say little."""

JUDGED_FROM = 100
"""Images of a run from which on a share of errors means anything."""


class TooManyErrorsError(RuntimeError):
    """``max_errors`` stopped a run. What was labelled is kept, and the same call goes on with it."""


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        total: images of the plan.
        done: labelled or an error, in earlier runs too.
        instances, errors: of those.
        images_per_s: over the last minute; None before anything can be told.
        seconds_left: at that rate; None likewise.
        out: for each chip that did not open, which and why; the others do its share.
    """

    total: int
    done: int
    instances: int
    errors: int
    images_per_s: float | None = None
    seconds_left: float | None = None
    out: tuple[str, ...] = ()


@dataclass(frozen=True)
class MaxErrors:
    """When to stop: over ``count`` errors, or over ``share`` of the images of this run."""

    count: int | None = None
    share: float | None = None

    def check(self, errors: int, images: int, first: Sequence[str] = ()) -> None:
        """Raise TooManyErrorsError where there are too many.

        Args:
            errors: of this run.
            images: of this run.
            first: what the first few of the errors are.
        """
        if self.count is not None and errors > self.count:
            allowed = f"{self.count}"
        elif self.share is not None and images >= JUDGED_FROM and errors > self.share * images:
            allowed = f"{self.share:.0%}"
        else:
            return
        raise TooManyErrorsError(
            f"stopped: {errors} of the first {images} images of this run are errors, and max_errors is "
            f"{allowed}. What is labelled is kept, and the same call goes on. The first errors:"
            + "".join(f"\n  {told}" for told in first)
        )


def max_errors_of(value: str | float | None) -> MaxErrors:
    """A count (``100``), a share (``0.1``, ``10%``), or None for no bound. 1.0 is a share, 1 a count.

    Raises:
        TypeError, ValueError: something else.
    """
    if value is None:
        return MaxErrors()
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"\d+", text):
            return MaxErrors(count=int(text))
        if not re.fullmatch(r"\d*\.?\d+%?", text):
            raise ValueError(f"max_errors is a count or a share such as 10% or 0.1, got {value!r}")
        value = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"max_errors is a count or a share, got {type(value).__name__}: {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"max_errors is a count of at least 0, got {value}")
        return MaxErrors(count=value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"max_errors is a share of 0 to 1 (or 0% to 100%), got {value}")
    return MaxErrors(share=value)


class Meter:
    """Counts batches as they come in."""

    def __init__(self, total: int, done: int, instances: int, errors: int) -> None:
        self._total, self._done, self._instances, self._errors = total, done, instances, errors
        self.images = 0
        """Of this run."""
        self.errors = 0
        """Of this run."""
        self.out: tuple[str, ...] = ()
        """As in ``Progress``."""
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, images: int, instances: int, errors: int) -> None:
        """A batch has come in."""
        self.images += images
        self.errors += errors
        self._instances += instances
        now = time.monotonic()
        self._seen.append((now, self.images))
        while self._seen[0][0] < now - WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()

    def progress(self) -> Progress:
        """How far it is."""
        rate = None
        if len(self._seen) > 1:
            (before, images), (now, more) = self._seen[0], self._seen[-1]
            rate = (more - images) / (now - before) if now > before else None
        done = self._done + self.images
        return Progress(
            self._total,
            done,
            self._instances,
            self._errors + self.errors,
            rate,
            (self._total - done) / rate if rate else None,
            self.out,
        )
