"""The image part: everything that depends on the image only."""

from __future__ import annotations

from typing import Any

from sam3_ray.backends.blackhole.modules import Scope
from sam3_ray.backends.blackhole.parts.backbone import Backbone
from sam3_ray.backends.blackhole.parts.geometry import GeometryEncoder, sine_positions
from sam3_ray.backends.blackhole.parts.neck import Neck
from sam3_ray.backends.blackhole.placement import Placement
from sam3_ray.config import Sam3Config

OWNED = ("backbone.vision_backbone.", "geometry_encoder.")
"""Where this part's weights are in the checkpoint."""

IGNORED = (
    ".freqs_cis",  # rotations are computed
    "backbone.vision_backbone.sam2_convs.",  # the video model's neck
    "backbone.vision_backbone.convs.3.",  # the level that upstream throws away
    # what encodes boxes and points, which a phrase does not have
    "geometry_encoder.label_embed.",
    "geometry_encoder.boxes_",
    "geometry_encoder.points_",
    "geometry_encoder.img_pre_norm.",
)


class ImagePart:
    """Patches of pixels -> three levels and the geometry token.

    Args:
        place: where it runs.
        scope: of the whole checkpoint.
        config: the model's dimensions.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        vision = scope / "backbone" / "vision_backbone"
        self.backbone = Backbone(place, vision / "trunk", config)
        self.neck = Neck(Placement(place.device, place.precision.of_neck), vision, config)
        self.geometry = GeometryEncoder(
            place,
            scope / "geometry_encoder",
            config,
            sine_positions(config.grid, config.model_width),
        )

    def __call__(self, pixels: Any) -> list[Any]:
        """(1, 1, tokens, padded) uint8 -> [finest, middle, coarsest level, geometry token]."""
        levels = self.neck(self.backbone(pixels))
        return [*levels, self.geometry(levels[-1])]
