"""Where a part's work goes: the device, its grid of cores, and the program configurations for them.

Nothing assumes a grid: a p150 has 11x10 cores with the stock dispatch and 12x10 with ETH dispatch, and
every configuration is computed from what the device reports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import ttnn

from sam3_ray.backends.blackhole.precision import FidelityName, Precision

TILE = 32
"""Side of a tile, the unit of all matrix work (tt-metal)."""

CIRCULAR_BUFFER_BYTES = 640 * 1024
"""What a matrix multiplication may take of a core's L1 for its blocks. Of 1,395,584 bytes that the allocator
has on a p150 (less the 64 KiB for convolutions), the widest point of a full-size block, between the
split into heads and the rotation, holds 684,032 in activations (measured on the mock, 11x10)."""

L1_TENSOR_BYTES = 50 * 1024 * 1024
"""Largest activation that stays in L1: the hidden layer of a full-size block has 49.1 MB."""

ATTENTION_CHUNK = 288
"""Longest chunk of queries and keys: it divides a window (576) and the image (5184), and others measured
the default of 32 up to 3.75 times slower on a p150 (docs/blackhole.md, "What others measured"). Queries
take a shorter one where that leaves the busiest core less to do."""

WIDE_ATTENTION_CHUNK = 192
"""The same with sums in float32: with 288 the buffers, 908,416 bytes, do not fit beside a block's heads."""

_TILE_BYTES = {ttnn.bfloat16: 2048, ttnn.float32: 4096, ttnn.bfloat8_b: 1088}


def whole_tiles(elements: int) -> int:
    """Elements, rounded up to whole tiles."""
    return TILE * _tiles(elements)


@dataclass(frozen=True)
class Placement:
    """A device and a precision, and what follows from them.

    Attributes:
        device: an open ttnn device.
        precision: of its arithmetic.
    """

    device: Any
    precision: Precision

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Columns and rows of cores."""
        size = self.device.compute_with_storage_grid_size()
        return size.x, size.y

    @cached_property
    def weights_dtype(self) -> Any:
        return getattr(ttnn, self.precision.weights)

    @cached_property
    def compute_config(self) -> Any:
        """For matrix multiplications, convolutions and norms."""
        return self._compute_config(self.precision.fidelity, self.precision.wide_accumulation)

    @cached_property
    def attention_compute_config(self) -> Any:
        return self._compute_config(
            self.precision.attention_fidelity, self.precision.wide_accumulation
        )

    @cached_property
    def exact(self) -> Placement:
        """The same device for products in float32."""
        precision = replace(
            self.precision, weights="float32", fidelity="HiFi4", wide_accumulation=True
        )
        return Placement(self.device, precision)

    @cached_property
    def exact_compute_config(self) -> Any:
        """For what is cheap and must not lose bits: norms, rotations."""
        return self.exact.compute_config

    def matmul_config(
        self,
        rows: int,
        inner: int,
        columns: int,
        *,
        activation: Any = None,
        buffers: int = CIRCULAR_BUFFER_BYTES,
    ) -> Any:
        """How (rows, inner) x (inner, columns) spreads over the grid.

        Rows of blocks go to rows of cores and columns to columns, each core multicasting what it reads. A
        product of few rows goes by columns over all cores instead; one of many rows and few columns by rows,
        where that halves the busiest core's share.

        Args:
            rows, inner, columns: of the operands, in elements.
            activation: a ``ttnn.UnaryWithParam`` applied to the result.
            buffers: bytes that the blocks may take of a core's L1.
        """
        row_tiles, inner_tiles, column_tiles = (_tiles(n) for n in (rows, inner, columns))
        if row_tiles < self.grid[1]:
            share = _ceil_div(column_tiles, self.grid[0] * self.grid[1])
            block = self._block(row_tiles, share, inner_tiles, buffers)
            return self._over_all(row_tiles, share, block, activation, by_columns=True)
        core_rows = _ceil_div(row_tiles, self.grid[1])
        core_columns = _ceil_div(column_tiles, self.grid[0])
        share = _ceil_div(row_tiles, self.grid[0] * self.grid[1])
        if 2 * share * column_tiles <= core_rows * core_columns:
            block = self._block(share, column_tiles, inner_tiles, buffers)
            return self._over_all(share, column_tiles, block, activation, by_columns=False)
        block = self._block(core_rows, core_columns, inner_tiles, buffers)
        return ttnn.MatmulMultiCoreReuseMultiCastProgramConfig(
            compute_with_storage_grid_size=self.grid,
            in0_block_w=block.inner,
            out_subblock_h=block.subblock_rows,
            out_subblock_w=block.subblock_columns,
            out_block_h=block.rows,
            out_block_w=block.columns,
            per_core_M=core_rows,
            per_core_N=core_columns,
            transpose_mcast=False,
            fused_activation=activation,
            fuse_batch=True,
        )

    @staticmethod
    def memory_for(*shape: int, most: int = L1_TENSOR_BYTES) -> Any:
        """Where a bfloat16 activation of this shape goes: L1 unless it has more than ``most`` bytes."""
        fits = 2 * math.prod(shape) <= most
        return ttnn.L1_MEMORY_CONFIG if fits else ttnn.DRAM_MEMORY_CONFIG

    def attention_config(self, heads: int, queries: int, keys: int) -> Any:
        """Chunks of queries and keys for ``scaled_dot_product_attention``.

        A core takes whole chunks of queries of one head: the chunk is the longest with which the busiest core
        has at most a fifth more queries than with the best.

        Args:
            heads: of all of the batch; queries, keys: of one.
        """
        longest = WIDE_ATTENTION_CHUNK if self.precision.wide_accumulation else ATTENTION_CHUNK

        def busiest(chunk: int) -> int:
            chunks = heads * _ceil_div(whole_tiles(queries), chunk)
            return chunk * _ceil_div(chunks, self.grid[0] * self.grid[1])

        chunks = _chunks(queries, longest)
        most = 1.2 * min(busiest(chunk) for chunk in chunks)
        return ttnn.SDPAProgramConfig(
            compute_with_storage_grid_size=self.grid,
            q_chunk_size=max(chunk for chunk in chunks if busiest(chunk) <= most),
            k_chunk_size=max(_chunks(keys, longest)),
            exp_approx_mode=False,
        )

    def _compute_config(self, fidelity: FidelityName, wide_accumulation: bool) -> Any:
        return ttnn.init_device_compute_kernel_config(
            self.device.arch(),
            math_fidelity=getattr(ttnn.MathFidelity, fidelity),
            math_approx_mode=False,
            fp32_dest_acc_en=wide_accumulation,
            packer_l1_acc=True,
        )

    def _over_all(
        self,
        core_rows: int,
        core_columns: int,
        block: _Block,
        activation: Any,
        *,
        by_columns: bool,
    ) -> Any:
        """All cores in one row, each with its share of one operand; the other one goes to all of them."""
        return ttnn.MatmulMultiCoreReuseMultiCast1DProgramConfig(
            compute_with_storage_grid_size=self.grid,
            in0_block_w=block.inner,
            out_subblock_h=block.subblock_rows,
            out_subblock_w=block.subblock_columns,
            out_block_h=block.rows,
            out_block_w=block.columns,
            per_core_M=core_rows,
            per_core_N=core_columns,
            fuse_batch=True,
            fused_activation=activation,
            mcast_in0=by_columns,
        )

    def _block(self, core_rows: int, core_columns: int, inner_tiles: int, buffers: int) -> _Block:
        """The block of a core's share that does most work a pass, of those whose circular buffers fit.

        More than four inner tiles save few passes over the partial sums, larger outputs always save reads.
        """
        fitting = [
            (rows, columns, inner)
            for inner in _divisors(inner_tiles, at_most=8)
            for rows in _divisors(core_rows)
            for columns in _divisors(core_columns)
            if self._buffer_bytes(rows, columns, inner) <= buffers
        ]  # one tile of each always fits
        rows, columns, inner = max(
            fitting, key=lambda block: (block[0] * block[1] * min(block[2], 4), block[2])
        )
        return self._with_subblock(rows, columns, inner)

    def _buffer_bytes(self, rows: int, columns: int, inner: int) -> int:
        """Both operands' blocks twice (one is read while the other is used), the output, partial sums."""
        exact = self.weights_dtype == ttnn.float32
        activations = _TILE_BYTES[ttnn.float32 if exact else ttnn.bfloat16]
        partial = 4096 if self.precision.wide_accumulation else 0
        return (
            2 * rows * inner * activations
            + 2 * inner * columns * _TILE_BYTES[self.weights_dtype]
            + rows * columns * (activations + partial)
            + columns * activations
        )

    def _with_subblock(self, rows: int, columns: int, inner: int) -> _Block:
        """The subblock that fills the destination registers best: 8 tiles, 4 in float32."""
        registers = 4 if self.precision.wide_accumulation else 8
        shapes = [
            (h, w)
            for h in _divisors(rows, at_most=registers)
            for w in _divisors(columns, at_most=registers)
            if h * w <= registers
        ]
        h, w = max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
        return _Block(rows, columns, inner, h, w)


@dataclass(frozen=True)
class _Block:
    """In tiles."""

    rows: int
    columns: int
    inner: int
    subblock_rows: int
    subblock_columns: int


def _chunks(tokens: int, longest: int) -> list[int]:
    """The multiples of a tile, up to ``longest``, that divide ``tokens`` padded to tiles."""
    return [TILE * tiles for tiles in _divisors(_tiles(tokens), at_most=longest // TILE)]


def _tiles(elements: int) -> int:
    return _ceil_div(elements, TILE)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _divisors(n: int, *, at_most: int | None = None) -> list[int]:
    return [d for d in range(1, min(n, at_most or n) + 1) if n % d == 0]
