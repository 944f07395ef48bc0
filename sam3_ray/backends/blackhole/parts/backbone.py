"""The image encoder (upstream: ``vitdet.ViT``), tokens in window order from the first to the last block.

Order: the tokens of one window follow each other, so that a windowed block is a reshape, and a global block
needs nothing at all: attention does not care for the order of tokens once their rotations are in it. The
position table and the rotations are put in this order when they are made, the pixels by ``patches``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import ttnn
from torch import Tensor

from sam3_ray.backends.base import Uint8Array
from sam3_ray.backends.blackhole.modules import Scope, constant
from sam3_ray.backends.blackhole.parts.attention import added, attention, joined
from sam3_ray.backends.blackhole.parts.layers import LayerNorm, Linear, linear
from sam3_ray.backends.blackhole.placement import TILE, Placement, whole_tiles
from sam3_ray.config import Sam3Config

NORM_EPSILON = 1e-6
"""``norm_layer`` of ``vitdet.ViT``."""

ROPE_THETA = 10000.0
"""``rope_theta`` of ``vitdet.Attention``."""

PIXEL_SCALE = 127.5
"""Upstream normalises with mean and deviation 0.5: pixel / 255 -> pixel / 127.5 - 1."""


def patches(square: Uint8Array, config: Sam3Config) -> Uint8Array:
    """Cut an image into patches, in window order.

    Args:
        square: (S, S, 3) uint8, S = ``config.image_size``.

    Returns:
        (tokens, padded) uint8: each row a patch's pixels (y, x, channel), filled with zeros to whole tiles.
    """
    side, window, windows = config.patch_size, config.window_size, config.grid // config.window_size
    cut = square.reshape(windows, window, side, windows, window, side, 3)
    rows = cut.transpose(0, 3, 1, 4, 2, 5, 6).reshape(config.grid**2, side * side * 3)
    return np.pad(rows, ((0, 0), (0, padded_patch(config) - rows.shape[1])))


def padded_patch(config: Sam3Config) -> int:
    """Values of a patch, rounded up to whole tiles."""
    return whole_tiles(config.patch_size**2 * 3)


def window_order(table: Tensor, config: Sam3Config) -> Tensor:
    """(grid, grid, ...) in reading order -> (grid * grid, ...) in window order."""
    window, windows = config.window_size, config.grid // config.window_size
    rest = table.shape[2:]
    cut = table.reshape(windows, window, windows, window, *rest).transpose(1, 2)
    return cut.reshape(config.grid**2, *rest)


def rotations(side: int, head_width: int, *, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the 2-D rotary embedding.

    The first half of a head's pairs turns with the column, the second with the row, with frequencies
    ``theta ** (-4 i / head_width)`` (upstream: ``vitdet.compute_axial_cis``).

    Args:
        side: of the square of tokens.
        scale: of the coordinates, where the table is stretched over a larger square than in pretraining.

    Returns:
        Two (side, side, head_width) float32 tables, each value twice: once for each of its pair.
    """
    exponents = torch.arange(0, head_width, 4, dtype=torch.float32) / head_width
    frequencies = ROPE_THETA**-exponents
    angles = torch.outer(torch.arange(side, dtype=torch.float32) * scale, frequencies)
    by_column = angles[None, :, :].expand(side, side, -1)
    by_row = angles[:, None, :].expand(side, side, -1)
    both = torch.cat([by_column, by_row], dim=-1).repeat_interleave(2, dim=-1)
    return both.cos(), both.sin()


def pair_rotation() -> Tensor:
    """(1, 1, 32, 32): times a row of pairs (a, b), it gives (-b, a)."""
    matrix = torch.zeros(1, 1, TILE, TILE)
    even = torch.arange(0, TILE, 2)
    matrix[..., even, even + 1] = 1.0
    matrix[..., even + 1, even] = -1.0
    return matrix


class PatchEmbedding:
    """Patches of raw pixels -> tokens: one product, with the normalisation folded into it."""

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        self._place = place
        side, width = config.patch_size, config.vit_width
        pretrained = config.pretrain_image_size // side
        kernel = {"patch_embed.proj.weight": (width, 3, side, side)}

        def weight(proj: Tensor) -> Tensor:
            rows = proj.permute(2, 3, 1, 0).reshape(side * side * 3, width) / PIXEL_SCALE
            return torch.nn.functional.pad(rows, (0, 0, 0, padded_patch(config) - rows.shape[0]))

        def bias(proj: Tensor) -> Tensor:
            # What a pixel of 127.5 gives with the weights as they are stored: grey is then exactly zero.
            stored = weight(proj)
            if place.weights_dtype == ttnn.bfloat16:
                stored = stored.to(torch.bfloat16).float()
            return -PIXEL_SCALE * stored.sum(0).reshape(1, 1, 1, width)

        def positions(table: Tensor) -> Tensor:
            square = table[0, 1:].reshape(
                pretrained, pretrained, width
            )  # the first is the class token's
            times = math.ceil(config.grid / pretrained)
            tiled = square.repeat(times, times, 1)[: config.grid, : config.grid]
            return window_order(tiled, config)[None, None]

        self._weight = scope.parameter(kernel, weight, dtype=ttnn.bfloat16)
        self._bias = scope.parameter(
            kernel, bias, dtype=ttnn.bfloat16, name="patch_embed.proj.bias_of_normalisation"
        )
        self._positions = scope.parameter(
            {"pos_embed": (1, pretrained**2 + 1, width)}, positions, dtype=ttnn.bfloat16
        )

    def __call__(self, pixels: Any) -> Any:
        """(1, 1, tokens, padded) uint8 row-major -> (1, 1, tokens, width)."""
        values = ttnn.typecast(pixels, ttnn.bfloat16, memory_config=ttnn.L1_MEMORY_CONFIG)
        tiles = ttnn.to_layout(values, ttnn.TILE_LAYOUT, memory_config=ttnn.L1_MEMORY_CONFIG)
        ttnn.deallocate(values)
        x = linear(self._place, tiles, self._weight.value, self._bias.value)
        ttnn.deallocate(tiles)
        return ttnn.add(x, self._positions.value, output_tensor=x)


class Attention:
    """Multi-head attention with rotary embedding, inside windows or over the whole image."""

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config, windows: int) -> None:
        self._place, self._windows, self._heads = place, windows, config.vit_heads
        self._qkv = Linear(place, scope / "qkv", config.vit_width, 3 * config.vit_width)
        self._proj = Linear(place, scope / "proj", config.vit_width, config.vit_width)

    def __call__(self, x: Any, rope: Rope) -> Any:
        """(1, 1, tokens, width) -> the same; ``x`` is consumed."""
        _, _, tokens, width = x.shape
        qkv = self._qkv(x)
        ttnn.deallocate(x)
        qkv = ttnn.reshape(qkv, (self._windows, 1, tokens // self._windows, 3 * width))
        q, k, v = ttnn.experimental.nlp_create_qkv_heads(
            qkv,
            num_heads=self._heads,
            num_kv_heads=self._heads,
            transpose_k_heads=False,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        ttnn.deallocate(qkv)
        heads = attention(self._place, rope(q), rope(k), v)
        return joined(self._proj, heads)


class Rope:
    """Rotates queries and keys by their token's place."""

    def __init__(self, place: Placement, config: Sam3Config, *, windowed: bool) -> None:
        head_width = config.vit_width // config.vit_heads
        side = config.window_size if windowed else config.grid
        # Upstream stretches the coordinates of a window in pretraining over the whole image.
        tables = rotations(side, head_width, scale=config.window_size / side)
        ordered = [
            table.reshape(-1, head_width) if windowed else window_order(table, config)
            for table in tables
        ]
        self._cosines, self._sines = (constant(place.device, t[None, None]) for t in ordered)
        self._pair_rotation = constant(place.device, pair_rotation())
        self._compute_config = place.exact_compute_config

    def __call__(self, heads: Any) -> Any:
        """(b, heads, n, head_width) -> the same; ``heads`` is consumed."""
        rotated = ttnn.experimental.rotary_embedding_llama(
            heads,
            self._cosines,
            self._sines,
            self._pair_rotation,
            is_decode_mode=False,
            memory_config=ttnn.L1_MEMORY_CONFIG,
            compute_kernel_config=self._compute_config,
        )
        ttnn.deallocate(heads)
        return rotated


class Block:
    """x + attention(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config, windows: int) -> None:
        width, hidden = config.vit_width, config.vit_mlp_width
        self.is_global = windows == 1
        self._norm1 = LayerNorm(place, scope / "norm1", width, epsilon=NORM_EPSILON)
        self._attention = Attention(place, scope / "attn", config, windows)
        self._norm2 = LayerNorm(place, scope / "norm2", width, epsilon=NORM_EPSILON)
        self._fc1 = Linear(place, scope / "mlp" / "fc1", width, hidden, activation="gelu")
        self._fc2 = Linear(place, scope / "mlp" / "fc2", hidden, width)

    def __call__(self, x: Any, rope: Rope) -> Any:
        """(1, 1, tokens, width) in window order; adds to ``x`` in place."""
        x = added(x, self._attention(self._norm1(x), rope))
        normed = self._norm2(x)
        hidden = self._fc1(normed)
        ttnn.deallocate(normed)
        update = self._fc2(hidden)
        ttnn.deallocate(hidden)
        return added(x, update)


class Backbone:
    """Patches -> features of the last block.

    Args:
        place: where it runs.
        scope: of upstream's ``trunk``.
        config: the model's dimensions.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        windows = (config.grid // config.window_size) ** 2
        self.patch_embedding = PatchEmbedding(place, scope, config)
        self.norm = LayerNorm(place, scope / "ln_pre", config.vit_width, epsilon=NORM_EPSILON)
        self.blocks = [
            Block(place, scope / "blocks" / i, config, 1 if i in config.global_blocks else windows)
            for i in range(config.vit_depth)
        ]
        self._window_rope = Rope(place, config, windowed=True)
        self._global_rope = Rope(place, config, windowed=False)

    def __call__(self, pixels: Any) -> Any:
        """(1, 1, tokens, padded) uint8 patches -> (1, 1, tokens, width), both in window order."""
        x = self.patch_embedding(pixels)
        normed = self.norm(x)
        ttnn.deallocate(x)
        for block in self.blocks:
            normed = self.run_block(block, normed)
        return normed

    def run_block(self, block: Block, x: Any) -> Any:
        """One block with the rotations that fit it."""
        return block(x, self._global_rope if block.is_global else self._window_rope)
