"""A backend that takes the time of a chip and needs no weights. What it finds depends on the pixels only."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sam3_ray.backends.base import Capacity, Grounding
from sam3_ray.config import Sam3Config
from sam3_ray.engine import Engine
from sam3_ray.errors import ChipUnavailableError
from sam3_ray.images import resize_to_square

DEADLY = (255, 0, 255)
"""The colour of the first pixel of a picture that ends the process."""

BROKEN = (0, 255, 255)
"""The colour of the first pixel of a picture that the device fails on."""

REPORT_BYTES = 300
"""More than its JSON takes."""


@dataclass(frozen=True)
class Features:
    pixels: np.ndarray
    nbytes: int = 1000

    def release(self) -> None:
        pass


class SimulatedChip:
    """Finds ``instances`` discs for each phrase, at places that the picture's mean colours decide."""

    name = "simulated"
    capacity = Capacity((1, 2, 4), 10_000)

    def __init__(
        self,
        *,
        image_s: float = 0.0,
        prompt_s: float = 0.0,
        instances: int = 2,
        image_size: int = 224,
        upstreams_resize: bool = False,
        report: Path | None = None,
        hold: tuple[int, Path] | None = None,
    ) -> None:
        self.config = Sam3Config(
            image_size=image_size,
            pretrain_image_size=image_size,
            window_size=image_size // 14,
            queries=max(4, instances),
        )
        self._upstreams_resize = upstreams_resize
        self._hold = hold  # after so many images, until there is such a file
        self._image_s, self._prompt_s, self._instances = image_s, prompt_s, instances
        # One open file, written in place: a new one each time would take a share of the device's time.
        self._report = None if report is None else (report / f"{os.getpid()}.json").open("w")
        self._counts: dict[str, float] = {"images": 0, "phrases": 0, "busy_s": 0.0, "start": 0.0}
        self._save()

    def prepare(self, pixels: np.ndarray) -> np.ndarray:
        size = self.config.image_size
        if self._upstreams_resize:
            return resize_to_square(pixels, size)
        # Its import takes a second and a half of each actor's start.
        rows, columns = (np.arange(size) * side // size for side in pixels.shape[:2])
        return pixels[rows[:, None], columns]

    def encode_image(self, prepared: np.ndarray) -> Features:
        first = tuple(prepared[0, 0].tolist())
        if first == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        if first == BROKEN:
            raise RuntimeError("the device says no")
        if self._hold is not None and self._counts["images"] >= self._hold[0]:
            wait_for(self._hold[1].exists)
        self._counts["images"] += 1
        self._work(time.monotonic(), self._image_s)
        return Features(prepared)

    def encode_text(self, phrases: Sequence[str]) -> list[str]:
        self._counts["phrases"] += len(phrases)
        return list(phrases)

    def ground(self, image: Features, text: Sequence[str]) -> Grounding:
        start = time.monotonic()
        queries = self.config.queries
        mean = image.pixels[::16, ::16].reshape(-1, 3).mean(axis=0) / 255
        logits = np.full((len(text), queries), -9, np.float32)
        logits[:, : self._instances] = 3 - np.arange(self._instances) / 10
        boxes = np.empty((len(text), queries, 4), np.float32)
        for row, phrase in enumerate(text):
            for query in range(queries):
                shift = (query * 0.13 + len(phrase) * 0.07) % 0.5
                boxes[row, query] = [0.25 + shift * mean[0], 0.25 + shift * mean[1], 0.2, 0.3]
        self._work(start, self._prompt_s * len(text))
        return Grounding(logits, boxes, np.full(len(text), 5, np.float32), boxes)

    def read_masks(self, masks: Any, kept: Sequence[tuple[int, int]]) -> np.ndarray:
        size = self.config.mask_size
        found = np.empty((len(kept), size, size), np.float32)
        y, x = np.ogrid[:size, :size]
        y, x = (y + np.float32(0.5)) / size, (x + np.float32(0.5)) / size
        for mask, pair in zip(found, kept, strict=True):
            cx, cy, w, h = masks[pair]
            mask[:] = 1 - (2 * (x - cx) / w) ** 2 - (2 * (y - cy) / h) ** 2
        return found

    def info(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        if self._report is not None:
            self._report.close()

    def _work(self, start: float, seconds: float) -> None:
        """Have the device busy for so long since ``start``."""
        time.sleep(max(0.0, start + seconds - time.monotonic()))
        end = time.monotonic()
        self._counts["start"] = self._counts["start"] or start
        self._counts["end"] = end
        self._counts["busy_s"] += seconds
        self._save()

    def _save(self) -> None:
        if self._report is not None:
            self._counts["cpu_s"] = sum(os.times()[:2])
            self._report.seek(0)
            self._report.write(json.dumps(self._counts).ljust(REPORT_BYTES))
            self._report.flush()


def open_simulated(**options: Any) -> Any:
    """A function that opens an engine on such a chip, in whichever process it is called."""
    return partial(_open, options)


def open_some(broken: Sequence[str], attempts: Path, **options: Any) -> Any:
    """The same, but the chips of these numbers do not open, and the others wait until these have said so."""
    return partial(_open_some, broken, attempts, options)


def _open(options: dict[str, Any]) -> Engine:
    return Engine(SimulatedChip(**options))


def _open_some(broken: Sequence[str], attempts: Path, options: dict[str, Any]) -> Engine:
    chip = os.environ["TT_VISIBLE_DEVICES"]
    if chip in broken:
        raise ChipUnavailableError(f"chip {chip} hangs")
    wait_for(lambda: len(list(attempts.glob("*/out-*"))) == len(broken))
    return _open(options)


def wait_for(condition: Callable[[], bool]) -> None:
    """Raise TimeoutError where it does not come true."""
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited for two minutes")
        time.sleep(0.02)
