"""The fusion encoder (upstream: ``encoder.TransformerEncoderFusion``): image tokens look at the phrase."""

from __future__ import annotations

from typing import Any

import ttnn

from sam3_ray.backends.blackhole.modules import Scope
from sam3_ray.backends.blackhole.parts.attention import (
    HeadsProjection,
    PromptAttention,
    added,
    attention,
    joined,
)
from sam3_ray.backends.blackhole.parts.layers import LayerNorm, Linear
from sam3_ray.backends.blackhole.placement import Placement
from sam3_ray.config import Sam3Config


class SelfAttention:
    """Of the image's tokens, with their positions added to queries and keys."""

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width = config.model_width
        self._place = place
        self._heads = HeadsProjection(place, scope, config, positions=True)
        self._output = Linear(place, scope / "out_proj", width, width)

    def __call__(self, x: Any, positions: Any, phrases: int) -> Any:
        """Twice (1, 1, phrases * n, width) -> the same; ``x`` is consumed."""
        placed = ttnn.concat([x, positions], dim=3, memory_config=ttnn.L1_MEMORY_CONFIG)
        ttnn.deallocate(x)
        q, k, v = self._heads(placed, phrases)
        ttnn.deallocate(placed)
        return joined(self._output, attention(self._place, q, k, v, scaled=True))


class Layer:
    """Upstream's ``TransformerEncoderLayer.forward_pre``."""

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width = config.model_width
        self._place, self._hidden_width = place, config.feedforward_width
        self._norm1 = LayerNorm(place, scope / "norm1", width)
        self._self_attention = SelfAttention(place, scope / "self_attn", config)
        self._norm2 = LayerNorm(place, scope / "norm2", width)
        self._prompt_attention = PromptAttention(place, scope / "cross_attn_image", config)
        self._norm3 = LayerNorm(place, scope / "norm3", width)
        self._linear1 = Linear(
            place, scope / "linear1", width, config.feedforward_width, activation="relu"
        )
        self._linear2 = Linear(place, scope / "linear2", config.feedforward_width, width)

    def __call__(self, x: Any, positions: Any, prompt: Any, mask: Any) -> Any:
        """Twice (1, 1, phrases * n, width); adds to ``x`` in place."""
        phrases = mask.shape[0]
        x = added(x, self._self_attention(self._norm1(x), positions, phrases))
        x = added(x, self._prompt_attention(self._norm2(x), prompt, mask))
        normed = self._norm3(x)
        hidden = self._linear1(
            normed, memory=self._place.memory_for(x.shape[2], self._hidden_width)
        )
        ttnn.deallocate(normed)
        update = self._linear2(hidden)
        ttnn.deallocate(hidden)
        return added(x, update)


class FusionEncoder:
    """The coarsest level and phrases -> the image's tokens as each phrase sees them.

    Args:
        place: where it runs.
        scope: of upstream's ``transformer.encoder``.
        config: the model's dimensions.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        self.layers = [
            Layer(place, scope / "layers" / i, config) for i in range(config.fusion_layers)
        ]

    def __call__(self, level: Any, positions: Any, prompt: Any, mask: Any) -> Any:
        """Fuse.

        Args:
            level: (1, 1, n, width), read only.
            positions: (1, 1, phrases * n, width), of each phrase's copy of the level.
            prompt: (1, 1, phrases * keys, width).
            mask: (phrases, 1, 1, keys), 0 or a large negative number.

        Returns:
            (1, 1, phrases * n, width).
        """
        phrases = mask.shape[0]
        x = ttnn.concat([level] * phrases, dim=2, memory_config=ttnn.L1_MEMORY_CONFIG)
        for layer in self.layers:
            x = layer(x, positions, prompt, mask)
        return x
