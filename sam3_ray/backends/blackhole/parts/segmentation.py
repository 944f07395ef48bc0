"""The segmentation head (upstream: ``maskformer_segmentation.UniversalSegmentationHead``).

Pixels are embedded for a phrase once, in the order of ``parts.doubled``; a mask is the product of a query's
embedding with them. The 1x1 convolution between both (``instance_seg_head``) is applied to the queries
instead of the pixels, which are four hundred times as many.
"""

from __future__ import annotations

from typing import Any

import ttnn
from torch import Tensor

from sam3_ray.backends.blackhole.modules import Scope, as_row
from sam3_ray.backends.blackhole.parts.attention import PromptAttention
from sam3_ray.backends.blackhole.parts.doubled import (
    DoubledConvolution,
    in_phases,
    in_reading_order,
)
from sam3_ray.backends.blackhole.parts.group_norm import GroupNorm
from sam3_ray.backends.blackhole.parts.layers import Convolution3x3, LayerNorm, Linear, linear
from sam3_ray.backends.blackhole.placement import Placement
from sam3_ray.config import Sam3Config

STAGES = 2
"""Convolutions that run: one for each level above the coarsest; upstream has a third, unused."""


class PixelDecoder:
    """Fused tokens and the two finer levels -> pixels at the finest level's size.

    A stage convolves the sum of what comes from below, doubled, and a level. A convolution of a sum is the
    sum of convolutions: a level's is the same for every phrase, and is made once, with the image.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width, grid = config.model_width, config.grid
        self._sizes = [grid * 2**stage for stage in range(STAGES)]
        layers = [scope / "conv_layers" / i for i in range(STAGES)]
        self._of_levels = [
            Convolution3x3(place, layer, width, 2 * size)
            for layer, size in zip(layers, self._sizes, strict=True)
        ]
        self._of_tokens = [
            DoubledConvolution(place, layer, width, size)
            for layer, size in zip(layers, self._sizes, strict=True)
        ]
        self._norms = [
            GroupNorm(place, scope / "norms" / i, width, 2 * size)
            for i, size in enumerate(self._sizes)
        ]

    def terms(self, finer: list[Any]) -> list[list[Any]]:
        """What levels, coarse to fine, add to a stage's phases; (1, 1, n / 4, width) each, in DRAM.

        The levels are consumed.
        """
        return [
            in_phases(convolution(level), size)
            for level, convolution, size in zip(finer, self._of_levels, self._sizes, strict=True)
        ]

    def __call__(self, coarsest: Any, terms: list[list[Any]]) -> Any:
        """(1, 1, grid * grid, width), consumed, and ``terms`` -> (1, 1, 16 * grid * grid, width).

        The result is in phase order.
        """
        x = ttnn.to_layout(coarsest, ttnn.ROW_MAJOR_LAYOUT, memory_config=ttnn.L1_MEMORY_CONFIG)
        ttnn.deallocate(coarsest)
        for stage, (convolution, norm) in enumerate(zip(self._of_tokens, self._norms, strict=True)):
            if stage:
                x = in_reading_order(ttnn.relu(x, output_tensor=x), self._sizes[stage - 1])
            x = norm(convolution(x, terms[stage]))
        return x


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

    def terms(self, finer: list[Any]) -> list[list[Any]]:
        """The image's share of the pixels: see ``PixelDecoder.terms``."""
        return self._pixel_decoder.terms(finer)

    def pixels(
        self, memory: Any, prompt: Any, mask: Any, terms: list[list[Any]], *, output: Any
    ) -> None:
        """Embed the pixels of one phrase.

        Args:
            memory: (1, 1, n, width), the fusion encoder's, of one phrase.
            prompt, mask: of the same phrase, as ``PromptAttention`` takes them.
            terms: of the image.
            output: (1, 1, width, mask_size * mask_size), where they go: a column for each pixel, in phase
                order.
        """
        change = self._prompt_attention(self._norm(memory), prompt, mask)
        seen = ttnn.add(change, memory, output_tensor=change)
        pixels = self._pixel_decoder(seen, terms)
        # As columns once, where each product of masks would turn them.
        columns = ttnn.transpose(pixels, -2, -1, memory_config=ttnn.L1_MEMORY_CONFIG)
        ttnn.deallocate(pixels)
        ttnn.relu(columns, output_tensor=output)
        ttnn.deallocate(columns)

    def masks(self, queries: Any, pixels: Any, *, output: Any) -> None:
        """Multiply.

        Args:
            queries: (1, 1, n, width) after the decoder's norm; consumed.
            pixels: (1, 1, width, pixels).
            output: (1, 1, n, pixels), where the mask logits go.
        """
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
        products = linear(
            self._place, embedded, pixels, None, memory=self._place.memory_for(*output.padded_shape)
        )
        ttnn.add(products, shift, output_tensor=output)
        for tensor in (hidden, embedded, shift, products):
            ttnn.deallocate(tensor)


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
