"""The ttnn golden functions that give values here: only those that were checked against torch (0.81.1)."""

from __future__ import annotations

VERIFIED = frozenset({"ttnn.cumsum", "ttnn.sort", "ttnn.softplus"})
"""Every other golden function is left alone: several are wrong or broken in 0.81.1 (max_pool2d, embedding,
layer_norm's in-place residual, rotary_embedding)."""

DROPPED = (
    "memory_config",
    "compute_kernel_config",
    "queue_id",
    "cq_id",
    "output_tensor",
    "program_config",
)
"""Arguments without a meaning for a value."""
