"""A picture with a known answer: tells a chip that computes from one that returns garbage.

It is a red circle on grey. The demo checkpoint has to find just that circle. Of other weights nothing is
known beforehand but that numbers are finite and not all the same; the first answer of a process is then the
known one, and every later answer has to be equal, since a request repeated gives the same bits.
"""

from __future__ import annotations

import numpy as np

from sam3_ray.answers import Grounded
from sam3_ray.backends.base import Float32Array, Uint8Array
from sam3_ray.engine import Engine
from sam3_ray.images import ImageSource
from sam3_ray.prompt import Prompt, Request

SIDE = 224
CENTRE = (96, 120)
RADIUS = 40
PHRASE = "red circle"
BOX_TOLERANCE = 8.0
"""Pixels at each edge."""

SCORES = 10


def picture() -> Uint8Array:
    """The (224, 224, 3) uint8 picture."""
    y, x = np.mgrid[:SIDE, :SIDE]
    pixels = np.full((SIDE, SIDE, 3), 205, np.uint8)
    pixels[(x - CENTRE[0]) ** 2 + (y - CENTRE[1]) ** 2 <= RADIUS**2] = (220, 30, 30)
    return pixels


class Canary:
    """Asks an engine, and remembers what it said first. On the device's own thread only.

    Args:
        engine: past its caches, the canary runs every part.
        is_demo: the demo checkpoint's answer is known.
    """

    def __init__(self, engine: Engine, *, is_demo: bool) -> None:
        self._engine = engine
        self._is_demo = is_demo
        self._first: Float32Array | None = None

    def ask(self) -> str | None:
        """Run it; None where the answer is right, else what is wrong with it."""
        request = Request(
            ImageSource.of(picture()), (Prompt(PHRASE),), threshold=0.0, max_instances=SCORES
        )
        (grounded,) = self._engine.ground([request], keep=False)
        fault = self.fault_of(grounded)
        return None if fault is None else f"the canary picture was answered wrongly: {fault}"

    def fault_of(self, grounded: Grounded) -> str | None:
        """What is wrong with an answer to the canary."""
        if grounded.error is not None:
            return f"{type(grounded.error).__name__}: {grounded.error}"
        (found,) = grounded.instances
        values = np.concatenate(
            [found.scores.ravel(), found.boxes.ravel(), [found.presence]], dtype=np.float32
        )
        if not np.isfinite(values).all() or not np.isfinite(found.logits).all():
            return "values that are not finite"
        if len(found) == 0 or not found.scores.any() or not found.logits.any():
            return "no instance, or nothing but zeros"
        if self._is_demo:
            radius = np.array([-RADIUS, -RADIUS, RADIUS, RADIUS])
            expected = np.array([*CENTRE, *CENTRE]) + radius
            if found.scores[0] < 0.5 or np.abs(found.boxes[0] - expected).max() > BOX_TOLERANCE:
                return (
                    f"the circle is at {expected.tolist()}, found at "
                    f"{np.round(found.boxes[0], 1).tolist()} with score {found.scores[0]:.2f}"
                )
        if self._first is None:
            self._first = values
        elif not np.array_equal(self._first, values):
            return "another answer than the first time"
        return None
