"""Attention, rotary embedding and heads against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from tests.emulation import EmulationError
from tests.emulation.samples import assert_rounds_to, down, random, up
from tests.emulation.test_matmul_values import kernel


@pytest.mark.parametrize("fidelity", ["HiFi4", "HiFi2"])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (40, 70), (32, 33)])
def test_attention(chip: Any, fidelity: str, queries: int, keys: int) -> None:
    import ttnn

    q, k, v = (
        random(2, 3, queries, 32),
        random(2, 3, keys, 32, seed=1),
        random(2, 3, keys, 32, seed=2),
    )
    result = ttnn.transformer.scaled_dot_product_attention(
        up(chip, q),
        up(chip, k),
        up(chip, v),
        is_causal=False,
        compute_kernel_config=kernel(fidelity),
    )
    expected = functional.scaled_dot_product_attention(q, k, v)
    error = (down(result) - expected).norm() / expected.norm()
    # HiFi2 cuts queries and probabilities to 7 bits: up to 2 ** -6 each, 2 ** -7 on average.
    assert error < {"HiFi4": 2**-8, "HiFi2": 2**-6}[fidelity]


def test_a_low_fidelity_shows(chip: Any) -> None:
    import ttnn

    q, k, v = (random(1, 2, 64, 64, seed=seed) for seed in range(3))
    expected = functional.scaled_dot_product_attention(q, k, v)
    error = []
    for fidelity in ("LoFi", "HiFi2", "HiFi4"):
        result = ttnn.transformer.scaled_dot_product_attention(
            up(chip, q),
            up(chip, k),
            up(chip, v),
            is_causal=False,
            compute_kernel_config=kernel(fidelity),
        )
        error.append(float((down(result) - expected).norm() / expected.norm()))
    assert error[0] > 2 * error[1] > 2 * error[2]


def test_scale_mask_and_causal(chip: Any) -> None:
    import ttnn

    attend = ttnn.transformer.scaled_dot_product_attention
    q, k, v = (random(1, 2, 64, 32, seed=seed) for seed in range(3))
    tensors = up(chip, q), up(chip, k), up(chip, v)
    mask = torch.zeros(1, 1, 64, 64)
    mask[..., 40:] = float("-inf")
    for fidelity in ("HiFi2", "HiFi4"):
        config = kernel(fidelity)
        scaled = attend(*tensors, is_causal=False, scale=0.5, compute_kernel_config=config)
        masked = attend(
            *tensors, attn_mask=up(chip, mask), is_causal=False, compute_kernel_config=config
        )
        causal = attend(*tensors, is_causal=True, compute_kernel_config=config)
        pairs = [
            (scaled, functional.scaled_dot_product_attention(q, k, v, scale=0.5)),
            (masked, functional.scaled_dot_product_attention(q, k, v, mask)),
            (causal, functional.scaled_dot_product_attention(q, k, v, is_causal=True)),
        ]
        for result, expected in pairs:
            assert (down(result) - expected).norm() / expected.norm() < 2**-6


def test_a_mask_over_a_partial_tile_of_keys_is_refused(chip: Any) -> None:
    import ttnn

    q, k = up(chip, random(1, 2, 64, 32)), up(chip, random(1, 2, 33, 32, seed=1))
    with pytest.raises(EmulationError, match="33 keys"):
        ttnn.transformer.scaled_dot_product_attention(
            q, k, k, attn_mask=up(chip, torch.zeros(1, 1, 64, 33)), is_causal=False
        )


@pytest.mark.parametrize(("batch", "tokens"), [(1, 64), (3, 64)])
def test_rotary_embedding(chip: Any, batch: int, tokens: int) -> None:
    import ttnn

    x = random(batch, 2, tokens, 64)
    angle = torch.rand(1, 1, tokens, 32, generator=torch.Generator().manual_seed(3)) * 6
    cos, sin = (
        wave(angle).repeat_interleave(2, -1).to(torch.bfloat16).float()
        for wave in (torch.cos, torch.sin)
    )
    turn = torch.zeros(1, 1, 32, 32)
    even = torch.arange(0, 32, 2)
    turn[..., even + 1, even], turn[..., even, even + 1] = -1, 1
    result = ttnn.experimental.rotary_embedding_llama(
        up(chip, x), up(chip, cos), up(chip, sin), up(chip, turn), is_decode_mode=False
    )
    # By pairs: (a, b) turned by the angle is (a cos - b sin, b cos + a sin).
    a, b = x[..., ::2], x[..., 1::2]
    c, s = cos[..., ::2], sin[..., ::2]
    expected = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    assert (down(result) - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_heads_are_split_and_joined(chip: Any) -> None:
    import ttnn

    joined = random(2, 1, 64, 3 * 4 * 32)
    q, k, v = ttnn.experimental.nlp_create_qkv_heads(
        up(chip, joined), num_heads=4, num_kv_heads=4, transpose_k_heads=False
    )
    parts = [part.reshape(2, 64, 4, 32).transpose(1, 2) for part in joined.squeeze(1).chunk(3, -1)]
    for tensor, expected in zip((q, k, v), parts, strict=True):
        assert torch.equal(down(tensor), expected)
    back = ttnn.experimental.nlp_concat_heads(v)
    assert torch.equal(down(back), joined[..., -128:])


def test_split_query_key_value_transposes_the_key(chip: Any) -> None:
    import ttnn

    joined = random(2, 64, 3 * 2 * 32)
    q, k, v = ttnn.transformer.split_query_key_value_and_split_heads(up(chip, joined), num_heads=2)
    parts = [part.reshape(2, 64, 2, 32).transpose(1, 2) for part in joined.chunk(3, -1)]
    assert torch.equal(down(q), parts[0])
    assert torch.equal(down(k), parts[1].transpose(-1, -2))
    assert torch.equal(down(ttnn.transformer.concatenate_heads(v)), joined[..., -64:])
    assert_rounds_to(v, parts[2])
