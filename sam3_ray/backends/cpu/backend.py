"""SAM3 on the CPU: upstream's modules, called a stage at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from sam3_ray.backends.base import Capacity, Float32Array, Grounding, ImageFeatures, Uint8Array
from sam3_ray.backends.cpu.model import Sam3Modules, build_empty_modules, inverse_sigmoid
from sam3_ray.checkpoint import check_weights, load_checkpoint
from sam3_ray.config import Sam3Config
from sam3_ray.images import resize_to_square
from sam3_ray.text import PADDING_TOKEN, tokenize

PROMPT_RUNS = (1, 2, 4)
IMAGE_CACHE_BYTES = 1 << 30
"""Nine images of the full model (111 MB each), hundreds of the demo checkpoint's."""


@dataclass(frozen=True)
class CpuImageFeatures:
    """The neck's levels, fine to coarse, and the geometry encoder's token. Read-only.

    Attributes:
        levels: three (1, C, h, w) float32.
        positions: (h*w, 1, C) position encoding of the coarsest level; the same for all images.
        geometry: (1, 1, C) float32 CLS token.
    """

    levels: tuple[Tensor, ...]
    positions: Tensor
    geometry: Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.levels, self.geometry))

    def release(self) -> None:
        """Nothing to do: memory goes with the last reference."""


@dataclass(frozen=True)
class CpuTextFeatures:
    """One phrase: (L, 1, C) float32 tokens, and (1, L) bool, True where padding."""

    tokens: Tensor
    padding: Tensor


@dataclass(frozen=True)
class _MaskInputs:
    """What the segmentation head needs of one ``ground``: k phrases of one image."""

    levels: tuple[Tensor, ...]
    memory: Tensor
    queries: Tensor
    prompt: Tensor
    prompt_padding: Tensor


class CpuBackend:
    """The ``Backend`` protocol on torch's CPU kernels, in float32.

    Args:
        checkpoint_path: a file in ``sam3.pt``'s layout.
        num_threads: torch's threads in this process; None leaves them alone.

    Raises:
        CheckpointError: the file is broken or does not fit its configuration.
    """

    name = "cpu"

    def __init__(self, checkpoint_path: Path, *, num_threads: int | None = None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.config, weights = load_checkpoint(checkpoint_path)
        self._modules = _load_modules(self.config, weights, checkpoint_path)
        self.capacity = Capacity(prompt_runs=PROMPT_RUNS, image_cache_bytes=IMAGE_CACHE_BYTES)

    def prepare(self, pixels: Uint8Array) -> Tensor:
        """(H, W, 3) uint8 -> (1, 3, S, S) float32 in [-1, 1], as upstream's processor transforms."""
        square = resize_to_square(pixels, self.config.image_size)
        image = torch.from_numpy(square).permute(2, 0, 1)
        image = transforms.to_dtype(image, torch.float32, scale=True)
        image = transforms.normalize(image, [0.5] * 3, [0.5] * 3)
        return cast(Tensor, image[None])

    @torch.inference_mode()
    def encode_image(self, prepared: Tensor) -> CpuImageFeatures:
        """ViT, neck, and the geometry encoder's CLS token."""
        output = self._modules.backbone.forward_image(prepared)
        levels = tuple(output["backbone_fpn"])
        positions = output["vision_pos_enc"][-1].flatten(2).permute(2, 0, 1)
        coarsest = levels[-1].flatten(2).permute(2, 0, 1)
        geometry = self._modules.geometry_encoder.encode_cls(coarsest, positions)
        return CpuImageFeatures(levels, positions, geometry)

    @torch.inference_mode()
    def encode_text(self, phrases: Sequence[str]) -> list[CpuTextFeatures]:
        """All phrases in one batch, which beats a pool of threads on the same cores."""
        language = self._modules.backbone.language_backbone
        ids = tokenize(phrases, self.config.text_context)
        _, memory = language.encoder(ids)
        tokens = language.resizer(memory.transpose(0, 1))
        padding = ids.eq(PADDING_TOKEN)
        return [
            CpuTextFeatures(tokens[:, i : i + 1].contiguous(), padding[i : i + 1])
            for i in range(len(phrases))
        ]

    @torch.inference_mode()
    def ground(self, image: ImageFeatures, text: Sequence[CpuTextFeatures]) -> Grounding:
        """Fusion encoder, decoder and scoring for k phrases of one image."""
        assert isinstance(image, CpuImageFeatures)
        count = len(text)
        transformer = self._modules.transformer
        prompt = torch.cat(
            [
                torch.cat([features.tokens for features in text], dim=1),
                image.geometry.repeat(1, count, 1),
            ]
        )
        padding = torch.cat(
            [
                torch.cat([features.padding for features in text]),
                torch.zeros(count, image.geometry.shape[0], dtype=torch.bool),
            ],
            dim=1,
        )
        coarsest = image.levels[-1]
        fused = transformer.encoder(
            src=[coarsest.flatten(2).permute(2, 0, 1).repeat(1, count, 1)],
            src_key_padding_mask=None,
            src_pos=[image.positions.repeat(1, count, 1)],
            prompt=prompt,
            prompt_pos=torch.zeros_like(prompt),
            prompt_key_padding_mask=padding,
            feat_sizes=[tuple(coarsest.shape[-2:])],
        )
        hidden, reference_boxes, presence, _ = transformer.decoder(
            tgt=transformer.decoder.query_embed.weight.unsqueeze(1).repeat(1, count, 1),
            memory=fused["memory"],
            memory_key_padding_mask=None,
            pos=fused["pos_embed"],
            reference_boxes=None,
            level_start_index=fused["level_start_index"],
            spatial_shapes=fused["spatial_shapes"],
            valid_ratios=fused["valid_ratios"],
            tgt_mask=None,
            memory_text=prompt,
            text_attention_mask=padding,
            apply_dac=False,
        )
        queries = hidden[-1:].transpose(1, 2)  # the last layer, batch first: (1, k, Q, C)
        references = reference_boxes[-1].transpose(0, 1)
        logits = self._modules.dot_prod_scoring(queries, prompt, padding)[0, :, :, 0]
        offsets = transformer.decoder.bbox_embed(queries[0])
        boxes = (inverse_sigmoid(references) + offsets).sigmoid()
        return Grounding(
            logits=logits.numpy(),
            boxes_cxcywh=boxes.numpy(),
            presence_logits=presence[-1].reshape(count).numpy(),
            masks=_MaskInputs(image.levels, fused["memory"], queries[0], prompt, padding),
        )

    @torch.inference_mode()
    def read_masks(self, masks: _MaskInputs, kept: Sequence[tuple[int, int]]) -> Float32Array:
        """Run the segmentation head for the phrases that found something, and for their queries only."""
        size = self.config.mask_size
        if not kept:
            return np.zeros((0, size, size), np.float32)
        phrases = sorted({phrase for phrase, _ in kept})
        queries_of = {p: [query for phrase, query in kept if phrase == p] for p in phrases}
        longest = max(len(queries) for queries in queries_of.values())
        padded = [
            queries_of[p] + queries_of[p][:1] * (longest - len(queries_of[p])) for p in phrases
        ]
        rows = torch.tensor(phrases)
        chosen = masks.queries[rows[:, None], torch.tensor(padded)]  # (phrases, longest, C)
        output = self._modules.segmentation_head(
            backbone_feats=list(masks.levels),
            obj_queries=chosen[None],
            image_ids=torch.zeros(len(phrases), dtype=torch.long),
            encoder_hidden_states=masks.memory[:, rows],
            prompt=masks.prompt[:, rows],
            prompt_mask=masks.prompt_padding[rows],
        )["pred_masks"].numpy()
        next_row = dict.fromkeys(phrases, 0)
        logits = np.empty((len(kept), size, size), np.float32)
        for i, (phrase, _) in enumerate(kept):
            logits[i] = output[phrases.index(phrase), next_row[phrase]]
            next_row[phrase] += 1
        return logits

    def info(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "dtype": "float32",
        }

    def close(self) -> None:
        self._modules = None  # type: ignore[assignment]


def _load_modules(config: Sam3Config, weights: dict[str, Tensor], path: Path) -> Sam3Modules:
    modules = build_empty_modules(config)
    parameters = {key: tuple(value.shape) for key, value in modules.named_parameters()}
    check_weights(config, parameters, weights, path)
    # Rotary tables are computed (a checkpoint may carry upstream's); half-precision files are widened.
    modules.load_state_dict(
        {key: weights[key].float() for key in parameters}, strict=False, assign=True
    )
    return modules.requires_grad_(False)
