"""Attention in its forms: over heads, with positions, and over a phrase's tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
import ttnn
from torch import Tensor

from sam3_ray.backends.blackhole.modules import Scope, as_row, transposed
from sam3_ray.backends.blackhole.parts.layers import Linear, linear, part_of
from sam3_ray.backends.blackhole.placement import Placement
from sam3_ray.config import Sam3Config


def attention(
    place: Placement,
    queries: Any,
    keys: Any,
    values: Any,
    *,
    mask: Any = None,
    causal: bool = False,
) -> Any:
    """Softmax attention, (b, heads, n, d) each; the operands are consumed.

    Args:
        place: where it runs.
        queries, keys, values: of the same number of heads.
        mask: (b or 1, heads or 1, n, keys), added to the scores; keys in whole tiles.
        causal: whether a token sees only itself and those before it.
    """
    output = ttnn.transformer.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        program_config=place.attention_config(queries.shape[2], keys.shape[2]),
        compute_kernel_config=place.attention_compute_config,
        memory_config=ttnn.L1_MEMORY_CONFIG,
    )
    for operand in (queries, keys, values):
        ttnn.deallocate(operand)
    return output


class PackedProjection:
    """Some rows of the projection that torch packs queries, keys and values into.

    Args:
        place: where it runs.
        scope: of ``in_proj_weight`` (3 * width, width) and ``in_proj_bias`` (3 * width,).
        width: of the tokens.
        rows: the first and the end of those that are taken.
        scale: multiplied into them, in float32.
    """

    def __init__(
        self,
        place: Placement,
        scope: Scope,
        width: int,
        rows: tuple[int, int],
        *,
        scale: float = 1.0,
    ) -> None:
        self._place = place
        name = f"rows_{rows[0]}_{rows[1]}"
        self._weight = scope.parameter(
            {"in_proj_weight": (3 * width, width)},
            part_of(*rows, lambda weight: transposed(weight) * scale),
            dtype=place.weights_dtype,
            name=f"{name}.weight",
        )
        self._bias = scope.parameter(
            {"in_proj_bias": (3 * width,)},
            part_of(*rows, lambda bias: as_row(bias) * scale),
            dtype=ttnn.bfloat16,
            name=f"{name}.bias",
        )

    def __call__(self, x: Any) -> Any:
        """(1, 1, n, width) -> (1, 1, n, rows)."""
        return linear(self._place, x, self._weight.value, self._bias.value)


class PositionedProjection:
    """Rows of a packed projection of tokens with their positions added.

    ``(x + p) W`` is ``x W + p W``, and ``p`` never changes: ``p W`` and the bias are one table, made in
    float32 when the weights are loaded.

    Args:
        place: where it runs.
        scope: of ``in_proj_weight`` (3 * width, width) and its bias.
        config: the model's dimensions.
        positions: (n, width) float32.
        rows: the first and the end of those that are taken.
        positioned: how many of them see the positions; the rest see the tokens alone.
    """

    def __init__(
        self,
        place: Placement,
        scope: Scope,
        config: Sam3Config,
        positions: Tensor,
        rows: tuple[int, int],
        *,
        positioned: int | None = None,
    ) -> None:
        width = config.model_width
        start, end = rows
        seen = end - start if positioned is None else positioned
        self._place = place

        def table(weight: Tensor, bias: Tensor) -> Tensor:
            moved = positions @ weight[start : start + seen].t()
            still = torch.zeros(len(positions), end - start - seen)
            return (torch.cat([moved, still], dim=1) + bias[start:end])[None, None]

        weight = {"in_proj_weight": (3 * width, width)}
        self._weight = scope.parameter(
            weight,
            part_of(start, end, transposed),
            dtype=place.weights_dtype,
            name=f"positioned_{start}_{end}.weight",
        )
        self._table = scope.parameter(
            weight | {"in_proj_bias": (3 * width,)},
            table,
            dtype=ttnn.bfloat16,
            name=f"positioned_{start}_{end}.table",
        )

    def __call__(self, x: Any, phrases: int) -> Any:
        """(1, 1, phrases * n, width) -> (phrases, 1, n, rows)."""
        projected = linear(self._place, x, self._weight.value, None)
        _, _, total, columns = projected.shape
        projected = ttnn.reshape(projected, (phrases, 1, total // phrases, columns))
        return ttnn.add(projected, self._table.value, output_tensor=projected)


class PromptAttention:
    """Queries of any tokens, keys and values of the phrase's tokens, padded ones masked.

    The mask is added to the scores before a softmax of its own: others saw the attention operation mishandle
    padded keys under a mask (docs/blackhole.md).
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width = config.model_width
        self._place, self._heads = place, config.heads
        scale = 1 / math.sqrt(width // config.heads)
        # The scores' 1 / sqrt(d) goes into the query's projection.
        self._query = PackedProjection(place, scope, width, (0, width), scale=scale)
        self._key = PackedProjection(place, scope, width, (width, 2 * width))
        self._value = PackedProjection(place, scope, width, (2 * width, 3 * width))
        self._output = Linear(place, scope / "out_proj", width, width)

    def __call__(self, x: Any, prompt: Any, mask: Any) -> Any:
        """Attend.

        Args:
            x: (1, 1, phrases * n, width); consumed.
            prompt: (1, 1, phrases * keys, width).
            mask: (phrases, 1, 1, keys), 0 or a large negative number.
        """
        phrases = mask.shape[0]
        q = split_heads(self._query(x), phrases, self._heads)
        k = split_heads(self._key(prompt), phrases, self._heads)
        v = split_heads(self._value(prompt), phrases, self._heads)
        ttnn.deallocate(x)
        scores = self._product(q, k, transpose=True)
        scores = ttnn.add(scores, mask, output_tensor=scores)
        weights = ttnn.softmax(
            scores,
            dim=-1,
            compute_kernel_config=self._place.exact_compute_config,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        heads = self._product(weights, v)
        for tensor in (q, k, v, scores, weights):
            ttnn.deallocate(tensor)
        return joined(self._output, heads)

    def _product(self, a: Any, b: Any, *, transpose: bool = False) -> Any:
        return ttnn.matmul(
            a,
            b,
            transpose_b=transpose,
            compute_kernel_config=self._place.attention_compute_config,
            memory_config=ttnn.L1_MEMORY_CONFIG,
            dtype=ttnn.bfloat16,
        )


def split_heads(x: Any, phrases: int, heads: int) -> Any:
    """phrases * n rows of heads * d -> (phrases, heads, n, d); ``x`` is consumed."""
    width = x.shape[-1]
    rows = x.shape[0] * x.shape[1] * x.shape[2]
    split = ttnn.experimental.nlp_create_qkv_heads(
        ttnn.reshape(x, (phrases, 1, rows // phrases, width)),
        num_heads=heads,
        num_kv_heads=0,
        transpose_k_heads=False,
        memory_config=ttnn.L1_MEMORY_CONFIG,
    )[0]
    ttnn.deallocate(x)
    return split


def added(x: Any, update: Any) -> Any:
    """x + update, in place; ``update`` is consumed."""
    x = ttnn.add(x, update, output_tensor=x)
    ttnn.deallocate(update)
    return x


def joined(output: Linear, heads: Any) -> Any:
    """(b, heads, n, d) -> output((1, 1, b * n, heads * d)); ``heads`` is consumed."""
    x = ttnn.experimental.nlp_concat_heads(heads, memory_config=ttnn.L1_MEMORY_CONFIG)
    ttnn.deallocate(heads)
    batch, _, tokens, width = x.shape
    result = output(ttnn.reshape(x, (1, 1, batch * tokens, width)))
    ttnn.deallocate(x)
    return result
