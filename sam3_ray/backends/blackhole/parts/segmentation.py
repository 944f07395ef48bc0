"""The segmentation head (upstream: ``maskformer_segmentation.UniversalSegmentationHead``).

Pixels are embedded for a phrase once; a mask is the product of a query's embedding with them. The 1x1
convolution between both (``instance_seg_head``) is applied to the queries instead of the pixels, which are
four hundred times as many.
"""

from __future__ import annotations

from typing import Any

import ttnn
from torch import Tensor

from sam3_ray.backends.blackhole.modules import Scope, as_row
from sam3_ray.backends.blackhole.parts.attention import PromptAttention
from sam3_ray.backends.blackhole.parts.group_norm import GroupNorm
from sam3_ray.backends.blackhole.parts.layers import Convolution3x3, LayerNorm, Linear, linear
from sam3_ray.backends.blackhole.placement import Placement
from sam3_ray.config import Sam3Config

STAGES = 2
"""Convolutions that run: one for each level above the coarsest; upstream has a third, unused."""


class PixelDecoder:
    """Fused tokens and the two finer levels -> pixels at the finest level's size."""

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width, grid = config.model_width, config.grid
        self._width = width
        self._sizes = [grid * 2**stage for stage in range(STAGES)]
        self._convolutions = [
            Convolution3x3(place, scope / "conv_layers" / i, width, 2 * size)
            for i, size in enumerate(self._sizes)
        ]
        self._norms = [
            GroupNorm(place, scope / "norms" / i, width, 2 * size)
            for i, size in enumerate(self._sizes)
        ]

    def __call__(self, coarsest: Any, finer: list[Any]) -> Any:
        """(1, 1, grid * grid, width), and levels coarse to fine -> (1, 1, 16 * grid * grid, width).

        ``coarsest`` is consumed.
        """
        x = coarsest
        for size, level, convolution, norm in zip(
            self._sizes, finer, self._convolutions, self._norms, strict=True
        ):
            doubled = self._doubled(x, size)
            ttnn.deallocate(x)
            summed = ttnn.add(doubled, level, memory_config=ttnn.DRAM_MEMORY_CONFIG)
            ttnn.deallocate(doubled)
            x = norm(convolution(summed))
        return x

    def _doubled(self, x: Any, size: int) -> Any:
        """Every pixel four times, (1, 1, n, width) -> (1, 1, 4 * n, width)."""
        rows = ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT, memory_config=ttnn.DRAM_MEMORY_CONFIG)
        image = ttnn.reshape(rows, (1, size, size, self._width))
        doubled = ttnn.upsample(image, 2, mode="nearest", memory_config=ttnn.DRAM_MEMORY_CONFIG)
        ttnn.deallocate(image)
        flat = ttnn.reshape(doubled, (1, 1, 4 * size * size, self._width))
        tiles = ttnn.to_layout(flat, ttnn.TILE_LAYOUT, memory_config=ttnn.DRAM_MEMORY_CONFIG)
        ttnn.deallocate(flat)
        return tiles


class SegmentationHead:
    """Fused tokens -> embedded pixels; queries -> their masks.

    Args:
        place: where it runs.
        scope: of upstream's ``segmentation_head``.
        config: the model's dimensions.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width = config.model_width
        self._place = place
        self._norm = LayerNorm(place, scope / "cross_attn_norm", width)
        self._prompt_attention = PromptAttention(place, scope / "cross_attend_prompt", config)
        self._pixel_decoder = PixelDecoder(place, scope / "pixel_decoder", config)
        embed = scope / "mask_predictor" / "mask_embed" / "layers"
        self._embed = [
            Linear(place, embed / 0, width, width, activation="relu"),
            Linear(place, embed / 1, width, width, activation="relu"),
        ]
        last = {
            "mask_predictor.mask_embed.layers.2.weight": (width, width),
            "mask_predictor.mask_embed.layers.2.bias": (width,),
            "instance_seg_head.weight": (width, width, 1, 1),
            "instance_seg_head.bias": (width,),
        }
        self._to_pixels = scope.parameter(
            last, lambda *t: mask_projection(*t)[0], dtype=ttnn.bfloat16, name="mask_projection"
        )
        self._to_pixels_bias = scope.parameter(
            last,
            lambda *t: as_row(mask_projection(*t)[1]),
            dtype=ttnn.bfloat16,
            name="mask_projection_bias",
        )
        self._constant = scope.parameter(
            last, lambda *t: mask_projection(*t)[2], dtype=ttnn.bfloat16, name="mask_constant"
        )
        self._constant_bias = scope.parameter(
            last,
            lambda *t: as_row(mask_projection(*t)[3]),
            dtype=ttnn.bfloat16,
            name="mask_constant_bias",
        )

    def pixels(self, memory: Any, prompt: Any, mask: Any, finer: list[Any]) -> Any:
        """Embed the pixels of one phrase.

        Args:
            memory: (1, 1, n, width), the fusion encoder's, of one phrase.
            prompt, mask: of the same phrase, as ``PromptAttention`` takes them.
            finer: the two finer levels, coarse to fine.

        Returns:
            (1, 1, mask_size * mask_size, width).
        """
        change = self._prompt_attention(self._norm(memory), prompt, mask)
        seen = ttnn.add(change, memory, output_tensor=change)
        return self._pixel_decoder(seen, finer)

    def masks(self, queries: Any, pixels: Any) -> Any:
        """(1, 1, n, width) after the decoder's norm, and pixels -> (1, 1, n, pixels) mask logits."""
        hidden = queries
        for layer in self._embed:
            hidden = layer(hidden)
        embedded = linear(self._place, hidden, self._to_pixels.value, self._to_pixels_bias.value)
        shift = linear(
            self._place,
            hidden,
            self._constant.value,
            self._constant_bias.value,
            dtype=ttnn.float32,
        )
        products = ttnn.matmul(
            embedded,
            pixels,
            transpose_b=True,
            compute_kernel_config=self._place.compute_config,
            memory_config=ttnn.DRAM_MEMORY_CONFIG,
            dtype=ttnn.bfloat16,
        )
        logits = ttnn.add(
            products, shift, memory_config=ttnn.DRAM_MEMORY_CONFIG, dtype=ttnn.bfloat16
        )
        for tensor in (hidden, embedded, shift, products):
            ttnn.deallocate(tensor)
        return logits


def mask_projection(
    embed: Tensor, embed_bias: Tensor, pixel: Tensor, pixel_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last layer of the mask embedding with the pixels' 1x1 convolution multiplied in.

    ``(h E + e) . (P x + p)`` is ``(h E P + e P) . x + (h E + e) . p``.

    Returns:
        ``E P`` and ``e P``, then ``E p`` as (width, 1) and ``e p`` as (1,).
    """
    matrix = pixel[:, :, 0, 0]
    return (
        embed.t() @ matrix,
        embed_bias @ matrix,
        (embed.t() @ pixel_bias)[:, None],
        (embed_bias @ pixel_bias)[None],
    )
