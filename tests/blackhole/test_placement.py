"""Program configurations: whatever the grid, all of a product is computed, by blocks that fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam3_ray.backends.blackhole.precision import ACCURATE, FAST, Precision

GRIDS = st.sampled_from([(11, 10), (12, 10), (13, 10), (8, 8), (4, 3), (1, 1)])
WIDTHS = st.integers(1, 160).map(lambda tiles: 32 * tiles) | st.integers(1, 5000)


def placement(grid: tuple[int, int], precision: Precision) -> Any:
    """A placement on a device of which only the grid is real."""
    from sam3_ray.backends.blackhole.placement import Placement

    size = SimpleNamespace(x=grid[0], y=grid[1])
    return Placement(SimpleNamespace(compute_with_storage_grid_size=lambda: size), precision)


@settings(deadline=None, max_examples=150)
@given(
    grid=GRIDS,
    precision=st.sampled_from([ACCURATE, FAST]),
    rows=st.integers(1, 6000),
    inner=WIDTHS,
    columns=WIDTHS,
)
def test_a_product_is_covered_by_blocks_that_fit(
    emulator: Any, grid: tuple[int, int], precision: Precision, rows: int, inner: int, columns: int
) -> None:
    from sam3_ray.backends.blackhole.placement import CIRCULAR_BUFFER_BYTES

    place = placement(grid, precision)
    config = place.matmul_config(rows, inner, columns)
    m, k, n = (-(-size // 32) for size in (rows, inner, columns))
    used = config.compute_with_storage_grid_size
    if type(config).__name__.endswith("1DProgramConfig"):
        cores = used.x * used.y
        of_rows, of_columns = (1, cores) if config.mcast_in0 else (cores, 1)
        assert config.per_core_M * of_rows >= m
        assert config.per_core_N * of_columns >= n
    else:
        assert config.per_core_M * used.y >= m
        assert config.per_core_N * used.x >= n
    assert (used.x, used.y) == grid
    assert k % config.in0_block_w == 0
    assert config.per_core_M % config.out_block_h == 0
    assert config.per_core_N % config.out_block_w == 0
    assert config.out_block_h % config.out_subblock_h == 0
    assert config.out_block_w % config.out_subblock_w == 0
    # The destination registers hold 8 tiles of 16 bits, 4 of 32 (tt-metal).
    registers = 4 if precision.wide_accumulation else 8
    assert config.out_subblock_h * config.out_subblock_w <= registers
    weight_tile = 2048 if precision is ACCURATE else 1088
    doubled = (
        2 * config.in0_block_w * (config.out_block_h * 2048 + config.out_block_w * weight_tile)
    )
    assert doubled + config.out_block_h * config.out_block_w * 2048 <= CIRCULAR_BUFFER_BYTES


@pytest.mark.parametrize("precision", [ACCURATE, FAST], ids=lambda p: p.name)
@pytest.mark.parametrize("tokens", [576, 5184, 64, 256, 1, 33, 608])
def test_attention_chunks_divide_the_tokens(
    emulator: Any, precision: Precision, tokens: int
) -> None:
    config = placement((11, 10), precision).attention_config(8, tokens, tokens)
    padded = -(-tokens // 32) * 32
    assert padded % config.q_chunk_size == padded % config.k_chunk_size == 0
    assert config.q_chunk_size % 32 == 0
    assert config.k_chunk_size <= 288


@pytest.mark.parametrize(
    ("heads", "queries", "chunk"),
    [
        (8, 224, 32),  # 8 chunks of all leave 112 cores idle, 56 of a tile do not
        (16, 5184, 192),  # 432 of 192 in 4 rounds (768 rows), 288 of 288 in 3 (864)
        (8, 5184, 192),
        (32, 5184, 288),  # 576 in 5 rounds (1440 rows), 864 of 192 in 8 (1536)
    ],
)
def test_chunks_of_queries_keep_the_cores_busy(
    emulator: Any, heads: int, queries: int, chunk: int
) -> None:
    assert placement((12, 10), FAST).attention_config(heads, queries, 5184).q_chunk_size == chunk


def test_many_rows_of_few_columns_go_over_all_cores(emulator: Any) -> None:
    """Two columns of tiles would leave ten of twelve columns of cores idle."""
    config = placement((12, 10), FAST).matmul_config(86016, 512, 16)
    assert not config.mcast_in0
    assert config.per_core_M == 23  # 2688 tiles over 120 cores
