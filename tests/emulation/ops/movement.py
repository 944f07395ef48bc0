"""Operations that move or convert data without arithmetic.

What an output's padding lanes hold is not modelled: no value of the emulation depends on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from tests.emulation.errors import EmulationError
from tests.emulation.ops.registry import value_of

# The memory gives the value the output's shape and data type.
_UNCHANGED = (
    "ttnn.assign",
    "ttnn.clone",
    "ttnn.copy",
    "ttnn.fill_implicit_tile_padding",
    "ttnn.interleaved_to_sharded",
    "ttnn.move",
    "ttnn.reallocate",
    "ttnn.reshape",
    "ttnn.reshard",
    "ttnn.sharded_to_interleaved",
    "ttnn.squeeze",
    "ttnn.tilize",
    "ttnn.tilize_with_zero_padding",
    "ttnn.to_layout",
    "ttnn.to_memory_config",
    "ttnn.unsqueeze",
    "ttnn.unsqueeze_to_4D",
    "ttnn.untilize",
    "ttnn.view",
)
_SOURCES = ("input_tensor", "tensor", "input", "input_a")


@value_of(*_UNCHANGED)
def unchanged(*arguments: Any, **keywords: Any) -> Any:
    if arguments:
        return arguments[0]
    return next(keywords[name] for name in _SOURCES if name in keywords)


@value_of("ttnn.typecast")
def typecast(input_tensor: torch.Tensor, *types: Any, **keywords: Any) -> torch.Tensor:
    target: Any = types[-1] if types else keywords.get("output_dtype", keywords.get("dtype"))
    if input_tensor.is_floating_point() and "int" in target.name.lower():
        return input_tensor.float().trunc().to(torch.int64)
    return input_tensor


@value_of("ttnn.permute")
def permute(input_tensor: torch.Tensor, dims: Sequence[int], *_more: Any, **_: Any) -> torch.Tensor:
    return input_tensor.permute(*dims)


@value_of("ttnn.transpose")
def transpose(
    input_tensor: torch.Tensor, dim1: int, dim2: int, *_more: Any, **_: Any
) -> torch.Tensor:
    return input_tensor.transpose(dim1, dim2)


@value_of("ttnn.slice")
def slice_(input_tensor: torch.Tensor, *bounds: Sequence[int], **keywords: Any) -> torch.Tensor:
    given = list(bounds)
    for names in (("slice_start", "starts"), ("slice_end", "ends"), ("slice_step", "steps")):
        given += [keywords[name] for name in names if keywords.get(name) is not None]
    starts, ends = given[0], given[1]
    if isinstance(starts, torch.Tensor) or isinstance(ends, torch.Tensor):
        raise EmulationError("ttnn.slice: the emulation has no value for bounds in tensors")
    steps = given[2] if len(given) > 2 and given[2] is not None else [1] * len(starts)
    return input_tensor[tuple(slice(*bound) for bound in zip(starts, ends, steps, strict=True))]


@value_of("ttnn.concat")
def concat(tensors: Sequence[torch.Tensor], dim: int = 0, **_: Any) -> torch.Tensor:
    return torch.cat(list(tensors), dim)


@value_of("ttnn.stack")
def stack(input_tensors: Sequence[torch.Tensor], dim: int, **_: Any) -> torch.Tensor:
    return torch.stack(list(input_tensors), dim)


@value_of("ttnn.split")
def split(
    input_tensor: torch.Tensor, split_size: int | Sequence[int], dim: int = 0, **_: Any
) -> list[torch.Tensor]:
    size = split_size if isinstance(split_size, int) else list(split_size)
    return list(torch.split(input_tensor, size, dim))


@value_of("ttnn.chunk")
def chunk(input_tensor: torch.Tensor, chunks: int, dim: int = 0, **_: Any) -> list[torch.Tensor]:
    return list(input_tensor.chunk(chunks, dim))


@value_of("ttnn.pad")
def pad(input_tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
    names = ("padding", "output_padded_shape", "input_tensor_start", "value")
    given = list(arguments) + [keywords[name] for name in names if name in keywords]
    value = given[-1]
    if len(given) == 3:
        shape, starts = given[0], given[1]
        pairs = [
            (start, size - start - old)
            for size, start, old in zip(shape, starts, input_tensor.shape, strict=True)
        ]
    else:
        pairs = [(first, last) for first, last in given[0]]
    flat = list(itertools.chain.from_iterable(reversed(pairs)))
    return functional.pad(input_tensor, flat, value=value)


@value_of("ttnn.expand")
def expand(input_tensor: torch.Tensor, output_shape: Sequence[int], **_: Any) -> torch.Tensor:
    return input_tensor.expand(*output_shape)


@value_of("ttnn.repeat")
def repeat(input_tensor: torch.Tensor, repeat_dims: Sequence[int], **_: Any) -> torch.Tensor:
    return input_tensor.repeat(*repeat_dims)


@value_of("ttnn.repeat_interleave")
def repeat_interleave(input_tensor: torch.Tensor, repeats: int, dim: int, **_: Any) -> torch.Tensor:
    return input_tensor.repeat_interleave(repeats, dim)


@value_of("ttnn.embedding")
def embedding(input_tensor: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
    return functional.embedding(input_tensor.long(), weight.reshape(-1, weight.shape[-1]))


@value_of("ttnn.gather")
def gather(input: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.gather(input, dim, index.long())


@value_of("ttnn.topk")
def topk(
    input_tensor: torch.Tensor,
    k: int = 32,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    **_: Any,
) -> list[torch.Tensor]:
    """Equal values in the order of their places; the chip promises no order."""
    order = torch.sort(input_tensor.float(), dim=dim, descending=largest, stable=True).indices
    order = order.narrow(dim, 0, k)
    return [torch.gather(input_tensor, dim, order), order]


@value_of("ttnn.upsample")
def upsample(
    input_tensor: torch.Tensor, scale_factor: Any, *, mode: str = "nearest", **_: Any
) -> torch.Tensor:
    """(N, H, W, C) enlarged; bilinear as torch's with align_corners=False."""
    factors = (
        scale_factor if isinstance(scale_factor, (list, tuple)) else (scale_factor, scale_factor)
    )
    image = input_tensor.float().permute(0, 3, 1, 2)
    options = {} if mode == "nearest" else {"align_corners": False}
    image = functional.interpolate(
        image, scale_factor=tuple(float(factor) for factor in factors), mode=mode, **options
    )
    return image.permute(0, 2, 3, 1)
