"""Layers that several parts use: linear, layer norm, 3x3 convolution."""

from __future__ import annotations

import math
from typing import Any

import ttnn
from torch.nn.functional import pad

from sam3_ray.backends.blackhole.modules import Convert, Scope, as_row, transposed
from sam3_ray.backends.blackhole.placement import CIRCULAR_BUFFER_BYTES, TILE, Placement

LAYER_NORM_EPSILON = 1e-5
"""torch's default, which upstream's norms use but for the ViT's (1e-6)."""

STRIP_BYTES = 8 * 1024 * 1024
"""Largest output of one convolution. With 10.6 MB (20,736 pixels of 256 channels) the buffers of ``accurate``
leave no room for anything else in L1 (measured on the mock)."""


class Linear:
    """``x @ weight + bias``, and an activation in the same pass.

    Args:
        place: where it runs.
        scope: of ``weight`` (out, in) and ``bias`` (out,).
        inputs, outputs: widths.
        activation: ``gelu`` (exact) or ``relu``.
        pad_outputs: fill the outputs with zeros to whole tiles, for who adds them to something wider.
        exact: weights, products and output in float32, for the few that give coordinates.
    """

    def __init__(
        self,
        place: Placement,
        scope: Scope,
        inputs: int,
        outputs: int,
        *,
        activation: str | None = None,
        pad_outputs: bool = False,
        exact: bool = False,
    ) -> None:
        self._place, self._activation, self._exact = place, activation, exact
        more = -outputs % TILE if pad_outputs else 0
        self._weight = scope.parameter(
            {"weight": (outputs, inputs)},
            lambda weight: pad(transposed(weight), (0, more)),
            dtype=ttnn.float32 if exact else place.weights_dtype,
        )
        self._bias = scope.parameter(
            {"bias": (outputs,)},
            lambda bias: as_row(pad(bias, (0, more))),
            dtype=ttnn.float32 if exact else ttnn.bfloat16,
        )

    def __call__(
        self, x: Any, *, memory: Any = ttnn.L1_MEMORY_CONFIG, dtype: Any = ttnn.bfloat16
    ) -> Any:
        """(1, 1, n, inputs) -> (1, 1, n, outputs), of ``dtype`` unless ``exact``."""
        if self._exact:
            return exact_linear(
                self._place,
                x,
                self._weight.value,
                bias=self._bias.value,
                activation=self._activation,
            )
        return linear(
            self._place,
            x,
            self._weight.value,
            self._bias.value,
            activation=self._activation,
            memory=memory,
            dtype=dtype,
        )


def linear(
    place: Placement,
    x: Any,
    weight: Any,
    bias: Any,
    *,
    activation: str | None = None,
    memory: Any = ttnn.L1_MEMORY_CONFIG,
    dtype: Any = ttnn.bfloat16,
    buffers: int = CIRCULAR_BUFFER_BYTES,
) -> Any:
    """``x @ weight + bias`` over the whole grid, (1, 1, n, inputs) -> (1, 1, n, outputs)."""
    rows = math.prod(x.padded_shape[i] for i in range(3))  # each of a batch fills its own tiles
    return ttnn.linear(
        x,
        weight,
        bias=bias,
        program_config=place.matmul_config(
            rows,
            x.shape[3],
            weight.shape[-1],
            activation=_fused(activation),
            buffers=buffers,
        ),
        compute_kernel_config=place.compute_config,
        memory_config=memory,
        dtype=dtype,
    )


def exact_linear(
    place: Placement, x: Any, matrix: Any, *, bias: Any = None, activation: str | None = None
) -> Any:
    """The same in float32, for coordinates."""
    return linear(place.exact, x, matrix, bias, activation=activation, dtype=ttnn.float32)


class LayerNorm:
    """Over the last axis, computed in float32."""

    def __init__(
        self, place: Placement, scope: Scope, width: int, *, epsilon: float = LAYER_NORM_EPSILON
    ) -> None:
        self._place, self._epsilon = place, epsilon
        self._weight = scope.parameter({"weight": (width,)}, as_row, dtype=ttnn.bfloat16)
        self._bias = scope.parameter({"bias": (width,)}, as_row, dtype=ttnn.bfloat16)

    def __call__(self, x: Any, update: Any = None) -> Any:
        """Of ``x``, or of ``x + update`` in the same pass; both are left as they are."""
        return ttnn.layer_norm(
            x,
            residual_input_tensor=update,
            epsilon=self._epsilon,
            weight=self._weight.value,
            bias=self._bias.value,
            compute_kernel_config=self._place.exact_compute_config,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )


class Convolution3x3:
    """Stride 1, padded with zeros to the same size, in strips of rows that fit in L1.

    ttnn's own slicing of a large image through DRAM fails inside a trace ("Reads are not supported
    during trace capture", docs/blackhole.md), so the strips are cut here, each with the rows above and
    below it.
    """

    def __init__(self, place: Placement, scope: Scope, channels: int, size: int) -> None:
        self._place, self._channels, self._size = place, channels, size
        shape = (channels, channels, 3, 3)
        row_major = ttnn.ROW_MAJOR_LAYOUT
        self._host_weight = scope.parameter(
            {"weight": shape}, lambda w: w, dtype=ttnn.float32, layout=row_major, on_host=True
        )
        self._host_bias = scope.parameter(
            {"bias": (channels,)}, as_row, dtype=ttnn.float32, layout=row_major, on_host=True
        )
        self._prepared: tuple[Any, Any] | None = None

    @property
    def strips(self) -> int:
        """How many: the fewest of equal height whose outputs fit."""
        image_bytes = self._size * self._size * self._channels * 2
        fewest = -(-image_bytes // STRIP_BYTES)
        return next(n for n in range(fewest, self._size + 1) if self._size % n == 0)

    def __call__(self, x: Any) -> Any:
        """(1, 1, size * size, channels) -> the same shape; ``x`` is consumed.

        The first call prepares the weights on the device: it must not be inside a trace capture.
        """
        strips, rows = self.strips, self._size // self.strips
        if strips == 1:
            return self._convolve(x, 0, self._size)
        outputs = []
        for first in range(0, self._size, rows):
            outputs.append(self._convolve(self._cut(x, first, first + rows), first, first + rows))
        ttnn.deallocate(x)
        whole = ttnn.concat(outputs, dim=2, memory_config=ttnn.DRAM_MEMORY_CONFIG)
        for output in outputs:
            ttnn.deallocate(output)
        return whole

    def _cut(self, x: Any, first: int, end: int) -> Any:
        """Rows ``first`` to ``end`` and the neighbours on both sides that exist."""
        above, below = max(first - 1, 0), min(end + 1, self._size)
        return ttnn.slice(
            x,
            [0, 0, above * self._size, 0],
            [1, 1, below * self._size, self._channels],
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )

    def _convolve(self, x: Any, first: int, end: int) -> Any:
        """The output rows ``first`` to ``end``, interleaved in DRAM."""
        top, bottom = int(first == 0), int(end == self._size)
        weight, bias = self._prepared or (self._host_weight.value, self._host_bias.value)
        output, self._prepared = ttnn.conv2d(
            input_tensor=x,
            weight_tensor=weight,
            bias_tensor=bias,
            device=self._place.device,
            in_channels=self._channels,
            out_channels=self._channels,
            batch_size=1,
            input_height=end - first + 2 - top - bottom,
            input_width=self._size,
            kernel_size=(3, 3),
            stride=(1, 1),
            padding=(top, bottom, 1, 1),
            dtype=ttnn.bfloat16,
            conv_config=ttnn.Conv2dConfig(
                weights_dtype=self._place.weights_dtype,
                deallocate_activation=True,
                config_tensors_in_dram=True,
            ),
            compute_config=self._place.compute_config,
            slice_config=ttnn.Conv2dL1FullSliceConfig,
            return_weights_and_bias=True,
        )
        moved = ttnn.to_memory_config(output, ttnn.DRAM_MEMORY_CONFIG)
        ttnn.deallocate(output)
        if x.is_allocated():
            ttnn.deallocate(x)
        return moved


def part_of(start: int, end: int, convert: Convert) -> Convert:
    """A conversion of rows ``start`` to ``end``: torch keeps q, k and v in one tensor."""
    return lambda tensor: convert(tensor[start:end])


def _fused(activation: str | None) -> Any:
    if activation is None:
        return None
    if activation == "gelu":
        return ttnn.UnaryWithParam(ttnn.UnaryOpType.GELU, False)  # False: not the approximation
    return ttnn.UnaryWithParam(getattr(ttnn.UnaryOpType, activation.upper()))
