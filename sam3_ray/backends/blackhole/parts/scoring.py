"""Scores (upstream: ``model_misc.DotProductScoring``): each query against the mean of the phrase's tokens."""

from __future__ import annotations

import math
from typing import Any

import ttnn

from sam3_ray.backends.blackhole.modules import Scope, as_row, transposed
from sam3_ray.backends.blackhole.parts.layers import LayerNorm, Linear, linear
from sam3_ray.backends.blackhole.placement import Placement
from sam3_ray.config import Sam3Config

SCORE_LIMIT = 12.0
"""``clamp_max_val`` of ``DotProductScoring``."""


class Scoring:
    """Queries and phrases -> class logits.

    Args:
        place: where it runs.
        scope: of upstream's ``dot_prod_scoring``.
        config: the model's dimensions.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width = config.model_width
        self._place = place
        layers = scope / "prompt_mlp" / "layers"
        self._first = Linear(place, layers / 0, width, config.feedforward_width, activation="relu")
        self._second = Linear(place, layers / 1, config.feedforward_width, width)
        self._norm = LayerNorm(place, scope / "prompt_mlp" / "out_norm", width)
        scale = 1 / math.sqrt(width)  # ``scale`` of the dot product, in the phrase's projection
        proj = scope / "prompt_proj"
        self._prompt_weight = proj.parameter(
            {"weight": (width, width)}, lambda w: transposed(w) * scale, dtype=place.weights_dtype
        )
        self._prompt_bias = proj.parameter(
            {"bias": (width,)}, lambda b: as_row(b) * scale, dtype=ttnn.bfloat16
        )
        self._queries = Linear(place, scope / "hs_proj", width, width)

    def __call__(self, queries: Any, prompt: Any, mask: Any) -> Any:
        """Score.

        Args:
            queries: (1, 1, phrases * rows, width).
            prompt: (1, 1, phrases * keys, width).
            mask: (phrases, 1, 1, keys), 0 or a large negative number.

        Returns:
            (1, 1, phrases * rows, 1) float32.
        """
        phrases, keys = mask.shape[0], mask.shape[3]
        place = self._place
        hidden = self._first(prompt)
        change = self._second(hidden)
        ttnn.deallocate(hidden)
        tokens = ttnn.add(change, prompt, output_tensor=change)
        normed = self._norm(tokens)
        ttnn.deallocate(tokens)
        # The softmax of a mask of zeros gives each valid token its share: the mean is a product.
        shares = ttnn.softmax(
            mask,
            dim=-1,
            compute_kernel_config=place.exact_compute_config,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        mean = self._product(shares, ttnn.reshape(normed, (phrases, 1, keys, normed.shape[-1])))
        for tensor in (shares, normed):
            ttnn.deallocate(tensor)
        phrase = linear(place, mean, self._prompt_weight.value, self._prompt_bias.value)
        ttnn.deallocate(mean)
        found = self._queries(queries)
        rows, width = found.shape[2] // phrases, found.shape[3]
        found = ttnn.reshape(found, (phrases, 1, rows, width))
        scores = self._product(found, phrase, transpose=True, dtype=ttnn.float32)
        for tensor in (found, phrase):
            ttnn.deallocate(tensor)
        limited = ttnn.clamp(
            scores, min=-SCORE_LIMIT, max=SCORE_LIMIT, memory_config=ttnn.L1_MEMORY_CONFIG
        )
        ttnn.deallocate(scores)
        return ttnn.reshape(limited, (1, 1, phrases * rows, 1))

    def _product(
        self, a: Any, b: Any, *, transpose: bool = False, dtype: Any = ttnn.bfloat16
    ) -> Any:
        return ttnn.matmul(
            a,
            b,
            transpose_b=transpose,
            compute_kernel_config=self._place.exact_compute_config,
            memory_config=ttnn.L1_MEMORY_CONFIG,
            dtype=dtype,
        )
