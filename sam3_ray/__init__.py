"""SAM3 on Tenstorrent Blackhole chips, as a Ray Serve application.

An image and noun phrases in; every instance's mask, box and score out::

    from sam3_ray import Sam3

    with Sam3.from_pretrained() as model:
        result = model("street.jpg", "car")

Names are imported when they are first used: ``import sam3_ray`` loads neither torch, ttnn nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sam3_ray.api import Sam3
    from sam3_ray.backends.blackhole.device import device_open_kwargs
    from sam3_ray.config import Sam3Config
    from sam3_ray.images import load_image
    from sam3_ray.prompt import Prompt
    from sam3_ray.result import Sam3Result
    from sam3_ray.settings import PINNED_REVISION
    from sam3_ray.warmup import DEFAULT_WARMUP_VARIANTS

__version__ = "0.1.0"

_HOMES = {
    "DEFAULT_WARMUP_VARIANTS": "sam3_ray.warmup",
    "PINNED_REVISION": "sam3_ray.settings",
    "Prompt": "sam3_ray.prompt",
    "Sam3": "sam3_ray.api",
    "Sam3Config": "sam3_ray.config",
    "Sam3Result": "sam3_ray.result",
    "device_open_kwargs": "sam3_ray.backends.blackhole.device",
    "load_image": "sam3_ray.images",
}

__all__ = [
    "DEFAULT_WARMUP_VARIANTS",
    "PINNED_REVISION",
    "Prompt",
    "Sam3",
    "Sam3Config",
    "Sam3Result",
    "__version__",
    "device_open_kwargs",
    "load_image",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
