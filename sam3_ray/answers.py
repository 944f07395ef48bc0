"""From what the device found to answers at each image's own size.

A mask at the image's size is often a thousand times as large as its logits, so it is made last, and only by
who needs it: the Python API makes all masks of an answer at once (``finish``), the service makes one,
encodes it and drops it (``Instances.mask_columns``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sam3_ray.mask_columns import MaskColumns, mask_columns
from sam3_ray.masks import BoolArray, Float32Array, upsample_masks
from sam3_ray.prompt import Request
from sam3_ray.result import Sam3Result

STAGES = ("decode", "image", "text", "prompts", "masks")


@dataclass(frozen=True)
class Instances:
    """The instances of one phrase in one image, masks still at the model's size.

    Attributes:
        prompt: the phrase.
        scores: (N,) float32, high to low.
        boxes: (N, 4) float32, xyxy in pixels of the image.
        presence: probability that the concept is in the image at all.
        truncated: there were more than ``max_instances``.
        height, width: of the image, in pixels.
        logits: (M, h, w) float32 mask logits of a run, which other phrases and requests share.
        rows: (N,) which of ``logits`` are these instances'; empty where no masks were asked for.
    """

    prompt: str
    scores: Float32Array
    boxes: Float32Array
    presence: float
    truncated: bool
    height: int
    width: int
    logits: Float32Array
    rows: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.scores)

    def mask_logits(self) -> Float32Array:
        """(N, h, w) float32, raw, in the frame of the squashed image."""
        return self.logits[self.rows]

    def masks(self) -> BoolArray:
        """(N, H, W) bool, all at once."""
        return upsample_masks(self.mask_logits(), self.height, self.width)

    def mask_columns(self) -> Iterator[MaskColumns]:
        """The same masks in order, each made when it is asked for, as an RLE or area needs it."""
        for row in self.rows:
            yield mask_columns(self.logits[row], self.height, self.width)


@dataclass(frozen=True)
class Grounded:
    """One request that has been through the device.

    Attributes:
        request: what was asked.
        instances: for each of the request's prompts, in order.
        width, height: of the image, in pixels.
        digest: name of the image: of its file's bytes, or of its pixels where there was no file.
        cached: the image part was skipped.
        timing_ms: milliseconds of each of ``STAGES``; a stage shared with other requests is counted whole.
        error: why there are no instances.
    """

    request: Request
    instances: list[Instances] = field(default_factory=list)
    width: int = 0
    height: int = 0
    digest: str | None = None
    cached: bool = False
    timing_ms: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def mask_pixels(self) -> int:
        """Pixels of all masks together at the image's size."""
        return sum(map(len, self.instances)) * self.width * self.height


@dataclass(frozen=True)
class Answer:
    """What one request gets.

    Attributes:
        results: one ``Sam3Result`` for each of the request's prompts, in order.
        width, height, digest, cached, timing_ms: as in ``Grounded``.
        error: why there are no results.
    """

    results: list[Sam3Result] = field(default_factory=list)
    width: int = 0
    height: int = 0
    digest: str | None = None
    cached: bool = False
    timing_ms: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None

    def unwrap(self) -> list[Sam3Result]:
        """The results, or the error raised."""
        if self.error is not None:
            raise self.error
        return self.results


def finish(grounded: Grounded) -> Answer:
    """The host's share of a request, all masks at the size of the image. Any thread; never raises."""
    if grounded.error is not None:
        return Answer(error=grounded.error)
    timing = dict(grounded.timing_ms)
    try:
        with timed(timing, "masks"):
            results = [_result(found, grounded.request) for found in grounded.instances]
    except Exception as error:  # noqa: BLE001 - it is this request's answer
        return Answer(error=error)
    return Answer(
        results, grounded.width, grounded.height, grounded.digest, grounded.cached, timing
    )


def _result(found: Instances, request: Request) -> Sam3Result:
    return Sam3Result(
        prompt=found.prompt,
        scores=found.scores,
        boxes=found.boxes,
        masks=found.masks() if request.return_masks else None,
        presence=found.presence,
        width=found.width,
        height=found.height,
        mask_logits=found.mask_logits() if request.return_mask_logits else None,
        truncated=found.truncated,
    )


@contextmanager
def timed(timing_ms: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the milliseconds of a block that does not raise to one stage's."""
    started = time.perf_counter()
    yield
    timing_ms[stage] = timing_ms.get(stage, 0.0) + (time.perf_counter() - started) * 1000.0
