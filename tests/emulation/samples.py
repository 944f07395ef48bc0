"""Tensors for the tests of the emulation."""

from __future__ import annotations

from typing import Any

import torch


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal values that bfloat16 holds exactly, as float32."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16).float()


def up(
    chip: Any, value: torch.Tensor, dtype: Any = None, layout: Any = None, **options: Any
) -> Any:
    """Upload: bfloat16 in tiles where nothing else is said."""
    import ttnn

    return ttnn.from_torch(
        value,
        dtype=ttnn.bfloat16 if dtype is None else dtype,
        layout=ttnn.TILE_LAYOUT if layout is None else layout,
        device=chip,
        **options,
    )


def down(tensor: Any) -> torch.Tensor:
    """Read back as float32."""
    import ttnn

    value: torch.Tensor = ttnn.to_torch(tensor).float()
    return value


def assert_rounds_to(tensor: Any, expected: torch.Tensor, steps: float = 1.01) -> None:
    """A bfloat16 device tensor is the expected float32 value, rounded.

    Args:
        steps: allowed error in units of half a bfloat16 step (2 ** -8 of the value), for sums in another
            order.
    """
    value = down(tensor)
    assert value.shape == expected.shape
    scale = expected.abs().mean()
    error = (value - expected).abs() / (expected.abs() + 1e-2 * scale + 1e-30)
    assert error.max() <= steps * 2**-8, f"off by {error.max():.2e} of the value"
