"""What one phrase found in one image, and its conversions to what people use next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sam3_ray.masks import mask_to_rle

if TYPE_CHECKING:
    import supervision
    from PIL import Image

    from sam3_ray.images import ImageLike
    from sam3_ray.overlay import Color

SHOWN_SCORES = 8
"""Scores that ``repr`` shows before it says how many more there are."""

_KEYS = ("masks", "boxes", "scores", "mask_logits")


@dataclass(frozen=True, eq=False, repr=False)
class Sam3Result:
    """The instances of one phrase in one image, highest score first.

    ``len(result)`` is N, and ``result["masks"]`` (or "boxes", "scores", "mask_logits") is the field of that
    name, as in the state of upstream's Sam3Processor; that one has its masks as (N, 1, H, W) torch tensors:
    ``torch.from_numpy(result.masks)[:, None]``.

    Attributes:
        prompt: the phrase, stripped.
        scores: (N,) float32, ``sigmoid(logit) * presence``, high to low.
        boxes: (N, 4) float32, ``[x0, y0, x1, y1]`` in pixels of the original image, clamped to it.
        masks: (N, H, W) bool at the original image's size; None where they were not asked for.
        presence: probability that the concept is in the image at all.
        width, height: the original image's size in pixels.
        mask_logits: (N, h, w) float32, raw, in the frame of the squashed image; None where not asked for.
        truncated: there were more instances over the threshold than ``max_instances``.

    Raises:
        ValueError: fields whose shapes do not fit each other.
    """

    prompt: str
    scores: npt.NDArray[np.float32]
    boxes: npt.NDArray[np.float32]
    masks: npt.NDArray[np.bool_] | None
    presence: float
    width: int
    height: int
    mask_logits: npt.NDArray[np.float32] | None = None
    truncated: bool = False

    def __post_init__(self) -> None:
        count = len(self.scores)
        logits_size = () if self.mask_logits is None else self.mask_logits.shape[-2:]
        for name, array, expected in (
            ("scores", self.scores, (count,)),
            ("boxes", self.boxes, (count, 4)),
            ("masks", self.masks, (count, self.height, self.width)),
            ("mask_logits", self.mask_logits, (count, *logits_size)),
        ):
            if array is not None and array.shape != expected:
                raise ValueError(f"Sam3Result: {name} has shape {array.shape}, not {expected}")

    @property
    def num_instances(self) -> int:
        """N, the same as ``len(result)``."""
        return len(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, key: str) -> npt.NDArray[Any] | None:
        if key not in _KEYS:
            raise KeyError(
                f"{key!r}: a Sam3Result has the keys {', '.join(_KEYS)}; "
                "all else is an attribute, as result.presence"
            )
        value: npt.NDArray[Any] | None = getattr(self, key)
        return value

    def __repr__(self) -> str:
        shown = [f"{score:.3f}" for score in self.scores[:SHOWN_SCORES]]
        if len(self) > SHOWN_SCORES:
            shown.append(f"... {len(self) - SHOWN_SCORES} more")
        truncated = ", truncated=True" if self.truncated else ""
        return (
            f"Sam3Result(prompt={self.prompt!r}, num_instances={len(self)}, scores=[{', '.join(shown)}], "
            f"presence={self.presence:.3f}, width={self.width}, height={self.height}{truncated})"
        )

    def mask_areas(self) -> list[int] | None:
        """Pixels of each mask; None without masks."""
        return None if self.masks is None else [int(np.count_nonzero(mask)) for mask in self.masks]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-friendly summary, without the masks; nothing is rounded.

        Returns:
            prompt, num_instances, presence, truncated, width, height, and instances, each with score,
            box_xyxy and, where there are masks, mask_area in pixels.
        """
        instances: list[dict[str, Any]] = [
            {"score": float(score), "box_xyxy": [float(edge) for edge in box]}
            for score, box in zip(self.scores, self.boxes, strict=True)
        ]
        for instance, area in zip(instances, self.mask_areas() or (), strict=False):
            instance["mask_area"] = area
        return {
            "prompt": self.prompt,
            "num_instances": len(self),
            "presence": float(self.presence),
            "truncated": self.truncated,
            "width": self.width,
            "height": self.height,
            "instances": instances,
        }

    def to_coco(self, image_id: int, category_id: int) -> list[dict[str, Any]]:
        """COCO result dicts, ready for JSON and for ``pycocotools.coco.COCO.loadRes``.

        Returns:
            For each instance image_id, category_id, bbox ``[x, y, width, height]``, score, area and
            iscrowd 0, and segmentation (compressed RLE, ``counts`` a str). Without masks there is no
            segmentation, and the area is the box's. There is no ``id``: ids are the data set's to give.
        """
        entries: list[dict[str, Any]] = []
        areas = self.mask_areas()
        for index, (x0, y0, x1, y1) in enumerate(self.boxes.tolist()):
            entry: dict[str, Any] = {
                "image_id": image_id,
                "category_id": category_id,
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "score": float(self.scores[index]),
                "area": areas[index] if areas is not None else (x1 - x0) * (y1 - y0),
                "iscrowd": 0,
            }
            if self.masks is not None:
                entry["segmentation"] = mask_to_rle(self.masks[index])
            entries.append(entry)
        return entries

    def to_supervision(self, class_id: int = 0) -> supervision.Detections:
        """``supervision.Detections``, with the phrase as ``class_name``.

        Args:
            class_id: the number of this phrase where the detections of several are merged.

        Raises:
            ImportError: the ``supervision`` package is not installed.
        """
        try:
            import supervision
        except ModuleNotFoundError as error:
            if error.name != "supervision":
                raise
            raise ImportError(
                "to_supervision() needs the supervision package: pip install 'sam3-ray[supervision]'"
            ) from error
        return supervision.Detections(
            xyxy=self.boxes.copy(),
            mask=None if self.masks is None else self.masks.copy(),
            confidence=self.scores.copy(),
            class_id=np.full(len(self), class_id, dtype=np.int64),
            data={"class_name": np.full(len(self), self.prompt)},
        )

    def overlay(self, image: ImageLike, color: Color | None = None) -> Image.Image:
        """The picture with tinted masks, outlines, boxes and scores drawn on it.

        Args:
            image: the image that was asked about, in any form :func:`sam3_ray.load_image` takes.
            color: for all instances, as ``"#ff3b5c"``, ``"red"`` or (r, g, b); else each gets its own.

        Raises:
            ValueError: the image is not of the result's size.
        """
        from sam3_ray.overlay import draw_overlay

        return draw_overlay(image, [self], colors=None if color is None else [color])
