"""An engine's Answer as the JSON of DESIGN.md, ready to be sent. Runs in the replica, on a host thread."""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sam3_ray.engine import STAGES, Answer
from sam3_ray.masks import BoolArray, mask_to_png, mask_to_polygon, mask_to_rle
from sam3_ray.result import Sam3Result
from sam3_ray.serve.schemas import PredictJob, Reply

_GZIP_FROM_BYTES = 1024
_GZIP_LEVEL = 5

_MASK_ENCODERS: dict[str, Callable[[BoolArray], Any]] = {
    "png": lambda mask: base64.b64encode(mask_to_png(mask)).decode("ascii"),
    "rle": mask_to_rle,
    "polygon": mask_to_polygon,
    "none": lambda mask: None,
}


@dataclass(frozen=True)
class Origin:
    """Where an answer comes from: the fields that are the same in all of a replica's answers."""

    input_size: int
    checkpoint: str
    replica: str
    chip: int | None


def encode_answer(answer: Answer, job: PredictJob, origin: Origin, *, queue_ms: float) -> Reply:
    """The reply to a job.

    Args:
        answer: without an error, and with masks for each result.
        job: what was asked.
        origin: who answers.
        queue_ms: time that the job waited, for ``timing_ms``.
    """
    started = time.perf_counter()
    results = [_result(result, job.mask_format) for result in answer.results]
    timing = {"queue": queue_ms} | {stage: answer.timing_ms.get(stage, 0.0) for stage in STAGES}
    timing["encode"] = (time.perf_counter() - started) * 1000.0
    # The two clocks may be of two hosts: a total below what was measured here would be nonsense.
    timing["total"] = max((time.time() - job.sent_at) * 1000.0, timing["encode"])
    payload = {
        "width": answer.width,
        "height": answer.height,
        "input_size": origin.input_size,
        "threshold": job.threshold,
        "mask_format": job.mask_format,
        "results": results,
        "image_digest": job.digest,
        "cached": answer.cached,
        "checkpoint": origin.checkpoint,
        "replica": origin.replica,
        "chip": origin.chip,
        "timing_ms": {stage: round(ms, 2) for stage, ms in timing.items()},
    }
    body = json.dumps(payload, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    if job.gzip and len(body) >= _GZIP_FROM_BYTES:
        return Reply(gzip.compress(body, _GZIP_LEVEL, mtime=0), "gzip")
    return Reply(body)


def _result(result: Sam3Result, mask_format: str) -> dict[str, Any]:
    encode_mask = _MASK_ENCODERS[mask_format]
    if result.masks is None:
        raise ValueError("an answer over HTTP needs masks: mask_area is one of its fields")
    return {
        "prompt": result.prompt,
        "presence": round(float(result.presence), 4),
        "num_instances": len(result),
        "truncated": result.truncated,
        "instances": [
            {
                "score": round(float(score), 4),
                "box_xyxy": [round(float(edge), 2) for edge in box],
                "mask_area": int(mask.sum()),
                "mask": encode_mask(mask),
            }
            for score, box, mask in zip(result.scores, result.boxes, result.masks, strict=True)
        ],
    }
