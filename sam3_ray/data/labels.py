"""From an answer of the engine to the label of an image: plain values that fit ``schema.label_schema``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sam3_ray.answers import Grounded, Instances
from sam3_ray.data.schema import MaskFormat
from sam3_ray.errors import ImageDecodeError, ImageError, ImageTooLargeError
from sam3_ray.masks import mask_to_polygon

_BYTES_OF_AN_INSTANCE = 800
"""Of its Python objects, beside the mask."""


class PromptsError(ValueError):
    """A row whose phrases cannot be asked."""


class NoImageError(ValueError):
    """A row with nothing where its image should be."""


class KillsProcessError(RuntimeError):
    """An image whose processing ended its process twice."""


ERROR_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (NoImageError, "no-image"),
    (PromptsError, "bad-prompts"),
    (KillsProcessError, "kills-process"),
    (ImageTooLargeError, "too-large"),
    (ImageDecodeError, "not-an-image"),
    (ImageError, "bad-image"),
    (FileNotFoundError, "not-found"),
    (OSError, "unreadable"),
    (Exception, "failed"),
)
"""What ``error.kind`` says, the first class that fits."""


@dataclass(frozen=True)
class Label:
    """What is known of one image, and about how many bytes that takes."""

    values: dict[str, Any]
    nbytes: int


def error_kind(error: Exception) -> str:
    """The name of a kind of error."""
    return next(kind for known, kind in ERROR_KINDS if isinstance(error, known))


def error_values(error: Exception, digest: str | None = None) -> dict[str, Any]:
    """The label's columns of an image that has no label."""
    kind = error_kind(error)
    message = str(error) if kind != "failed" else f"{type(error).__name__}: {error}"
    return {
        "digest": digest,
        "width": None,
        "height": None,
        "error": {"kind": kind, "message": message or kind},
        "presence": None,
        "instances": None,
    }


def label_of(grounded: Grounded, masks: MaskFormat) -> Label:
    """The label of an image that has been through the device; its masks are made and encoded one by one."""
    instances = [instance for found in grounded.instances for instance in _instances(found, masks)]
    values = {
        "digest": grounded.digest,
        "width": grounded.width,
        "height": grounded.height,
        "error": None,
        "presence": [
            {"prompt": found.prompt, "presence": found.presence, "truncated": found.truncated}
            for found in grounded.instances
        ],
        "instances": instances,
    }
    return Label(values, 1000 + sum(map(_nbytes, instances)))


def _instances(found: Instances, masks: MaskFormat) -> list[dict[str, Any]]:
    instances = []
    for score, box in zip(found.scores, found.boxes, strict=True):
        x0, y0, x1, y1 = (float(edge) for edge in box)
        instances.append(
            {
                "prompt": found.prompt,
                "score": float(score),
                "box": [x0, y0, x1, y1],
                "area": (x1 - x0) * (y1 - y0),
            }
        )
    if masks != "none":
        for instance, mask in zip(instances, found.mask_columns(), strict=True):
            instance["area"] = float(mask.area())
            instance["mask"] = mask.rle() if masks == "rle" else mask_to_polygon(mask.whole())
    return instances


def _nbytes(instance: dict[str, Any]) -> int:
    mask = instance.get("mask") or ()
    if isinstance(mask, dict):
        return _BYTES_OF_AN_INSTANCE + len(mask["counts"])
    return _BYTES_OF_AN_INSTANCE + 32 * sum(map(len, mask))
