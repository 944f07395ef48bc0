"""Offline labelling with Ray Data: a class for ``map_batches``, and whole jobs in one call.

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sam3_ray.data.labeler import Sam3Labeler
    from sam3_ray.data.preview import write_preview
    from sam3_ray.data.progress import Progress
    from sam3_ray.data.run import LabelSummary, label_images
    from sam3_ray.data.schema import label_schema

_HOMES = {
    "LabelSummary": "run",
    "Progress": "progress",
    "Sam3Labeler": "labeler",
    "label_images": "run",
    "label_schema": "schema",
    "write_preview": "preview",
}

__all__ = [
    "LabelSummary",
    "Progress",
    "Sam3Labeler",
    "label_images",
    "label_schema",
    "write_preview",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
