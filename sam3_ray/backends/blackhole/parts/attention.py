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
    scaled: bool = False,
) -> Any:
    """Softmax attention, (b, heads, n, d) each; the operands are consumed.

    Args:
        place: where it runs.
        queries, keys, values: of the same number of heads.
        mask: (b or 1, heads or 1, n, keys), added to the scores; keys in whole tiles.
        causal: whether a token sees only itself and those before it.
        scaled: whether the queries carry 1 / sqrt(d) already. Under a mask they must: with another scale
            than 1 ttnn divides the whole mask by it first, a pass over memory of its own.
    """
    if mask is not None and not scaled:
        raise ValueError("queries under a mask must be scaled by their projection")
    batch, heads, tokens, _ = queries.shape
    output = ttnn.transformer.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=1.0 if scaled else None,
        program_config=place.attention_config(batch * heads, tokens, keys.shape[2]),
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


class HeadsProjection:
    """Queries, keys and values of all heads: one product and one split.

    torch packs the three projections in one matrix. Positions that queries and keys see, and values do not,
    come beside the tokens: ``[x, p] [[Wq, Wk, Wv], [Wq, Wk, 0]]`` is ``[(x + p) Wq, (x + p) Wk, x Wv]``.
    Where only keys and values are wanted the queries' columns are zero: the split wants them, and one split
    takes the place of two.

    Args:
        place: where it runs.
        scope: of ``in_proj_weight`` (3 * width, width) and ``in_proj_bias`` (3 * width,).
        config: the model's dimensions.
        queries: whether queries are wanted; they carry the scores' 1 / sqrt(d).
        positions: whether the input has positions beside its tokens.
    """

    def __init__(
        self,
        place: Placement,
        scope: Scope,
        config: Sam3Config,
        *,
        queries: bool = True,
        positions: bool = False,
    ) -> None:
        width = config.model_width
        self._place, self._heads, self._queries = place, config.heads, queries
        scale = torch.ones(3 * width)
        scale[:width] = query_scale(config) if queries else 0.0
        seen = torch.ones(3 * width)
        seen[2 * width :] = 0.0

        def matrix(weight: Tensor) -> Tensor:
            of_tokens = transposed(weight) * scale
            return torch.cat([of_tokens, of_tokens * seen]) if positions else of_tokens

        name = f"heads_{'qkv' if queries else 'kv'}{'_positions' if positions else ''}"
        self._weight = scope.parameter(
            {"in_proj_weight": (3 * width, width)},
            matrix,
            dtype=place.weights_dtype,
            name=f"{name}.weight",
        )
        self._bias = scope.parameter(
            {"in_proj_bias": (3 * width,)},
            lambda bias: as_row(bias * scale),
            dtype=ttnn.bfloat16,
            name=f"{name}.bias",
        )

    def __call__(self, x: Any, phrases: int) -> list[Any]:
        """Project and split.

        Args:
            x: (1, 1, phrases * n, width), twice as wide with positions.
            phrases: how many follow each other.

        Returns:
            Queries (where wanted), keys and values, (phrases, heads, n, d) each.
        """
        packed = linear(self._place, x, self._weight.value, self._bias.value)
        _, _, total, columns = packed.shape
        q, k, v = ttnn.experimental.nlp_create_qkv_heads(
            ttnn.reshape(packed, (phrases, 1, total // phrases, columns)),
            num_heads=self._heads,
            num_kv_heads=self._heads,
            transpose_k_heads=False,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        ttnn.deallocate(packed)
        if self._queries:
            return [q, k, v]
        ttnn.deallocate(q)
        return [k, v]


class PromptAttention:
    """Queries of any tokens, keys and values of the phrase's tokens, padded ones masked.

    The mask is added to the scores before a softmax of its own: others saw the attention operation mishandle
    padded keys under a mask (docs/blackhole.md).
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width = config.model_width
        self._place, self._heads = place, config.heads
        self._query = PackedProjection(place, scope, width, (0, width), scale=query_scale(config))
        self._keys_and_values = HeadsProjection(place, scope, config, queries=False)
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
        k, v = self._keys_and_values(prompt, phrases)
        ttnn.deallocate(x)
        scores = self._product(q, k, transpose=True)
        weights = ttnn.scale_mask_softmax_in_place(
            scores,
            1.0,  # the queries carry the scale
            mask,
            compute_kernel_config=self._place.exact_compute_config,
            numeric_stable=True,
        )
        heads = self._product(weights, v)
        for tensor in (q, k, v, weights):
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


def query_scale(config: Sam3Config) -> float:
    """1 / sqrt(d) of the prompt part's attention, to be multiplied into a projection in float32."""
    return 1 / math.sqrt(config.model_width // config.heads)


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
