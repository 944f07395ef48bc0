"""The CPU backend against a second, independent SAM3: ``transformers``' ``Sam3Model``, same weights.

Both get the same pixels and the same token ids, so that only the models are compared. transformers skips
the geometry encoder where there are no boxes; upstream's CLS token is always part of the prompt. One box
marked as padding (label -10, as transformers' own processor writes for "no box") asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from open_clip import SimpleTokenizer
from torch import Tensor
from transformers.models.clip.tokenization_clip import CLIPTokenizer
from transformers.models.sam3.configuration_sam3 import Sam3Config as TransformersConfig
from transformers.models.sam3.modeling_sam3 import Sam3Model

from sam3_ray.backends.cpu.backend import CpuBackend
from sam3_ray.backends.cpu.model import build_empty_modules, build_modules
from sam3_ray.checkpoint import load_checkpoint
from sam3_ray.config import FULL, Sam3Config
from sam3_ray.selection import scores_of
from sam3_ray.text import PADDING_TOKEN, find_bpe_file, tokenize
from tests.demo_scenes import scenes
from tests.parity.transformers_weights import (
    POINT_PROMPTS,
    TRUNK,
    VIT_NORM_EPSILON,
    transformers_config,
    transformers_weights,
)
from tests.parity.upstream import random_state, save_checkpoint

SCORE_TOLERANCE = 1e-3
BOX_TOLERANCE = 1e-3  # of the image's side
MASK_LOGIT_TOLERANCE = 1e-2  # logits are spread over several units

CONFIG = Sam3Config(
    image_size=224,
    pretrain_image_size=112,  # a table of 8x8 positions, tiled over 16x16
    vit_width=64,
    vit_depth=4,
    vit_heads=2,
    window_size=4,  # neither the grid nor the table
    global_blocks=(1, 3),
    text_width=96,
    text_heads=3,
    text_layers=2,
    model_width=64,
    heads=4,
    feedforward_width=160,
    fusion_layers=2,
    decoder_layers=3,
    geometry_layers=2,
    queries=24,
)
PHRASES = ("red circle", "dog", "the third window from the left, " * 6, "a naïve café")


@dataclass(frozen=True)
class Answer:
    """One image and one phrase: every query's score, box (xyxy in 0..1) and mask logits."""

    scores: np.ndarray
    boxes: np.ndarray
    masks: np.ndarray

    def distance(self, other: Answer) -> tuple[float, float, float]:
        """Largest differences of scores, boxes and mask logits."""
        pairs = ((self.scores, other.scores), (self.boxes, other.boxes), (self.masks, other.masks))
        return tuple(float(np.abs(mine - theirs).max()) for mine, theirs in pairs)


def ask_ours(backend: CpuBackend, pixels: np.ndarray) -> list[Answer]:
    """All phrases at once, as the engine runs them."""
    image = backend.encode_image(backend.prepare(pixels))
    grounding = backend.ground(image, backend.encode_text(PHRASES))
    centre, size = grounding.boxes_cxcywh[..., :2], grounding.boxes_cxcywh[..., 2:]
    boxes = np.concatenate([centre - size / 2, centre + size / 2], -1)
    answers = []
    for k in range(len(PHRASES)):
        masks = backend.read_masks(grounding.masks, [(k, q) for q in range(CONFIG.queries)])
        scores = scores_of(grounding.logits[k], float(grounding.presence_logits[k]))
        answers.append(Answer(scores, boxes[k], masks))
    return answers


@torch.inference_mode()
def ask_theirs(model: Sam3Model, prepared: Tensor, ids: Tensor) -> Answer:
    """One phrase, (32,) ids."""
    output = model(
        pixel_values=prepared,
        input_ids=ids[None],
        attention_mask=ids.ne(PADDING_TOKEN).long()[None],
        input_boxes=torch.full((1, 1, 4), 0.5),
        input_boxes_labels=torch.full((1, 1), -10),
    )
    scores = output.pred_logits[0].sigmoid() * output.presence_logits[0].sigmoid()
    return Answer(scores.numpy(), output.pred_boxes[0].numpy(), output.pred_masks[0].numpy())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "sam3.pt"
    state = random_state(build_modules(CONFIG), seed=3)
    state[f"{TRUNK}.pos_embed"] *= 32  # as large as a patch's own embedding
    save_checkpoint(path, state, CONFIG)
    return path


@pytest.fixture(scope="module")
def backend(checkpoint: Path) -> Iterator[CpuBackend]:
    backend = CpuBackend(checkpoint)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def witness(checkpoint: Path) -> Sam3Model:
    config = transformers_config(CONFIG)
    config._attn_implementation = "eager"  # its own arithmetic, not torch's fused attention
    model = Sam3Model(config).eval()
    model.load_state_dict(transformers_weights(load_checkpoint(checkpoint)[1]), strict=True)
    return model


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    """Square, wide and tall."""
    return [np.asarray(scene.image) for scene in scenes(3, seed=5)]


def test_scores_boxes_and_masks_agree(
    backend: CpuBackend,
    witness: Sam3Model,
    pictures: list[np.ndarray],
    record_property: pytest.FixtureRequest,
) -> None:
    ids = tokenize(PHRASES, CONFIG.text_context)
    worst = np.zeros(3)
    answers: list[Answer] = []
    for pixels in pictures:
        prepared = backend.prepare(pixels)
        for ours, phrase_ids in zip(ask_ours(backend, pixels), ids, strict=True):
            worst = np.maximum(worst, ours.distance(ask_theirs(witness, prepared, phrase_ids)))
            answers.append(ours)
    print("largest differences: scores %.1e, boxes %.1e, mask logits %.1e" % tuple(worst))
    assert worst[0] <= SCORE_TOLERANCE
    assert worst[1] <= BOX_TOLERANCE
    assert worst[2] <= MASK_LOGIT_TOLERANCE
    # Weights that give the same answer to everything would agree as well.
    for first, second in ((answers[0], answers[1]), (answers[0], answers[len(PHRASES)])):
        print("between answers: %.2f %.2f %.2f" % first.distance(second))
