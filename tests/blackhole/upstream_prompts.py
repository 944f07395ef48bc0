"""Upstream's prompt part with its inner values, and our parts fed with them, for the parity tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sam3_ray.backends.blackhole.precision import PRECISIONS
from sam3_ray.config import Sam3Config
from sam3_ray.text import PADDING_TOKEN, tokenize
from tests.blackhole.upstream_parts import pcc

MASK_BAR = {"accurate": 0.999, "fast": 0.99}
"""PCC of mask logits."""

BOX_BAR_PX = {"accurate": 0.5, "fast": 2.0}
"""How far an edge of a box may be, in pixels of an image of 1008, fed upstream's own input."""

SCORE_BAR = {"accurate": 0.01, "fast": 0.03}
"""Of presence and of scores."""

PHRASES = ("red circle", "a small blue star", "car", "black ring")
MASKED = -1e9


@dataclass
class PromptRecording:
    """What upstream computes for one image and some phrases, float32.

    Attributes:
        ids: (phrases, context) token ids; padding: where there is none.
        text_blocks: (input, output) of each block, (phrases, context, width).
        text: (phrases, context, model_width) after the resizer.
        fusion_layers: (input, output) of each layer, (phrases, n, model_width).
        decoder_layers: for each layer its input, output (queries and presence token, (phrases, queries + 1,
            model_width)), and the boxes it was given, (phrases, queries, 4).
        boxes: (phrases, queries, 4) cxcywh; logits: (phrases, queries); presence: (phrases,).
        queries: (phrases, queries, model_width) after the norm.
        masks: (phrases, queries, mask_size, mask_size) logits.
        geometry, level, finer: the image's token, (n, model_width), and the finer levels, coarse to fine.
    """

    ids: Tensor
    padding: Tensor
    text_blocks: list[tuple[Tensor, Tensor]]
    text: Tensor
    fusion_layers: list[tuple[Tensor, Tensor]]
    decoder_layers: list[tuple[Tensor, Tensor, Tensor]]
    boxes: Tensor
    logits: Tensor
    presence: Tensor
    queries: Tensor
    masks: Tensor
    geometry: Tensor
    level: Tensor
    finer: list[Tensor]

    @property
    def memory(self) -> Tensor:
        """(phrases, n, model_width): the fusion encoder's output."""
        return self.fusion_layers[-1][1]


@torch.inference_mode()
def record_prompts(cpu: Any, pixels: np.ndarray, phrases: Sequence[str]) -> PromptRecording:
    """Run upstream's modules through the CPU backend, with hooks on their layers."""
    modules = cpu._modules
    language, transformer = modules.backbone.language_backbone, modules.transformer
    text_blocks: list[tuple[Tensor, Tensor]] = []
    fusion_layers: list[tuple[Tensor, Tensor]] = []
    decoder_layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep_text(_: Any, inputs: Any, output: Tensor) -> None:
        text_blocks.append((inputs[0], output))

    def keep_fusion(_: Any, __: Any, named: Any, output: Tensor) -> None:
        fusion_layers.append((named["tgt"], output))

    def keep_decoder(_: Any, __: Any, named: Any, output: Any) -> None:
        given = torch.cat([named["tgt"], named["presence_token"]]).transpose(0, 1)
        result = torch.cat(output).transpose(0, 1)
        boxes = named["tgt_reference_points"][:, :, 0].transpose(0, 1)
        decoder_layers.append((given, result, boxes))

    hooks = [b.register_forward_hook(keep_text) for b in language.encoder.transformer.resblocks]
    hooks += [
        layer.register_forward_hook(keep_fusion, with_kwargs=True)
        for layer in transformer.encoder.layers
    ]
    hooks += [
        layer.register_forward_hook(keep_decoder, with_kwargs=True)
        for layer in transformer.decoder.layers
    ]
    image = cpu.encode_image(cpu.prepare(pixels))
    text = cpu.encode_text(phrases)
    grounding = cpu.ground(image, text)
    for hook in hooks:
        hook.remove()
    kept = [(p, q) for p in range(len(phrases)) for q in range(cpu.config.queries)]
    size = cpu.config.mask_size
    masks = torch.from_numpy(cpu.read_masks(grounding.masks, kept))
    ids = tokenize(phrases, cpu.config.text_context)
    return PromptRecording(
        ids=ids,
        padding=ids.eq(PADDING_TOKEN),
        text_blocks=text_blocks,
        text=torch.stack([t.tokens[:, 0] for t in text]),
        fusion_layers=fusion_layers,
        decoder_layers=decoder_layers,
        boxes=torch.from_numpy(grounding.boxes_cxcywh),
        logits=torch.from_numpy(grounding.logits),
        presence=torch.from_numpy(grounding.presence_logits),
        queries=grounding.masks.queries,
        masks=masks.reshape(len(phrases), -1, size, size),
        geometry=image.geometry[0, 0],
        level=image.levels[-1][0].flatten(1).t(),
        finer=[image.levels[1][0].flatten(1).t(), image.levels[0][0].flatten(1).t()],
    )


class LoadedPrompts:
    """Our prompt part on an open chip.

    Args:
        device: an open ttnn device.
        config: dimensions.
        weights: the checkpoint's tensors.
        precision: its name.
    """

    def __init__(
        self, device: Any, config: Sam3Config, weights: Mapping[str, Tensor], precision: str
    ) -> None:
        from sam3_ray.backends.blackhole.modules import WeightStore
        from sam3_ray.backends.blackhole.parts.decoder import rows_of
        from sam3_ray.backends.blackhole.parts.prompt import IGNORED, OWNED, PromptPart
        from sam3_ray.backends.blackhole.placement import Placement

        self.device, self.config, self._rows = device, config, rows_of(config)
        self._store = WeightStore(OWNED, IGNORED)
        self.part = PromptPart(Placement(device, PRECISIONS[precision]), self._store.root, config)
        self._store.load(weights, device, path=Path("weights of a test"))

    def close(self) -> None:
        self._store.release()

    def text_updates(self, recording: PromptRecording) -> Iterator[float]:
        """PCC of what each text block adds, each fed upstream's own input."""
        phrases = len(recording.ids)
        for block, (given, expected) in zip(
            self.part.text_encoder.blocks, recording.text_blocks, strict=True
        ):
            x = self._up(given.reshape(1, 1, -1, given.shape[-1]))
            before = self._down(x)
            after = self._down(block(x, phrases))
            yield pcc(after - before, expected - given)

    def text(self, recording: PromptRecording) -> float:
        """PCC of the phrases' tokens, from the ids on; and the masks are right."""
        encoded = self.part.encode(self._up_ids(recording.ids))
        for i, (_, mask) in enumerate(encoded):
            values = self._down(mask)[0, 0, 0]
            assert ((values < MASKED / 2) == self._padding(recording)[i]).all()
            assert (values[~self._padding(recording)[i]] == 0).all()
        tokens = torch.stack([self._down(tokens)[0, 0] for tokens, _ in encoded])
        return pcc(tokens, recording.text)

    def fusion_updates(self, recording: PromptRecording) -> Iterator[float]:
        prompt, mask = self.prompt(recording)
        positions = self.part.positions(len(recording.ids))
        for layer, (given, expected) in zip(
            self.part.fusion_encoder.layers, recording.fusion_layers, strict=True
        ):
            x = self._up(given.reshape(1, 1, -1, given.shape[-1]), "L1")
            before = self._down(x)
            after = self._down(layer(x, positions, prompt, mask))
            yield pcc(after - before, expected - given)

    def decoder_updates(self, recording: PromptRecording) -> Iterator[float]:
        """PCC of what each layer changes of queries and presence token, fed upstream's tokens and boxes."""
        decoder, phrases = self.part.decoder, len(recording.ids)
        prompt, mask = self.prompt(recording)
        memory = self._up(recording.memory.reshape(1, 1, -1, self.config.model_width))
        memory = decoder.placed(memory, self.part.positions(phrases))
        for layer, (given, expected, boxes) in zip(
            decoder.layers, recording.decoder_layers, strict=True
        ):
            x = self._up_exact(self._in_rows(given))
            placed = self._up_boxes(boxes)
            positions = decoder.query_positions(placed, phrases)
            bias = decoder._bias(placed, phrases)
            before = self._out_of_rows(x)
            after = layer(x, positions, decoder._empty, prompt, mask, memory, bias)
            yield pcc(self._out_of_rows(after) - before, expected - given)

    def heads(self, recording: PromptRecording) -> tuple[float, float, float]:
        """How far boxes (px of 1008), scores and presence are, the heads fed upstream's last layer."""
        decoder = self.part.decoder
        prompt, mask = self.prompt(recording)
        x = self._up_exact(self._in_rows(recording.decoder_layers[-1][1]))
        queries = decoder._norm(x)
        boxes = recording.decoder_layers[-1][2]
        logits = self._up_boxes(torch.logit(boxes.clamp(1e-6, 1 - 1e-6)), wide=True)
        return self._errors(
            decoder.refined(logits, queries),
            self.part.scoring(queries, prompt, mask),
            decoder.presence(x),
            recording,
        )

    def _errors(
        self, logits: Any, scores: Any, presence: Any, recording: PromptRecording
    ) -> tuple[float, float, float]:
        queries = self.config.queries
        boxes = self._by_phrase(logits)[:, :queries, :4].sigmoid()
        found = self._by_phrase(scores)[:, :queries, 0].sigmoid()
        present = self._by_phrase(presence)[:, queries, 0].sigmoid()
        expected = recording.presence.sigmoid()
        return (
            float((_xyxy(boxes) - _xyxy(recording.boxes)).abs().max() * 1008),
            float(
                (found * present[:, None] - recording.logits.sigmoid() * expected[:, None])
                .abs()
                .max()
            ),
            float((present - expected).abs().max()),
        )

    def masks(self, recording: PromptRecording, phrase: int, count: int) -> float:
        """PCC of the first ``count`` masks of a phrase, fed upstream's tokens and queries."""
        from sam3_ray.backends.blackhole.image_cache import allocate
        from sam3_ray.backends.blackhole.prompts import from_phases

        width = self.config.model_width
        prompt, mask = self.prompt(recording, [phrase])
        head = self.part.segmentation_head
        size = self.config.mask_size
        terms = head.terms([self._up(level[None, None]) for level in recording.finer])
        pixels, masks = allocate(self.device, [(1, 1, width, size**2), (1, 1, count, size**2)])
        head.pixels(
            self._up(recording.memory[phrase][None, None]), prompt, mask, terms, output=pixels
        )
        queries = recording.queries[phrase, :count].reshape(1, 1, count, width)
        head.masks(self._up(queries), pixels, output=masks)
        found = from_phases(self._down(masks)[0, 0].numpy(), size)
        return pcc(torch.from_numpy(found.copy()), recording.masks[phrase, :count])

    def prompt(self, recording: PromptRecording, phrases: Sequence[int] = ()) -> tuple[Any, Any]:
        """Upstream's phrases with the geometry token, as our parts take them."""
        from sam3_ray.backends.blackhole.parts.prompt import KEYS

        chosen = list(phrases) or list(range(len(recording.ids)))
        keys = torch.zeros(len(chosen), KEYS, self.config.model_width)
        keys[:, : self.config.text_context] = recording.text[chosen]
        keys[:, self.config.text_context :] = recording.geometry
        mask = torch.zeros(len(chosen), 1, 1, KEYS)
        mask[:, 0, 0][self._padding(recording)[chosen]] = MASKED
        return self._up(keys.reshape(1, 1, -1, keys.shape[-1])), self._up(mask)

    @staticmethod
    def _padding(recording: PromptRecording) -> Tensor:
        """(phrases, keys): where there is no key; the geometry token is the first of its tile."""
        others = torch.ones(len(recording.ids), recording.ids.shape[1], dtype=torch.bool)
        others[:, 0] = False
        return torch.cat([recording.padding, others], dim=1)

    # -- in and out ----------------------------------------------------------------------------------

    def _in_rows(self, tokens: Tensor) -> Tensor:
        """(phrases, queries + 1, width) -> (1, 1, phrases * rows, width), empty rows zero."""
        empty = torch.zeros(len(tokens), self._rows - tokens.shape[1], tokens.shape[2])
        return torch.cat([tokens, empty], dim=1).reshape(1, 1, -1, tokens.shape[2])

    def _by_phrase(self, x: Any) -> Tensor:
        values = self._down(x)
        return values.reshape(-1, self._rows, values.shape[-1])

    def _out_of_rows(self, x: Any) -> Tensor:
        return self._by_phrase(x)[:, : self.config.queries + 1]

    def _up_boxes(self, boxes: Tensor, *, wide: bool = False) -> Any:
        rows = torch.full((len(boxes), self._rows, 32), 0.0 if wide else 0.5)
        rows[:, : boxes.shape[1], :4] = boxes
        return self._up_exact(rows.reshape(1, 1, -1, 32))

    def _up_exact(self, values: Tensor) -> Any:
        """float32, as the decoder keeps its tokens and boxes."""
        import ttnn

        return ttnn.from_torch(
            values.contiguous(),
            dtype=ttnn.float32,
            layout=ttnn.TILE_LAYOUT,
            device=self.device,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )

    def _up_ids(self, ids: Tensor) -> Any:
        import ttnn

        return ttnn.from_torch(
            ids.to(torch.int32),
            dtype=ttnn.uint32,
            layout=ttnn.ROW_MAJOR_LAYOUT,
            device=self.device,
        )

    def _up(self, values: Tensor, memory: str = "DRAM") -> Any:
        import ttnn

        return ttnn.from_torch(
            values.contiguous(),
            dtype=ttnn.bfloat16,
            layout=ttnn.TILE_LAYOUT,
            device=self.device,
            memory_config=getattr(ttnn, f"{memory}_MEMORY_CONFIG"),
        )

    @staticmethod
    def _down(x: Any) -> Tensor:
        import ttnn

        return ttnn.to_torch(x).float()


def _xyxy(boxes: Tensor) -> Tensor:
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)
