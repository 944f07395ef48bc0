"""The geometry encoder's CLS token (upstream: ``geometry_encoders.SequenceGeometryEncoder``).

A phrase without boxes or points still has one geometric token, which looks at the image; it does not depend
on the phrase, so it belongs to the image part.
"""

from __future__ import annotations

from typing import Any

import torch
import ttnn
from torch import Tensor

from sam3_ray.backends.blackhole.modules import Scope, constant
from sam3_ray.backends.blackhole.parts.attention import (
    PackedProjection,
    attention,
    joined,
    split_heads,
)
from sam3_ray.backends.blackhole.parts.layers import LayerNorm, Linear
from sam3_ray.backends.blackhole.placement import TILE, Placement
from sam3_ray.config import Sam3Config


class OneTokenAttention:
    """Self-attention of a single token: the softmax over one key is 1, so it is the value, projected."""

    def __init__(self, place: Placement, scope: Scope, width: int) -> None:
        self._value = PackedProjection(place, scope, width, (2 * width, 3 * width))
        self._output = Linear(place, scope / "out_proj", width, width)

    def __call__(self, x: Any) -> Any:
        return self._output(self._value(x))


class ImageAttention:
    """The token's queries, the image's keys and values."""

    def __init__(self, place: Placement, scope: Scope, width: int, heads: int) -> None:
        self._place, self._heads = place, heads
        self._query, self._key, self._value = (
            PackedProjection(place, scope, width, (i * width, (i + 1) * width)) for i in range(3)
        )
        self._output = Linear(place, scope / "out_proj", width, width)

    def __call__(self, token: Any, keys: Any, values: Any) -> Any:
        """(1, 1, 32, width), and twice (1, 1, n, width) -> (1, 1, 32, width)."""
        q, k, v = (
            split_heads(projected, 1, self._heads)
            for projected in (self._query(token), self._key(keys), self._value(values))
        )
        return joined(self._output, attention(self._place, q, k, v))


class Layer:
    """Upstream's ``TransformerEncoderLayer.forward_pre`` for one token."""

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width = config.model_width
        self._norm1 = LayerNorm(place, scope / "norm1", width)
        self._self_attention = OneTokenAttention(place, scope / "self_attn", width)
        self._norm2 = LayerNorm(place, scope / "norm2", width)
        self._image_attention = ImageAttention(
            place, scope / "cross_attn_image", width, config.heads
        )
        self._norm3 = LayerNorm(place, scope / "norm3", width)
        self._linear1 = Linear(
            place, scope / "linear1", width, config.feedforward_width, activation="relu"
        )
        self._linear2 = Linear(place, scope / "linear2", config.feedforward_width, width)

    def __call__(self, token: Any, keys: Any, values: Any) -> Any:
        token = _sum(token, self._self_attention(self._norm1(token)))
        token = _sum(token, self._image_attention(self._norm2(token), keys, values))
        return _sum(token, self._linear2(self._linear1(self._norm3(token))))


class GeometryEncoder:
    """The coarsest level -> the CLS token.

    Args:
        place: where it runs.
        scope: of upstream's ``geometry_encoder``.
        config: the model's dimensions.
        positions: (grid * grid, model_width) float32 position encoding of the coarsest level.
    """

    def __init__(
        self, place: Placement, scope: Scope, config: Sam3Config, positions: Tensor
    ) -> None:
        width = config.model_width
        self._place = place
        self._positions = constant(place.device, positions[None, None])
        self._cls = scope.parameter(
            {"cls_embed.weight": (1, width)},
            lambda row: row.expand(TILE, width)[None, None],
            dtype=ttnn.bfloat16,
        )
        self._final_proj = Linear(place, scope / "final_proj", width, width)
        self._norm = LayerNorm(place, scope / "norm", width)
        self._layers = [
            Layer(place, scope / "encode" / i, config) for i in range(config.geometry_layers)
        ]
        self._encode_norm = LayerNorm(place, scope / "encode_norm", width)

    def __call__(self, level: Any) -> Any:
        """(1, 1, grid * grid, model_width) -> (1, 1, 32, model_width): the token, in every row of a tile.

        It is appended to a phrase's tokens, where rows without a value would poison the attention; the copies
        are masked there.
        """
        keys = ttnn.add(level, self._positions, memory_config=ttnn.L1_MEMORY_CONFIG)
        token = self._norm(self._final_proj(self._cls.value))
        for layer in self._layers:
            token = layer(token, keys, level)
        ttnn.deallocate(keys)
        return self._encode_norm(token)


def sine_positions(grid: int, width: int, *, temperature: float = 10000.0) -> Tensor:
    """Sines and cosines of rows, then of columns (upstream: ``PositionEmbeddingSine``, normalised).

    Returns:
        (grid * grid, width) float32, in reading order.
    """
    half = width // 2
    # Rows count from 1 and are scaled to end at 2 pi.
    places = torch.arange(1, grid + 1, dtype=torch.float32)
    places = places / (places[-1] + 1e-6) * (2 * torch.pi)
    pairs = torch.arange(half, dtype=torch.float32) // 2
    angles = places[:, None] / temperature ** (2 * pairs / half)
    values = torch.stack([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=2).flatten(1)
    by_row = values[:, None, :].expand(grid, grid, half)
    by_column = values[None, :, :].expand(grid, grid, half)
    return torch.cat([by_row, by_column], dim=2).reshape(grid * grid, width)


def _sum(a: Any, b: Any) -> Any:
    return ttnn.add(a, b, memory_config=ttnn.L1_MEMORY_CONFIG)
