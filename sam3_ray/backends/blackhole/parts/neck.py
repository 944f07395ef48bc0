"""The neck (upstream: ``necks.Sam3DualViTDetNeck``): the backbone's features at three resolutions.

Upstream makes a fourth, coarser level and throws it away (``scalp=1``); it is not made here. A transposed
convolution of 2x2 with stride 2 is a product and a shuffle. The 1x1 convolution after it has no
non-linearity before it, so both are multiplied into one matrix, in float32, when the weights are loaded.
"""

from __future__ import annotations

from typing import Any

import ttnn
from torch import Tensor

from sam3_ray.backends.blackhole.modules import Scope, as_row
from sam3_ray.backends.blackhole.parts.layers import Convolution3x3, consumed, linear
from sam3_ray.backends.blackhole.placement import Placement
from sam3_ray.config import Sam3Config


class Upsample:
    """A transposed convolution, 2x2 with stride 2, and what follows it in the same product.

    Args:
        place: where it runs.
        scope: of the level's layers.
        layer: name of the transposed convolution.
        inputs, outputs: its channels.
        size: side of its input.
        then: name and channels of a 1x1 convolution that is multiplied into it.
        activation: ``gelu``, of its output.
        memory: where the shuffled result goes.
    """

    def __init__(
        self,
        place: Placement,
        scope: Scope,
        layer: str,
        inputs: int,
        outputs: int,
        size: int,
        *,
        then: tuple[str, int] | None = None,
        activation: str | None = None,
        memory: Any = ttnn.L1_MEMORY_CONFIG,
    ) -> None:
        self._place, self._size, self._activation = place, size, activation
        self._memory = memory
        self.channels = outputs if then is None else then[1]
        sources: dict[str, tuple[int, ...]] = {
            f"{layer}.weight": (inputs, outputs, 2, 2),
            f"{layer}.bias": (outputs,),
        }
        if then is not None:
            sources |= {
                f"{then[0]}.weight": (then[1], outputs, 1, 1),
                f"{then[0]}.bias": (then[1],),
            }
        self._weight = scope.parameter(
            sources,
            lambda *tensors: upsample_weight(*tensors)[0],
            dtype=place.weights_dtype,
            name=f"{layer}.product",
        )
        self._bias = scope.parameter(
            sources,
            lambda *tensors: as_row(upsample_weight(*tensors)[1]),
            dtype=ttnn.bfloat16,
            name=f"{layer}.product_bias",
        )

    def __call__(self, x: Any) -> Any:
        """(1, 1, size * size, inputs) -> (1, 1, 4 * size * size, channels), in reading order."""
        quarters = linear(
            self._place,
            x,
            self._weight.value,
            self._bias.value,
            activation=self._activation,
            memory=self._memory,
        )
        return self._shuffle(quarters)

    def _shuffle(self, quarters: Any) -> Any:
        """Columns are (row of the 2x2, column, channel): move the first between the image's rows."""
        size, channels = self._size, self.channels
        rows = consumed(
            quarters,
            ttnn.to_layout(quarters, ttnn.ROW_MAJOR_LAYOUT, memory_config=self._memory),
        )
        rows = consumed(rows, ttnn.reshape(rows, (size, size, 2, 2 * channels)))
        rows = consumed(rows, ttnn.permute(rows, (0, 2, 1, 3), memory_config=self._memory))
        rows = consumed(rows, ttnn.reshape(rows, (1, 1, 4 * size * size, channels)))
        return consumed(rows, ttnn.to_layout(rows, ttnn.TILE_LAYOUT, memory_config=self._memory))


class Projection:
    """A 1x1 convolution."""

    def __init__(self, place: Placement, scope: Scope, inputs: int, outputs: int) -> None:
        self._place = place
        self._weight = scope.parameter(
            {"weight": (outputs, inputs, 1, 1)},
            lambda weight: weight[:, :, 0, 0].t(),
            dtype=place.weights_dtype,
        )
        self._bias = scope.parameter({"bias": (outputs,)}, as_row, dtype=ttnn.bfloat16)

    def __call__(self, x: Any) -> Any:
        return linear(self._place, x, self._weight.value, self._bias.value)


class Neck:
    """Features of the backbone -> three levels, fine to coarse, in reading order.

    Args:
        place: where it runs.
        scope: of upstream's ``vision_backbone``.
        config: the model's dimensions.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        self._config = config
        width, model, grid = config.vit_width, config.model_width, config.grid
        finest, middle, coarsest = (scope / "convs" / level for level in range(3))
        self._finest = [
            Upsample(place, finest, "dconv_2x2_0", width, width // 2, grid, activation="gelu"),
            # 85 MB go through the shuffle here: more than the cores hold beside each other.
            Upsample(
                place,
                finest,
                "dconv_2x2_1",
                width // 2,
                width // 4,
                2 * grid,
                then=("conv_1x1", model),
                memory=ttnn.DRAM_MEMORY_CONFIG,
            ),
            Convolution3x3(place, finest / "conv_3x3", model, 4 * grid),
        ]
        self._middle = [
            Upsample(place, middle, "dconv_2x2", width, width // 2, grid, then=("conv_1x1", model)),
            Convolution3x3(place, middle / "conv_3x3", model, 2 * grid),
        ]
        self._coarsest = [
            Projection(place, coarsest / "conv_1x1", width, model),
            Convolution3x3(place, coarsest / "conv_3x3", model, grid),
        ]

    def __call__(self, x: Any) -> list[Any]:
        """(1, 1, tokens, width) in window order -> three (1, 1, h * w, model_width); ``x`` is consumed."""
        x = consumed(x, reading_order(x, self._config))
        levels = [self._level(layers, x) for layers in (self._finest, self._middle, self._coarsest)]
        ttnn.deallocate(x)
        return levels

    @staticmethod
    def _level(layers: list[Any], x: Any) -> Any:
        for i, layer in enumerate(layers):
            output = layer(x)
            if i and x.is_allocated():
                ttnn.deallocate(x)
            x = output
        return x


def reading_order(x: Any, config: Sam3Config) -> Any:
    """(1, 1, tokens, width) in window order -> in rows and columns of the image."""
    window, windows = config.window_size, config.grid // config.window_size
    _, _, tokens, width = x.shape
    memory = ttnn.L1_MEMORY_CONFIG
    rows = ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT, memory_config=memory)
    # A row of a window stays together: (window row, window column, row in it, its tokens).
    rows = consumed(rows, ttnn.reshape(rows, (windows, windows, window, window * width)))
    rows = consumed(rows, ttnn.permute(rows, (0, 2, 1, 3), memory_config=memory))
    rows = consumed(rows, ttnn.reshape(rows, (1, 1, tokens, width)))
    # Three levels read it; it waits in DRAM, so that the convolutions have the cores' memory.
    return consumed(
        rows, ttnn.to_layout(rows, ttnn.TILE_LAYOUT, memory_config=ttnn.DRAM_MEMORY_CONFIG)
    )


def upsample_weight(
    weight: Tensor, bias: Tensor, then_weight: Tensor | None = None, then_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A transposed 2x2 convolution as one matrix, with a 1x1 convolution after it multiplied in.

    Args:
        weight: (in, out, 2, 2); ``bias`` (out,).
        then_weight: (then, out, 1, 1); ``then_bias`` (then,).

    Returns:
        (in, 4 * channels) and (4 * channels,): columns ordered (row, column, channel).
    """
    product = weight.permute(0, 2, 3, 1)  # (in, row, column, out)
    if then_weight is not None and then_bias is not None:
        matrix = then_weight[:, :, 0, 0]
        product = product @ matrix.t()
        bias = matrix @ bias + then_bias
    return product.reshape(weight.shape[0], -1), bias.repeat(4)
