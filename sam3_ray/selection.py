"""Which queries of a phrase become instances: threshold, order, limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Selection:
    """The kept queries of one phrase, high score first.

    Attributes:
        queries: (N,) int64 indices into the model's queries.
        scores: (N,) float32.
        truncated: more instances passed the threshold than ``max_instances``.
    """

    queries: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    truncated: bool


def scores_of(logits: npt.NDArray[np.float32], presence_logit: float) -> npt.NDArray[np.float32]:
    """sigmoid(logit) * sigmoid(presence), as upstream's ``Sam3Processor`` has it.

    Args:
        logits: (Q,) float32.
        presence_logit: of the phrase.

    Returns:
        (Q,) float32.
    """
    return (sigmoid(logits) * sigmoid(np.float32(presence_logit))).astype(np.float32)


def sigmoid(x: npt.NDArray[np.float32] | np.float32) -> npt.NDArray[np.float32]:
    """1 / (1 + exp(-x)) in float32, without overflow for large negative x."""
    half = np.float32(0.5)
    return np.asarray(half * (np.float32(1.0) + np.tanh(half * np.asarray(x))), np.float32)


def select(scores: npt.NDArray[np.float32], threshold: float, max_instances: int) -> Selection:
    """Keep scores above ``threshold`` (strictly, as upstream), at most ``max_instances``.

    Equal scores keep the order of their queries, so that the same input gives the same answer.
    """
    passed = np.flatnonzero(scores > np.float32(threshold))
    order = passed[np.argsort(-scores[passed], kind="stable")]
    kept = order[:max_instances].astype(np.int64)
    return Selection(kept, scores[kept], truncated=len(order) > len(kept))
