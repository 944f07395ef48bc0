"""The dimensions of a SAM3: the full model's, or those that a checkpoint of ours carries.

Head counts, window size and global blocks do not show in tensor shapes, so a checkpoint of ours is
``{"model": state_dict, "sam3_ray_config": {...}}``; a file without that key is the full model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Sam3Config:
    """Every dimension of the model. The defaults are the full model's (sam3 0.1.4, ``model_builder.py``).

    Raises:
        ValueError: a dimension does not fit another one, with both values.
    """

    # image encoder (a ViT with windowed and global attention)
    image_size: int = 1008
    """Side of the square that every image is squashed to, in pixels."""
    patch_size: int = 14
    pretrain_image_size: int = 336
    """The position table covers this side and is tiled over ``image_size``."""
    vit_width: int = 1024
    vit_depth: int = 32
    vit_heads: int = 16
    vit_mlp_ratio: float = 4.625
    window_size: int = 24
    """Side of an attention window, in patches."""
    global_blocks: tuple[int, ...] = (7, 15, 23, 31)
    # text encoder
    text_width: int = 1024
    text_heads: int = 16
    text_layers: int = 24
    text_context: int = 32
    """Tokens of a phrase, start and end marks among them; a longer phrase is cut."""
    # detector
    model_width: int = 256
    heads: int = 8
    feedforward_width: int = 2048
    fusion_layers: int = 6
    decoder_layers: int = 6
    geometry_layers: int = 3
    roi_size: int = 7
    queries: int = 200
    # segmentation head
    mask_stages: int = 3
    """Convolutions of the pixel decoder (one of them for each neck level it reads)."""

    @property
    def grid(self) -> int:
        """Patches along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def mask_size(self) -> int:
        """Side of the mask logits: the neck's finest level has four pixels a patch."""
        return self.grid * 4

    @property
    def level_sizes(self) -> tuple[int, int, int]:
        """Sides of the three neck levels that the detector reads, fine to coarse."""
        return (self.grid * 4, self.grid * 2, self.grid)

    @property
    def vit_mlp_width(self) -> int:
        return int(self.vit_width * self.vit_mlp_ratio)

    def __post_init__(self) -> None:
        for name, whole, part in (
            ("image_size, patch_size", self.image_size, self.patch_size),
            ("pretrain_image_size, patch_size", self.pretrain_image_size, self.patch_size),
            ("grid, window_size", self.grid, self.window_size),
            ("vit_width, vit_heads", self.vit_width, self.vit_heads),
            ("text_width, text_heads", self.text_width, self.text_heads),
            ("model_width, heads", self.model_width, self.heads),
            ("vit_width, 4 (the neck's finest level)", self.vit_width, 4),
            ("model_width, 8 (groups of the pixel decoder's norms)", self.model_width, 8),
        ):
            if part <= 0 or whole <= 0 or whole % part:
                raise ValueError(
                    f"Sam3Config: {name}: {whole} is not a positive multiple of {part}"
                )
        if not self.global_blocks or any(not 0 <= b < self.vit_depth for b in self.global_blocks):
            raise ValueError(
                f"Sam3Config: global_blocks={self.global_blocks} must name blocks of 0..{self.vit_depth - 1}"
            )
        if self.global_blocks[-1] != self.vit_depth - 1:
            raise ValueError(
                f"Sam3Config: the last block ({self.vit_depth - 1}) must be global, "
                f"got global_blocks={self.global_blocks}: features are read after it"
            )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-friendly dict, the inverse of :meth:`from_dict`."""
        values = asdict(self)
        values["global_blocks"] = list(self.global_blocks)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sam3Config:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError: an unknown key, or dimensions that do not fit.
        """
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"unknown keys in the checkpoint's sam3_ray_config: {unknown}; known: {sorted(known)}. "
                "It was written by another version of sam3_ray."
            )
        values = dict(values)
        if "global_blocks" in values:
            values["global_blocks"] = tuple(int(b) for b in values["global_blocks"])
        return cls(**values)


FULL = Sam3Config()
"""facebook/sam3."""

DEMO = Sam3Config(
    image_size=224,
    pretrain_image_size=224,
    vit_width=128,
    vit_depth=6,
    vit_heads=4,
    vit_mlp_ratio=4.0,
    window_size=8,
    global_blocks=(2, 5),
    text_width=64,
    text_heads=2,
    text_layers=2,
    model_width=64,
    heads=2,
    feedforward_width=256,
    fusion_layers=2,
    decoder_layers=3,
    geometry_layers=1,
    queries=36,
)
"""The demo checkpoint: widths and windows are multiples of 32, the side of a Tenstorrent tile."""
