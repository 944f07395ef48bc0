"""The text encoder (upstream: ``text_encoder_ve.VETextEncoder``): ids -> tokens of the model's width."""

from __future__ import annotations

from typing import Any

import ttnn
from torch import Tensor

from sam3_ray.backends.blackhole.modules import Scope, as_row, transposed
from sam3_ray.backends.blackhole.parts.attention import added, attention, joined
from sam3_ray.backends.blackhole.parts.layers import LayerNorm, Linear, linear
from sam3_ray.backends.blackhole.placement import Placement
from sam3_ray.config import Sam3Config

VOCABULARY = 49408
"""``vocab_size`` of ``VETextEncoder``."""

MLP_RATIO = 4
"""``mlp_ratio`` of ``Transformer``."""


class Attention:
    """Causal self-attention (upstream: ``nn.MultiheadAttention``)."""

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        self._place, self._heads = place, config.text_heads
        width = config.text_width
        self._weight = scope.parameter(
            {"in_proj_weight": (3 * width, width)}, transposed, dtype=place.weights_dtype
        )
        self._bias = scope.parameter({"in_proj_bias": (3 * width,)}, as_row, dtype=ttnn.bfloat16)
        self._output = Linear(place, scope / "out_proj", width, width)

    def __call__(self, x: Any, phrases: int) -> Any:
        """(1, 1, phrases * context, width) -> the same; ``x`` is consumed."""
        _, _, rows, width = x.shape
        context = rows // phrases
        qkv = linear(self._place, x, self._weight.value, self._bias.value)
        ttnn.deallocate(x)
        q, k, v = ttnn.experimental.nlp_create_qkv_heads(
            ttnn.reshape(qkv, (phrases, 1, context, 3 * width)),
            num_heads=self._heads,
            num_kv_heads=self._heads,
            transpose_k_heads=False,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        ttnn.deallocate(qkv)
        heads = attention(self._place, q, k, v, causal=True)
        return joined(self._output, heads)


class Block:
    """x + attention(ln_1(x)), then x + mlp(ln_2(x))."""

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width = config.text_width
        self._ln_1 = LayerNorm(place, scope / "ln_1", width)
        self._attention = Attention(place, scope / "attn", config)
        self._ln_2 = LayerNorm(place, scope / "ln_2", width)
        self._c_fc = Linear(
            place, scope / "mlp" / "c_fc", width, MLP_RATIO * width, activation="gelu"
        )
        self._c_proj = Linear(place, scope / "mlp" / "c_proj", MLP_RATIO * width, width)

    def __call__(self, x: Any, phrases: int) -> Any:
        """(1, 1, phrases * context, width); adds to ``x`` in place."""
        x = added(x, self._attention(self._ln_1(x), phrases))
        normed = self._ln_2(x)
        hidden = self._c_fc(normed)
        ttnn.deallocate(normed)
        update = self._c_proj(hidden)
        ttnn.deallocate(hidden)
        return added(x, update)


class TextEncoder:
    """Token ids -> tokens of the model's width.

    Args:
        place: where it runs.
        scope: of upstream's ``language_backbone``.
        config: the model's dimensions.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width = config.text_width
        encoder = scope / "encoder"
        self._context = config.text_context
        self._tokens = encoder.parameter(
            {"token_embedding.weight": (VOCABULARY, width)},
            _same,
            dtype=ttnn.bfloat16,
            layout=ttnn.ROW_MAJOR_LAYOUT,
        )
        self._positions = encoder.parameter(
            {"positional_embedding": (config.text_context, width)},
            lambda table: table[None, None],
            dtype=ttnn.bfloat16,
        )
        self.blocks = [
            Block(place, encoder / "transformer" / "resblocks" / i, config)
            for i in range(config.text_layers)
        ]
        self._ln_final = LayerNorm(place, encoder / "ln_final", width)
        self._resizer = Linear(place, scope / "resizer", width, config.model_width)

    def __call__(self, ids: Any) -> Any:
        """(phrases, context) uint32 row-major -> (1, 1, phrases * context, model_width)."""
        phrases = ids.shape[0]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, phrases)
        return self.resize(x)

    def embed(self, ids: Any) -> Any:
        """Look up tokens and add their positions: (1, 1, phrases * context, text_width)."""
        phrases = ids.shape[0]
        looked_up = ttnn.embedding(
            ids,
            self._tokens.value,
            layout=ttnn.TILE_LAYOUT,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        width = looked_up.shape[-1]
        looked_up = ttnn.reshape(looked_up, (phrases, 1, self._context, width))
        x = ttnn.add(looked_up, self._positions.value, memory_config=ttnn.L1_MEMORY_CONFIG)
        ttnn.deallocate(looked_up)
        return ttnn.reshape(x, (1, 1, phrases * self._context, width))

    def resize(self, x: Any) -> Any:
        """Final norm and the model's width; ``x`` is consumed."""
        normed = self._ln_final(x)
        ttnn.deallocate(x)
        output = self._resizer(normed)
        ttnn.deallocate(normed)
        return output


def _same(tensor: Tensor) -> Tensor:
    return tensor
