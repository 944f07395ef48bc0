"""Group normalisation of an image."""

from __future__ import annotations

from typing import Any

import ttnn
from torch import Tensor
from ttnn.operations.normalization import dram_group_norm_virtual_columns

from sam3_ray.backends.blackhole.modules import Scope
from sam3_ray.backends.blackhole.placement import TILE, Placement

GROUPS = 8
"""``nn.GroupNorm(8, ...)`` of upstream's ``PixelDecoder``."""

EPSILON = 1e-5
"""torch's default."""

BLOCK_TILES = 24
"""Rows of tiles that a core takes at a time: with half as many more the buffers and a full-size image do
not fit in L1 together (measured on the mock, 11x10)."""


class GroupNorm:
    """Over groups of channels and all pixels of a square image.

    Args:
        place: where it runs.
        scope: of ``weight`` and ``bias`` (channels,).
        channels: of the image.
        size: of its side.
    """

    def __init__(self, place: Placement, scope: Scope, channels: int, size: int) -> None:
        self._place = place
        self._grid = ttnn.determine_expected_group_norm_dram_grid_size(
            device=place.device,
            num_channels=channels,
            num_groups=GROUPS,
            input_nhw=size * size,
        )
        rows = -(-size * size // TILE // self._grid.y)
        self._blocks = -(-rows // BLOCK_TILES)
        columns = dram_group_norm_virtual_columns(self._grid, channels, GROUPS)

        def spread(values: Tensor) -> Tensor:
            spread_out: Tensor = ttnn.create_group_norm_weight_bias_rm(values, channels, columns)
            return spread_out

        row_major = ttnn.ROW_MAJOR_LAYOUT
        self._weight, self._bias = (
            scope.parameter({name: (channels,)}, spread, dtype=ttnn.bfloat16, layout=row_major)
            for name in ("weight", "bias")
        )
        mask = ttnn.create_group_norm_input_mask(channels, GROUPS, columns, ttnn.DataType.BFLOAT8_B)
        self._mask = ttnn.to_device(mask, place.device)

    def __call__(self, x: Any) -> Any:
        """(1, 1, size * size, channels) in L1 -> the same; ``x`` is consumed."""
        normed = ttnn.group_norm(
            x,
            num_groups=GROUPS,
            epsilon=EPSILON,
            input_mask=self._mask,
            weight=self._weight.value,
            bias=self._bias.value,
            memory_config=ttnn.L1_MEMORY_CONFIG,
            compute_kernel_config=self._place.exact_compute_config,
            core_grid=self._grid,
            inplace=False,
            num_out_blocks=self._blocks,
        )
        ttnn.deallocate(x)
        return normed
