"""The prompt part: everything that depends on a phrase."""

from __future__ import annotations

from typing import Any

import torch
import ttnn

from sam3_ray.backends.blackhole.modules import Scope, constant
from sam3_ray.backends.blackhole.parts.decoder import MASKED, Decoder
from sam3_ray.backends.blackhole.parts.fusion_encoder import FusionEncoder
from sam3_ray.backends.blackhole.parts.geometry import sine_positions
from sam3_ray.backends.blackhole.parts.scoring import Scoring
from sam3_ray.backends.blackhole.parts.segmentation import SegmentationHead
from sam3_ray.backends.blackhole.parts.text_encoder import TextEncoder
from sam3_ray.backends.blackhole.placement import TILE, Placement
from sam3_ray.config import Sam3Config

OWNED = ("backbone.language_backbone.", "transformer.", "dot_prod_scoring.", "segmentation_head.")
"""Where this part's weights are in the checkpoint."""

IGNORED = (
    "backbone.language_backbone.encoder.text_projection",  # of a pooled token that nothing reads
    "segmentation_head.semantic_seg_head.",
    "segmentation_head.pixel_decoder.conv_layers.2.",  # a stage that upstream makes and does not run
    "segmentation_head.pixel_decoder.norms.2.",
    ".attn_mask",
)

KEYS = 2 * TILE
"""Keys of a phrase: its 32 tokens, and the geometry token in a tile of its own."""


class PromptPart:
    """Token ids and an image's features -> scores, boxes, presence; then masks.

    Args:
        place: where it runs.
        scope: of the whole checkpoint.
        config: the model's dimensions.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        place = Placement(place.device, place.precision.of_prompt)
        positions = sine_positions(config.grid, config.model_width)
        self._positions = constant(place.device, positions[None, None])
        transformer = scope / "transformer"
        self._config = config
        self.text_encoder = TextEncoder(place, scope / "backbone" / "language_backbone", config)
        self.fusion_encoder = FusionEncoder(place, transformer / "encoder", config)
        self.decoder = Decoder(place, transformer / "decoder", config)
        self.scoring = Scoring(place, scope / "dot_prod_scoring", config)
        self.segmentation_head = SegmentationHead(place, scope / "segmentation_head", config)
        one_token = torch.full((1, 1, 1, TILE), MASKED)
        one_token[..., 0] = 0.0
        self._geometry_mask = constant(place.device, one_token)

    def encode(self, ids: Any) -> list[tuple[Any, Any]]:
        """Encode phrases.

        Args:
            ids: (phrases, context) uint32 row-major token ids, 0 where there is none.

        Returns:
            For each phrase its tokens, (1, 1, context, model_width), and its mask, (1, 1, 1, keys).
        """
        phrases, context = ids.shape
        tokens = self.text_encoder(ids)
        padding = ttnn.to_layout(
            ttnn.reshape(ids, (1, 1, phrases, context)),
            ttnn.TILE_LAYOUT,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        values = ttnn.typecast(padding, ttnn.float32, memory_config=ttnn.L1_MEMORY_CONFIG)
        is_padding = ttnn.eq(values, 0.0, memory_config=ttnn.L1_MEMORY_CONFIG)
        mask = ttnn.multiply(is_padding, MASKED, memory_config=ttnn.L1_MEMORY_CONFIG)
        mask = ttnn.typecast(mask, ttnn.bfloat16, memory_config=ttnn.L1_MEMORY_CONFIG)
        encoded = []
        for i in range(phrases):
            own = _rows(tokens, i * context, (i + 1) * context)
            own_mask = ttnn.concat(
                [_rows(mask, i, i + 1), self._geometry_mask],
                dim=3,
                memory_config=ttnn.L1_MEMORY_CONFIG,
            )
            encoded.append((own, own_mask))
        return encoded

    def prompt(self, phrases: list[tuple[Any, Any]], geometry: Any) -> tuple[list[Any], Any, Any]:
        """Append the geometry token to each phrase.

        Returns:
            Each phrase's keys, (1, 1, keys, width); all of them, (1, 1, phrases * keys, width); and all
            masks, (phrases, 1, 1, keys).
        """
        memory = ttnn.L1_MEMORY_CONFIG
        each = [
            ttnn.concat([tokens, geometry], dim=2, memory_config=memory) for tokens, _ in phrases
        ]
        masks = [mask for _, mask in phrases]
        if len(phrases) == 1:
            return each, each[0], masks[0]
        return (
            each,
            ttnn.concat(each, dim=2, memory_config=memory),
            ttnn.concat(masks, dim=0, memory_config=memory),
        )

    def features(self, image: list[Any]) -> list[Any]:
        """What phrases need of an image.

        Args:
            image: the image part's levels, fine to coarse, and its geometry token. The finer two are
                consumed.

        Returns:
            The finest level's share of the pixels in four phases, the next one's, the coarsest level and the
            geometry token.
        """
        finest, middle, coarsest, geometry = image
        of_middle, of_finest = self.segmentation_head.terms([middle, finest])
        return [*of_finest, *of_middle, coarsest, geometry]

    def positions(self, phrases: int) -> Any:
        """(1, 1, phrases * n, width), the image's for each phrase, in DRAM."""
        if phrases == 1:
            return self._positions
        return ttnn.concat(
            [self._positions] * phrases, dim=2, memory_config=ttnn.DRAM_MEMORY_CONFIG
        )

    def ground(self, level: Any, prompt: Any, mask: Any) -> tuple[Any, Any, Any]:
        """Find instances.

        Args:
            level: (1, 1, n, width), the coarsest level of one image.
            prompt, mask: of all phrases.

        Returns:
            The answers, (1, 1, phrases * rows, 96) float32: columns 0 to 3 a query's box (cxcywh), column 32
            the presence logit in the presence token's row, column 64 a query's class logit; the queries,
            (1, 1, phrases * rows, width); the fused tokens, (1, 1, phrases * n, width).
        """
        positions = self.positions(mask.shape[0])
        memory = self.fusion_encoder(level, positions, prompt, mask)
        queries, box_logits, presence = self.decoder(memory, positions, prompt, mask)
        scores = self.scoring(queries, prompt, mask)
        boxes = ttnn.sigmoid(box_logits, memory_config=ttnn.L1_MEMORY_CONFIG)
        answers = ttnn.concat([boxes, presence, scores], dim=3, memory_config=ttnn.L1_MEMORY_CONFIG)
        for tensor in (box_logits, boxes, presence, scores):
            ttnn.deallocate(tensor)
        queries = ttnn.typecast(queries, ttnn.bfloat16, memory_config=ttnn.L1_MEMORY_CONFIG)
        return answers, queries, memory


def _rows(x: Any, first: int, end: int) -> Any:
    """Rows ``first`` to ``end`` of (1, 1, n, width)."""
    return ttnn.slice(
        x, [0, 0, first, 0], [1, 1, end, x.shape[3]], memory_config=ttnn.L1_MEMORY_CONFIG
    )
