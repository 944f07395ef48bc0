"""Convolutions and pooling against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from tests.emulation.samples import assert_rounds_to, down, random, up
from tests.emulation.test_matmul_values import kernel


def rows(image: torch.Tensor) -> torch.Tensor:
    """(N, C, H, W) -> (1, 1, N H W, C)."""
    return image.permute(0, 2, 3, 1).reshape(1, 1, -1, image.shape[1])


def options(chip: Any, image: torch.Tensor, out: int, size: int, **more: Any) -> dict[str, Any]:
    import ttnn

    batch, channels, height, width = image.shape
    return {
        "input_tensor": up(chip, rows(image), layout=ttnn.ROW_MAJOR_LAYOUT),
        "device": chip,
        "in_channels": channels,
        "out_channels": out,
        "batch_size": batch,
        "input_height": height,
        "input_width": width,
        "kernel_size": (size, size),
        **more,
    }


def host(value: torch.Tensor) -> Any:
    import ttnn

    return ttnn.from_torch(value, dtype=ttnn.float32)


CASES = {
    # size, stride, padding, side
    "3x3": (3, 1, (1, 1), 16),
    "1x1": (1, 1, (0, 0), 13),
    "2x2 apart": (2, 2, (0, 0), 12),
    "uneven padding": (3, 1, (1, 0, 2, 1), 15),
}


@pytest.mark.parametrize("case", CASES)
def test_conv2d(chip: Any, case: str) -> None:
    import ttnn

    size, stride, padding, side = CASES[case]
    image, weight, bias = (
        random(1, 32, side, side),
        random(48, 32, size, size, seed=1),
        random(48, seed=2),
    )
    common = options(chip, image, 48, size, stride=(stride, stride), padding=padding)
    relu = ttnn.UnaryWithParam(ttnn.UnaryOpType.RELU)
    config = ttnn.Conv2dConfig(weights_dtype=ttnn.bfloat16, activation=relu)
    result, (prepared, prepared_bias) = ttnn.conv2d(
        weight_tensor=host(weight),
        bias_tensor=host(bias.reshape(1, 1, 1, -1)),
        conv_config=config,
        return_weights_and_bias=True,
        **common,
    )
    if len(padding) == 2:
        padding = (padding[0], padding[0], padding[1], padding[1])
    top, bottom, left, right = padding
    padded = functional.pad(image, (left, right, top, bottom))
    expected = rows(torch.relu(functional.conv2d(padded, weight, bias, stride)))
    assert_rounds_to(result, expected)
    again = ttnn.conv2d(
        weight_tensor=prepared, bias_tensor=prepared_bias, conv_config=config, **common
    )
    assert torch.equal(down(again), down(result))


def test_conv2d_rounds_block_weights_along_the_outputs(chip: Any) -> None:
    import ttnn

    image, weight = random(1, 32, 8, 8), random(32, 32, 1, 1, seed=1)
    config = ttnn.Conv2dConfig(weights_dtype=ttnn.bfloat8_b)
    common = options(chip, image, 32, 1, stride=(1, 1), padding=(0, 0))
    result = ttnn.conv2d(weight_tensor=host(weight), conv_config=config, **common)
    matrix = weight.reshape(32, 32).T.contiguous()  # (inputs, outputs)
    packed = (
        ttnn.from_torch(matrix, dtype=ttnn.bfloat8_b, layout=ttnn.TILE_LAYOUT).to_torch().float()
    )
    assert_rounds_to(result, rows(image) @ packed)


def test_conv2d_is_cut_to_its_fidelity(chip: Any) -> None:
    import ttnn

    full = 2 - 2**-7
    image, weight = torch.full((1, 32, 8, 8), full), torch.eye(32).reshape(32, 32, 1, 1) * full
    for fidelity, value in {"LoFi": (2 - 2**-6) * (2 - 2**-4), "HiFi4": full * full}.items():
        result = ttnn.conv2d(
            weight_tensor=host(weight),
            conv_config=ttnn.Conv2dConfig(weights_dtype=ttnn.bfloat16),
            compute_config=kernel(fidelity),
            **options(chip, image, 32, 1, stride=(1, 1), padding=(0, 0)),
        )
        assert bool((down(result) == torch.tensor(value).to(torch.bfloat16)).all())


def test_weights_prepared_beforehand(chip: Any) -> None:
    import ttnn

    image, weight = random(1, 32, 16, 16), random(32, 32, 3, 3, seed=1)
    config = ttnn.Conv2dConfig(weights_dtype=ttnn.bfloat16)
    common = options(chip, image, 32, 3, stride=(1, 1), padding=(1, 1))
    shape = {key: item for key, item in common.items() if key != "input_tensor"}
    prepared = ttnn.prepare_conv_weights(
        weight_tensor=host(weight),
        input_memory_config=common["input_tensor"].memory_config(),
        input_layout=ttnn.ROW_MAJOR_LAYOUT,
        weights_format="OIHW",
        has_bias=False,
        dilation=(1, 1),
        groups=1,
        input_dtype=ttnn.bfloat16,
        conv_config=config,
        **shape,
    )
    result = ttnn.conv2d(weight_tensor=ttnn.to_device(prepared, chip), conv_config=config, **common)
    assert_rounds_to(result, rows(functional.conv2d(image, weight, padding=1)))


def test_conv_transpose2d(chip: Any) -> None:
    import ttnn

    image, weight = random(1, 32, 8, 8), random(32, 32, 2, 2, seed=1)
    result = ttnn.conv_transpose2d(
        weight_tensor=host(weight),
        conv_config=ttnn.Conv2dConfig(weights_dtype=ttnn.bfloat16),
        **options(chip, image, 32, 2, stride=(2, 2), padding=(0, 0)),
    )
    assert_rounds_to(result, rows(functional.conv_transpose2d(image, weight, stride=2)))


@pytest.mark.parametrize(("size", "padding"), [(2, [0, 0]), (3, [1, 1])])
def test_max_pool2d(chip: Any, size: int, padding: list[int]) -> None:
    import ttnn

    image = random(1, 32, 16, 16)
    result = ttnn.max_pool2d(
        up(chip, rows(image), layout=ttnn.ROW_MAJOR_LAYOUT),
        1, 16, 16, 32, [size, size], [2, 2], padding, [1, 1],
    )  # fmt: skip
    assert torch.equal(down(result), rows(functional.max_pool2d(image, size, 2, padding[0])))
