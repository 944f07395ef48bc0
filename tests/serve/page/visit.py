"""The page in a browser window, and what the service says by itself."""

import base64
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from playwright.sync_api import Page, Request
from pycocotools import mask as coco_mask

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"


@dataclass
class Visit:
    """The page in a window of its own, with what it asked for and complained about."""

    page: Page
    url: str
    requests: list[Request] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def predictions(self) -> list[Request]:
        return [request for request in self.requests if request.url.endswith("/predict")]

    def choose(self, title: str) -> None:
        self.page.get_by_title(title, exact=True).click()
        self.page.wait_for_selector(f"button[title='{title}'][aria-pressed=true]")

    def run(self, phrases: str) -> None:
        self.page.fill("#phrase", phrases)
        self.page.click("#run")
        self.page.wait_for_selector("#results:not([hidden])")
        self.settled()

    def settled(self) -> None:
        """Wait until no request is under way and the canvas shows as many instances as the list."""
        self.page.wait_for_function(
            """() => !document.body.classList.contains("busy") &&
               document.querySelector("#canvas").dataset.shown ===
                 String(document.querySelectorAll(".instance").length)"""
        )

    def pixels(self) -> np.ndarray:
        """(height, width, 3) of the canvas."""
        # Two frames: one in which the page draws what it has been told, one to be sure.
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        data = self.page.evaluate(
            "document.querySelector('#canvas').toDataURL('image/png').split(',')[1]"
        )
        return np.asarray(
            Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), dtype=np.int16
        )

    def point(self, x: float, y: float, width: int, height: int) -> tuple[float, float]:
        """Where a point of the picture is in the window."""
        box = self.page.locator("#canvas").bounding_box()
        assert box
        return box["x"] + x / width * box["width"], box["y"] + y / height * box["height"]


def ask(service: httpx.Client, file: str, prompts: list[str], threshold: float) -> dict[str, Any]:
    """The service's own answer, by HTTP."""
    answer = service.post(
        "/predict",
        files={"image": (EXAMPLES / file).read_bytes()},
        data={
            "prompts": prompts,
            "threshold": str(threshold),
            "mask_format": "rle",
            "max_instances": "100",
        },
    )
    answer.raise_for_status()
    body: dict[str, Any] = answer.json()
    return body


def decoded(instances: list[dict[str, Any]]) -> list[np.ndarray]:
    return [coco_mask.decode(i["mask"]).astype(bool) for i in instances]
