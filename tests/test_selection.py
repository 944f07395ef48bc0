"""Threshold, order and limit, against torch and plain sorting."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sam3_ray.selection import scores_of, select, sigmoid


@given(
    hnp.arrays(np.float32, 30, elements=st.floats(-60, 60, width=32)), st.floats(-60, 60, width=32)
)
def test_scores_are_upstreams(logits: np.ndarray, presence: float) -> None:
    expected = (
        torch.from_numpy(logits).sigmoid() * torch.tensor(presence, dtype=torch.float32).sigmoid()
    )
    np.testing.assert_allclose(scores_of(logits, presence), expected.numpy(), atol=2e-7)


def test_sigmoid_at_the_ends() -> None:
    np.testing.assert_array_equal(sigmoid(np.float32([-1000, 0, 1000])), np.float32([0, 0.5, 1]))


@given(
    hnp.arrays(
        np.float32, st.integers(0, 40), elements=st.sampled_from([0.125, 0.25, 0.5, 0.75, 0.875])
    ),
    st.sampled_from([0.0, 0.25, 0.5, 0.8]),
    st.integers(1, 12),
)
def test_selection(scores: np.ndarray, threshold: float, limit: int) -> None:
    expected = sorted(
        (i for i in range(len(scores)) if scores[i] > np.float32(threshold)),
        key=lambda i: (-scores[i], i),
    )
    chosen = select(scores, threshold, limit)
    assert chosen.queries.tolist() == expected[:limit]
    np.testing.assert_array_equal(chosen.scores, scores[expected[:limit]])
    assert chosen.truncated == (len(expected) > limit)
