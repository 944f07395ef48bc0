"""Attention: scaled_dot_product_attention, rotary embedding, splitting and joining heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

from tests.emulation.errors import EmulationError
from tests.emulation.formats import cut_to_fidelity, product
from tests.emulation.ops.matmul import matrix_product
from tests.emulation.ops.registry import Arithmetic, value_of

_ROWS = 1 << 24
"""Scores computed at once: 64 MB in float32."""

TILE = 32


@value_of(
    "ttnn.transformer.scaled_dot_product_attention",
    default=Arithmetic("HiFi2", fp32_accumulate=False),  # sdpa.cpp
)
def scaled_dot_product_attention(
    input_tensor_q: torch.Tensor,
    input_tensor_k: torch.Tensor,
    input_tensor_v: torch.Tensor,
    *,
    arithmetic: Arithmetic,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    output_concat_heads: bool = False,
    **rest: Any,
) -> torch.Tensor:
    """Attention of (B, H, Sq, D) over (B, Hkv, Sk, D).

    Both products are cut: queries and probabilities go to SrcB, keys and values to SrcA. Probabilities are
    bfloat16 between the two, not yet divided by their sum, as in the kernel; the rescaling from chunk to
    chunk is not modelled.
    """
    name = "ttnn.transformer.scaled_dot_product_attention"
    for option in ("sliding_window_size", "attention_sink", "cu_window_seqlens"):
        if rest.get(option) is not None:
            raise EmulationError(f"{name}: the emulation has no value with {option}")
    query, key, value = input_tensor_q, input_tensor_k, input_tensor_v
    if attn_mask is not None and key.shape[-2] % TILE:
        raise EmulationError(
            f"{name}: a mask with {key.shape[-2]} keys: the kernel takes the last tile's padded keys from "
            f"the mask tensor's own padding, which holds anything; pad keys and mask to a multiple of {TILE}"
        )
    if query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if arithmetic.fidelity == "HiFi4":
        mask = None if attn_mask is None else attn_mask.to(query.dtype)
        result = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal and mask is None, scale=scale
        )
    else:
        result = _cut_attention(query, key, value, attn_mask, is_causal, scale, arithmetic)
    if output_concat_heads:
        result = concatenate_heads(result)
    return result


def _cut_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    arithmetic: Arithmetic,
) -> torch.Tensor:
    """Attention with both products cut to a fidelity below HiFi4, some query rows at a time."""
    batch, heads, rows, _ = query.shape
    columns = key.shape[-2]
    step = max(1, _ROWS // (batch * heads * columns))
    result = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=torch.float32)
    transposed = key.transpose(-1, -2)
    for start in range(0, rows, step):
        part = query[..., start : start + step, :]
        pairs = cut_to_fidelity(part, transposed, arithmetic.fidelity)
        scores = pairs[0][0].float() @ pairs[0][1].float()
        for first, second in pairs[1:]:
            scores += first.float() @ second.float()
        scores *= scale
        if mask is not None:
            scores += (mask if mask.shape[-2] == 1 else mask[..., start : start + step, :]).float()
        elif is_causal:
            ahead = torch.arange(columns) > torch.arange(start, start + part.shape[-2])[:, None]
            scores.masked_fill_(ahead, float("-inf"))
        scores = (scores - scores.amax(-1, keepdim=True)).exp_()
        total = scores.sum(-1, keepdim=True)
        weights = scores.to(torch.bfloat16)
        mixed = torch.zeros(())
        for first, second in cut_to_fidelity(weights, value, arithmetic.fidelity):
            mixed = mixed + matrix_product(first, second, "HiFi4").float()
        result[..., start : start + step, :] = mixed / total
    return result


@value_of(
    "ttnn.experimental.rotary_embedding_llama",
    default=Arithmetic("HiFi4", fp32_accumulate=False),  # seen in the generated kernel
)
def rotary_embedding_llama(
    input_tensor: torch.Tensor,
    cos_cache: torch.Tensor,
    sin_cache: torch.Tensor,
    trans_mat: torch.Tensor,
    *,
    arithmetic: Arithmetic,
    is_decode_mode: bool = False,
    **_: Any,
) -> torch.Tensor:
    """``x cos + (x T) sin``, T the 32x32 matrix applied to each tile of 32 columns."""
    if is_decode_mode:
        raise EmulationError(
            "ttnn.experimental.rotary_embedding_llama: the emulation has no value for decode mode"
        )
    rows, columns = input_tensor.shape[-2:]
    turn = trans_mat.reshape(trans_mat.shape[-2:])[:TILE, :TILE]
    if input_tensor.dtype != trans_mat.dtype:
        turn = turn.to(input_tensor.dtype)
    tiles = input_tensor.reshape(*input_tensor.shape[:-1], columns // TILE, TILE)
    pairs = cut_to_fidelity(tiles, turn, arithmetic.fidelity)
    turned = sum((first.float() @ second.float() for first, second in pairs), start=torch.zeros(()))
    turned = turned.reshape(input_tensor.shape).to(input_tensor.dtype)
    cos, sin = cos_cache[..., :rows, :].float(), sin_cache[..., :rows, :].float()
    fidelity = arithmetic.fidelity
    return product(input_tensor.float(), cos, fidelity) + product(turned.float(), sin, fidelity)


def _heads(
    joined: torch.Tensor, heads: int, key_heads: int, transpose_key: bool
) -> list[torch.Tensor]:
    """(B, 1, S, (H + 2 Hkv) D) -> query (B, H, S, D), key and value (B, Hkv, S, D)."""
    batch, rows, width = joined.shape[0], joined.shape[-2], joined.shape[-1]
    size = width // (heads + 2 * key_heads)
    parts = joined.reshape(batch, rows, width).split(
        [heads * size, key_heads * size, key_heads * size], -1
    )
    query, key, value = (part.reshape(batch, rows, -1, size).permute(0, 2, 1, 3) for part in parts)
    return [query, key.transpose(-1, -2) if transpose_key else key, value]


@value_of("ttnn.experimental.nlp_create_qkv_heads")
def nlp_create_qkv_heads(
    input: torch.Tensor,
    input_kv: torch.Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    transpose_k_heads: bool = True,
    **_: Any,
) -> list[torch.Tensor]:
    joined = input if input_kv is None else torch.cat([input, input_kv], -1)
    return _heads(
        joined, num_heads, num_heads if num_kv_heads is None else num_kv_heads, transpose_k_heads
    )


@value_of("ttnn.transformer.split_query_key_value_and_split_heads")
def split_query_key_value_and_split_heads(
    input_tensor: torch.Tensor,
    kv_input_tensor: torch.Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    transpose_key: bool = True,
    **_: Any,
) -> list[torch.Tensor]:
    joined = (
        input_tensor if kv_input_tensor is None else torch.cat([input_tensor, kv_input_tensor], -1)
    )
    return _heads(
        joined, num_heads, num_heads if num_kv_heads is None else num_kv_heads, transpose_key
    )


@value_of("ttnn.experimental.nlp_concat_heads", "ttnn.transformer.concatenate_heads")
def concatenate_heads(input_tensor: torch.Tensor, **_: Any) -> torch.Tensor:
    batch, heads, rows, size = input_tensor.shape
    return input_tensor.permute(0, 2, 1, 3).reshape(batch, 1, rows, heads * size)
