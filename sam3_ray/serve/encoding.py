"""What the device found as the JSON of DESIGN.md, ready to be sent. Runs in the replica, on host threads.

The masks of one request can be gigabytes at the image's size and take minutes, so an answer is made in steps:
some masks are made, encoded and dropped, and then others have the thread. Whoever drops the generator between
two steps ends the work.
"""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from sam3_ray.answers import STAGES, Grounded, Instances, timed
from sam3_ray.mask_columns import MaskColumns
from sam3_ray.masks import mask_to_png, mask_to_polygon
from sam3_ray.serve.errors import Problem, ProblemError, ProblemType
from sam3_ray.serve.schemas import PredictJob, Reply

STEP_PIXELS = 4 * 1024 * 1024
"""Mask pixels of a step, one mask at least. Three discs that nearly fill 1920 x 1080 take 16 ms as ``none``,
18 as RLE, 26 as PNG, 110 as polygons, on one core of the machine this was written on; small ones take 3, 4,
13 and 29."""

_GZIP_FROM_BYTES = 1024
_GZIP_LEVEL = 5

_MASK_ENCODERS: dict[str, Callable[[MaskColumns], Any]] = {
    "png": lambda mask: base64.b64encode(mask_to_png(mask.whole())).decode("ascii"),
    "rle": MaskColumns.rle,
    "polygon": lambda mask: mask_to_polygon(mask.whole()),
    "none": lambda mask: None,
}


@dataclass(frozen=True)
class Origin:
    """Where an answer comes from: the fields that are the same in all of a replica's answers."""

    input_size: int
    checkpoint: str
    replica: str
    chip: int | None


def check_mask_pixels(grounded: Grounded, limit: int) -> None:
    """Refuse an answer whose masks would keep a thread too long.

    Args:
        grounded: without an error.
        limit: pixels of all masks together, at the image's size.

    Raises:
        ProblemError: ``answer-too-large``, with what to ask for instead.
    """
    if grounded.mask_pixels > limit:
        count = sum(map(len, grounded.instances))
        detail = (
            f"{count} instances of {grounded.width} x {grounded.height} pixels are "
            f"{grounded.mask_pixels} mask pixels, the limit is {limit}; ask for fewer instances "
            "(max_instances), a higher threshold or fewer phrases, or send a smaller image"
        )
        raise ProblemError(Problem(ProblemType.ANSWER_TOO_LARGE, detail))


def encode_answer(
    grounded: Grounded, job: PredictJob, origin: Origin, timing_ms: dict[str, float]
) -> Generator[None, None, Reply]:
    """The reply to a job, in steps (see the module).

    Args:
        grounded: without an error, of a request for masks.
        job: what was asked.
        origin: who answers.
        timing_ms: milliseconds of the stages so far, ``queue`` too. What the masks take is added to it,
            and ``encode`` and ``total``.

    Yields:
        None between two steps.

    Returns:
        The reply, after the last step.
    """
    timing_ms["encode"] = 0.0
    results, made = [], 0
    for found in grounded.instances:
        encoded: list[dict[str, Any]] = []
        masks = found.mask_columns()
        while len(encoded) < len(found):
            if made >= STEP_PIXELS:
                made = 0
                yield
            with timed(timing_ms, "masks"):
                mask = next(masks, None)
            if mask is None:
                raise ValueError("an answer over HTTP needs masks: mask_area is one of its fields")
            made += mask.height * mask.width
            with timed(timing_ms, "encode"):
                encoded.append(_encoded(mask, job.mask_format))
            del mask
        results.append(_result(found, encoded))
    # The two clocks may be of two hosts: a total below what was measured here would be nonsense.
    timing_ms["total"] = max((time.time() - job.sent_at) * 1000.0, timing_ms["encode"])
    payload = {
        "width": grounded.width,
        "height": grounded.height,
        "input_size": origin.input_size,
        "threshold": grounded.request.threshold,
        "mask_format": job.mask_format,
        "results": results,
        "image_digest": job.digest,
        "cached": grounded.cached,
        "checkpoint": origin.checkpoint,
        "replica": origin.replica,
        "chip": origin.chip,
        "timing_ms": {
            stage: round(timing_ms.get(stage, 0.0), 2)
            for stage in ("queue", *STAGES, "encode", "total")
        },
    }
    body = json.dumps(payload, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    log = {name: payload[name] for name in ("replica", "chip", "cached", "timing_ms")}
    if job.gzip and len(body) >= _GZIP_FROM_BYTES:
        return Reply(gzip.compress(body, _GZIP_LEVEL, mtime=0), "gzip", log)
    return Reply(body, log=log)


def next_step(steps: Generator[None, None, Reply]) -> Reply | None:
    """Run one step of an answer: None while there are more, else the reply."""
    try:
        next(steps)
    except StopIteration as end:
        reply: Reply = end.value
        return reply
    return None


def _encoded(mask: MaskColumns, mask_format: str) -> dict[str, Any]:
    """The fields of a mask."""
    return {"mask_area": mask.area(), "mask": _MASK_ENCODERS[mask_format](mask)}


def _result(found: Instances, masks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "prompt": found.prompt,
        "presence": round(float(found.presence), 4),
        "num_instances": len(found),
        "truncated": found.truncated,
        "instances": [
            {
                "score": round(float(score), 4),
                "box_xyxy": [round(float(edge), 2) for edge in box],
                **mask,
            }
            for score, box, mask in zip(found.scores, found.boxes, masks, strict=True)
        ],
    }
