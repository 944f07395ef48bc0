"""Operations that only move data: the bits must be the very same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from tests.emulation.samples import assert_rounds_to, down, random, up

X = (1, 3, 40, 70)
MOVES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "reshape": (lambda t, x: t.reshape(x, (1, 1, 120, 70)), lambda x: x.reshape(1, 1, 120, 70)),
    "reshape in the rows": (
        lambda t, x: t.reshape(x, (3, 1, 70, 40)),
        lambda x: x.reshape(3, 1, 70, 40),
    ),
    "permute": (lambda t, x: t.permute(x, (0, 2, 1, 3)), lambda x: x.permute(0, 2, 1, 3)),
    "transpose": (lambda t, x: t.transpose(x, 2, 3), lambda x: x.transpose(2, 3)),
    "slice": (
        lambda t, x: t.slice(x, [0, 1, 0, 0], [1, 3, 32, 64]),
        lambda x: x[:, 1:3, :32, :64],
    ),
    "index": (lambda t, x: x[:, 1:2, 0:32, :], lambda x: x[:, 1:2, :32]),
    "concat": (lambda t, x: t.concat([x, x], dim=1), lambda x: torch.cat([x, x], 1)),
    "pad": (
        lambda t, x: t.pad(x, [(0, 0), (0, 1), (0, 24), (0, 26)], 3.0),
        lambda x: functional.pad(x, (0, 26, 0, 24, 0, 1), value=3.0),
    ),
    "to_layout": (lambda t, x: t.to_layout(x, t.ROW_MAJOR_LAYOUT), lambda x: x),
    "there and back": (
        lambda t, x: t.to_layout(t.to_layout(x, t.ROW_MAJOR_LAYOUT), t.TILE_LAYOUT),
        lambda x: x,
    ),
    "to_memory_config": (lambda t, x: t.to_memory_config(x, t.L1_MEMORY_CONFIG), lambda x: x),
    "clone": (lambda t, x: t.clone(x), lambda x: x),
    "repeat": (lambda t, x: t.repeat(x, (1, 2, 1, 1)), lambda x: x.repeat(1, 2, 1, 1)),
    "untilize": (lambda t, x: t.untilize(t.permute(x, (0, 1, 3, 2))), lambda x: x.transpose(2, 3)),
    "squeeze": (lambda t, x: t.squeeze(x, 0), lambda x: x.squeeze(0)),
    "unsqueeze": (lambda t, x: t.unsqueeze(t.squeeze(x, 0), 0), lambda x: x),
    "stack": (lambda t, x: t.stack([x, x], 0), lambda x: torch.stack([x, x], 0)),
    "expand": (
        lambda t, x: t.expand(x[:, 0:1, :, :], (1, 4, 40, 70)),
        lambda x: x[:, :1].expand(1, 4, 40, 70),
    ),
    "repeat_interleave": (
        lambda t, x: t.repeat_interleave(x, 2, 1),
        lambda x: x.repeat_interleave(2, 1),
    ),
    "reallocate": (lambda t, x: t.reallocate(t.neg(x)), lambda x: -x),
    "move": (lambda t, x: t.move(t.neg(x)), lambda x: -x),
    "assign": (lambda t, x: t.assign(x, memory_config=t.DRAM_MEMORY_CONFIG), lambda x: x),
    "view": (lambda t, x: t.view(x, (3, 1, 40, 70)), lambda x: x.reshape(3, 1, 40, 70)),
    "unsqueeze_to_4D": (lambda t, x: t.unsqueeze_to_4D(t.squeeze(x, 0)), lambda x: x),
    "fill_implicit_tile_padding": (lambda t, x: t.fill_implicit_tile_padding(x, 0.0), lambda x: x),
    "tilize_with_zero_padding": (
        lambda t, x: t.tilize_with_zero_padding(t.to_layout(x, t.ROW_MAJOR_LAYOUT)),
        lambda x: x,
    ),
    "tilize": (
        lambda t, x: t.tilize(t.to_layout(x[:, :, 0:32, 0:64], t.ROW_MAJOR_LAYOUT)),
        lambda x: x[:, :, :32, :64],
    ),
    "typecast": (lambda t, x: t.typecast(x, t.float32), lambda x: x),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves(chip: Any, name: str) -> None:
    import ttnn

    device, expected = MOVES[name]
    x = random(*X)
    result = down(device(ttnn, up(chip, x)))
    assert torch.equal(result, expected(x))


def test_split_and_chunk(chip: Any) -> None:
    import ttnn

    x = random(1, 1, 64, 96)
    for parts in (ttnn.split(up(chip, x), 32, 3), ttnn.chunk(up(chip, x), 3, 3)):
        for part, expected in zip(parts, x.split(32, 3), strict=True):
            assert torch.equal(down(part), expected)


def test_typecast_to_blocks_and_integers(chip: Any) -> None:
    import ttnn

    x = random(1, 1, 33, 45)
    packed = ttnn.from_torch(x, dtype=ttnn.bfloat8_b, layout=ttnn.TILE_LAYOUT).to_torch()
    assert torch.equal(down(ttnn.typecast(up(chip, x), ttnn.bfloat8_b)), packed.float())
    numbers = torch.randint(0, 200, (1, 1, 32, 64))
    tensor = up(chip, numbers, ttnn.uint8, ttnn.ROW_MAJOR_LAYOUT)
    assert torch.equal(down(ttnn.typecast(tensor, ttnn.bfloat16)), numbers.float())
    whole = ttnn.typecast(up(chip, torch.full((32, 32), 2.75)), ttnn.uint32)
    assert bool((ttnn.to_torch(whole) == 2).all())


def test_sharding_there_and_back(chip: Any) -> None:
    import ttnn

    x = random(1, 1, 128, 64)
    configs = [
        ttnn.create_sharded_memory_config(
            (1, 1, 128, 64), ttnn.CoreGrid(y=rows, x=1), ttnn.ShardStrategy.HEIGHT
        )
        for rows in (4, 2)
    ]
    sharded = ttnn.interleaved_to_sharded(up(chip, x), configs[0])
    moved = ttnn.reshard(sharded, configs[1])
    assert torch.equal(down(ttnn.sharded_to_interleaved(moved, ttnn.DRAM_MEMORY_CONFIG)), x)


def test_copy_into_a_given_tensor(chip: Any) -> None:
    import ttnn

    x, target = random(1, 1, 33, 45), up(chip, torch.zeros(1, 1, 33, 45))
    ttnn.copy(up(chip, x), target)
    assert torch.equal(down(target), x)


@pytest.mark.parametrize("width", [64, 70])
def test_embedding(chip: Any, width: int) -> None:
    import ttnn

    table, ids = random(50, width), torch.randint(0, 50, (1, 33))
    result = ttnn.embedding(
        up(chip, ids, ttnn.uint32, ttnn.ROW_MAJOR_LAYOUT),
        up(chip, table, layout=ttnn.ROW_MAJOR_LAYOUT),
    )
    assert torch.equal(down(result), table[ids])


def test_topk_and_gather(chip: Any) -> None:
    import ttnn

    x = (
        torch.randperm(128, generator=torch.Generator().manual_seed(0))
        .float()
        .reshape(1, 1, 1, 128)
    )
    x = x.repeat(1, 1, 32, 1)
    values, places = ttnn.topk(up(chip, x), k=32, dim=-1)
    expected = torch.topk(x, 32)
    assert torch.equal(down(values), expected.values)
    assert torch.equal(ttnn.to_torch(places).long(), expected.indices)
    assert torch.equal(down(ttnn.gather(up(chip, x), 3, places)), expected.values)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_upsample(chip: Any, mode: str) -> None:
    import ttnn

    x = random(1, 8, 6, 32)
    result = ttnn.upsample(up(chip, x, layout=ttnn.ROW_MAJOR_LAYOUT), 2, mode=mode)
    options = {} if mode == "nearest" else {"align_corners": False}
    expected = functional.interpolate(x.permute(0, 3, 1, 2), scale_factor=2, mode=mode, **options)
    assert_rounds_to(result, expected.permute(0, 2, 3, 1))
