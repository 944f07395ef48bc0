"""A 3x3 convolution of an image doubled with nearest neighbours, without doubling it.

A pixel (2 i + a, 2 j + b) of the doubled image has at most 2x2 different neighbours: for a phase (a, b) the
convolution is one of 2x2 of the small image, whose weights are sums of the nine. Four phases multiply 16
times for what the doubled image multiplies 36, and that image is never made. The result is in phase order,
(a, b, i, j); what comes after it and sees single pixels only does not mind.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import ttnn
from torch import Tensor

from sam3_ray.backends.blackhole.modules import Scope
from sam3_ray.backends.blackhole.placement import Placement

PHASES = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Row and column of a pixel within the four that were one."""

BLOCK_ROWS = 64
"""Pixels that a core multiplies at a time: with ttnn's own choice the buffers of ``accurate`` leave no room
for the phases that are done (measured on the mock)."""


def phase_weight(weight: Tensor, row: int, column: int) -> Tensor:
    """(out, in, 3, 3) -> (out, in, 2, 2): those taps added that fall on the same pixel of the small image."""

    def folded(taps: Tensor, phase: int, dim: int) -> Tensor:
        first, second, third = taps.unbind(dim)
        pair = (first + second, third) if phase else (first, second + third)
        return torch.stack(pair, dim)

    return folded(folded(weight, row, 2), column, 3)


def in_phases(x: Any, size: int) -> list[Any]:
    """(1, 1, 4 * size * size, channels) in reading order -> phases, (1, 1, size * size, channels) each.

    ``x`` is consumed; the phases are in DRAM.
    """
    channels = x.shape[3]
    rows = ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT, memory_config=ttnn.L1_MEMORY_CONFIG)
    ttnn.deallocate(x)
    image = ttnn.reshape(rows, (size, 2, size, 2 * channels))
    phases = []
    for row, column in PHASES:
        phase = ttnn.slice(
            image,
            [0, row, 0, column * channels],
            [size, row + 1, size, (column + 1) * channels],
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        flat = ttnn.reshape(phase, (1, 1, size * size, channels))
        phases.append(ttnn.to_layout(flat, ttnn.TILE_LAYOUT, memory_config=ttnn.DRAM_MEMORY_CONFIG))
        ttnn.deallocate(flat)
    ttnn.deallocate(image)
    return phases


def in_reading_order(x: Any, size: int) -> Any:
    """(1, 1, 4 * size * size, channels) in phase order -> in reading order, row-major; ``x`` is consumed."""
    channels = x.shape[3]
    rows = ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT, memory_config=ttnn.L1_MEMORY_CONFIG)
    ttnn.deallocate(x)
    phases = ttnn.reshape(rows, (2, 2, size, size, channels))
    image = ttnn.permute(phases, (2, 0, 3, 1, 4), memory_config=ttnn.L1_MEMORY_CONFIG)
    ttnn.deallocate(phases)
    return ttnn.reshape(image, (1, 1, 4 * size * size, channels))


class DoubledConvolution:
    """Of an image; without the bias, which the image's own term has.

    Args:
        place: where it runs.
        scope: of ``weight`` (channels, channels, 3, 3).
        channels: in and out.
        size: side of the small image.
    """

    def __init__(self, place: Placement, scope: Scope, channels: int, size: int) -> None:
        self._place, self._channels, self._size = place, channels, size
        self._host_weights = [
            scope.parameter(
                {"weight": (channels, channels, 3, 3)},
                partial(phase_weight, row=row, column=column),
                dtype=ttnn.float32,
                layout=ttnn.ROW_MAJOR_LAYOUT,
                name=f"phase_{row}_{column}",
                on_host=True,
            )
            for row, column in PHASES
        ]
        self._prepared: list[Any] = [None] * len(PHASES)

    def __call__(self, x: Any, terms: list[Any]) -> Any:
        """Convolve, and add a term to each phase.

        The first call prepares the weights on the device: it must not be inside a trace capture.

        Args:
            x: (1, 1, size * size, channels) row-major; consumed.
            terms: (1, 1, size * size, channels) for each phase.

        Returns:
            (1, 1, 4 * size * size, channels) in phase order.
        """
        sums = []
        for phase, term in enumerate(terms):
            convolved = self._convolve(x, phase)
            sums.append(ttnn.add(convolved, term, memory_config=ttnn.L1_MEMORY_CONFIG))
            ttnn.deallocate(convolved)
        ttnn.deallocate(x)
        whole = ttnn.concat(sums, dim=2, memory_config=ttnn.L1_MEMORY_CONFIG)
        for one in sums:
            ttnn.deallocate(one)
        return whole

    def _convolve(self, x: Any, phase: int) -> Any:
        row, column = PHASES[phase]
        weight = self._prepared[phase] or self._host_weights[phase].value
        output, (self._prepared[phase], _) = ttnn.conv2d(
            input_tensor=x,
            weight_tensor=weight,
            bias_tensor=None,
            device=self._place.device,
            in_channels=self._channels,
            out_channels=self._channels,
            batch_size=1,
            input_height=self._size,
            input_width=self._size,
            kernel_size=(2, 2),
            stride=(1, 1),
            padding=(1 - row, row, 1 - column, column),
            dtype=ttnn.bfloat16,
            conv_config=ttnn.Conv2dConfig(
                weights_dtype=self._place.weights_dtype,
                act_block_h_override=BLOCK_ROWS,
                config_tensors_in_dram=True,
            ),
            compute_config=self._place.compute_config,
            slice_config=ttnn.Conv2dL1FullSliceConfig,
            return_weights_and_bias=True,
        )
        return output
