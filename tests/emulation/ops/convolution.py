"""Convolutions and pooling over (1, 1, N H W, C) or (N, H, W, C).

ttnn lays weights out for the matrix engine once, on the host or the device; the emulation keeps them in
PyTorch's shape and rounds them as the laid-out matrix (kernel rows x kernel columns x inputs, outputs)
would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from tests.emulation.errors import EmulationError
from tests.emulation.formats import cut_to_fidelity, round_to
from tests.emulation.memory import Prepared
from tests.emulation.ops.activations import activate
from tests.emulation.ops.registry import Arithmetic, Call, value_of

DEFAULT = Arithmetic("HiFi4", fp32_accumulate=False)
"""Seen in the generated kernel."""

Pair = int | Sequence[int]


def rounded_weight(weight: torch.Tensor, dtype: str) -> torch.Tensor:
    """Round (O, I, kh, kw) weights as the matrix they become: block formats share an exponent along O."""
    return round_to(weight.permute(2, 3, 1, 0), dtype).permute(3, 2, 0, 1)


def _pair(value: Pair) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = value
    return first, second


def _borders(padding: Pair) -> tuple[int, int, int, int]:
    """Top, bottom, left, right."""
    if isinstance(padding, int) or len(padding) == 2:
        high, wide = _pair(padding)
        return high, high, wide, wide
    top, bottom, left, right = padding
    return top, bottom, left, right


def _image(rows: torch.Tensor, batch: int, height: int, width: int, channels: int) -> torch.Tensor:
    """Rows of pixels -> (N, C, H, W), as stored."""
    return rows.reshape(batch, height, width, -1)[..., :channels].permute(0, 3, 1, 2)


def _rows(image: torch.Tensor) -> torch.Tensor:
    """(N, C, H, W) -> (1, 1, N H W, C)."""
    return image.permute(0, 2, 3, 1).reshape(1, 1, -1, image.shape[1])


def _convolved(
    name: str,
    convolve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    image: torch.Tensor,
    given: dict[str, Any],
    arithmetic: Arithmetic,
    call: Call,
) -> list[Any]:
    """The output, then the prepared weight and bias where the call returns them."""
    weight, bias, config = (
        given["weight_tensor"],
        given.get("bias_tensor"),
        given.get("conv_config"),
    )
    returned = call.output_dtypes[1:]
    kept = getattr(getattr(config, "weights_dtype", None), "name", "").lower() or (
        returned[0] if returned else None
    )
    if kept is not None:
        weight = rounded_weight(weight, kept)
    total = sum(
        (
            convolve(first.float(), second.float())
            for first, second in cut_to_fidelity(
                image.contiguous(), weight.contiguous(), arithmetic.fidelity
            )
        ),
        start=torch.zeros(()),
    )
    if bias is not None:
        total = total + bias.float().reshape(-1)[: total.shape[1], None, None]
    values: list[Any] = [_rows(activate(total, getattr(config, "activation", None), name))]
    if returned:
        values.append(Prepared(weight))
    if len(returned) > 1:
        values.append(Prepared(torch.zeros(0) if bias is None else bias))
    return values


@value_of("ttnn.conv2d", default=DEFAULT)
def conv2d(*, arithmetic: Arithmetic, call: Call, **given: Any) -> list[Any]:
    image = _image(
        given["input_tensor"],
        given["batch_size"],
        given["input_height"],
        given["input_width"],
        given["in_channels"],
    )
    top, bottom, left, right = _borders(given.get("padding", 0))
    image = functional.pad(image, (left, right, top, bottom))

    def convolve(pixels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(
            pixels,
            weight,
            stride=_pair(given.get("stride", 1)),
            dilation=_pair(given.get("dilation", 1)),
            groups=given.get("groups", 1),
        )

    return _convolved("ttnn.conv2d", convolve, image, given, arithmetic, call)


@value_of("ttnn.conv_transpose2d", default=DEFAULT)
def conv_transpose2d(*, arithmetic: Arithmetic, call: Call, **given: Any) -> list[Any]:
    if not given.get("mirror_kernel", True):
        raise EmulationError(
            "ttnn.conv_transpose2d: the emulation has no value for mirror_kernel=False"
        )
    image = _image(
        given["input_tensor"],
        given["batch_size"],
        given["input_height"],
        given["input_width"],
        given["in_channels"],
    )
    top, bottom, left, right = _borders(given.get("padding", 0))
    if (top, left) != (bottom, right):
        raise EmulationError("ttnn.conv_transpose2d: the emulation has no value for uneven padding")

    def convolve(pixels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.conv_transpose2d(
            pixels,
            weight,
            stride=_pair(given.get("stride", 1)),
            padding=(top, left),
            output_padding=_pair(given.get("output_padding", 0)),
            dilation=_pair(given.get("dilation", 1)),
            groups=given.get("groups", 1),
        )

    return _convolved("ttnn.conv_transpose2d", convolve, image, given, arithmetic, call)


@value_of("ttnn.max_pool2d")
def max_pool2d(
    input_tensor: torch.Tensor,
    batch_size: int,
    input_h: int,
    input_w: int,
    channels: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Pair,
    dilation: Sequence[int],
    ceil_mode: bool = False,
    **_: Any,
) -> torch.Tensor:
    image = _image(input_tensor, batch_size, input_h, input_w, channels).float()
    top, bottom, left, right = _borders(padding)
    image = functional.pad(image, (left, right, top, bottom), value=float("-inf"))
    return _rows(
        functional.max_pool2d(
            image, tuple(kernel_size), tuple(stride), 0, tuple(dilation), ceil_mode
        )
    )
