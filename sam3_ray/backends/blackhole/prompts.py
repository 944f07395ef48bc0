"""The prompt part as traces, with its persistent buffers and the text cache's slots."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import ttnn

from sam3_ray.backends.base import NEW_PHRASES, TEXT_CACHE_ENTRIES, Float32Array, Grounding
from sam3_ray.backends.blackhole.image_cache import (
    SlotCache,
    SlotFeatures,
    allocate,
    copy_all,
)
from sam3_ray.backends.blackhole.parts.decoder import rows_of
from sam3_ray.backends.blackhole.parts.prompt import KEYS, PromptPart
from sam3_ray.backends.blackhole.placement import TILE
from sam3_ray.backends.blackhole.traces import QUEUE, Trace
from sam3_ray.config import Sam3Config
from sam3_ray.text import tokenize

PROMPT_RUNS = (1, 2, 4)
"""Phrases of one image in one trace."""

TEXT_SLOTS = TEXT_CACHE_ENTRIES + NEW_PHRASES + PROMPT_RUNS[-1]
"""What the engine may hold at a time, and what the traces' buffers hold."""

ANSWER_COLUMNS = 2 * TILE + 1


@dataclass(eq=False)
class TextSlot:
    """One phrase's features on the chip; its slot is free again when nobody holds this."""

    index: int


@dataclass(frozen=True)
class MaskInputs:
    """What ``read_masks`` needs of one ``ground``: it is valid until the next.

    Attributes:
        run: number of that ``ground``.
        image: whose features it saw.
    """

    run: int
    image: SlotFeatures


class Prompts:
    """Text, grounding and masks of one chip.

    Args:
        device: an open ttnn device.
        config: the model's dimensions.
        part: the modules, loaded.
        images: the image cache, whose buffers the traces read.
    """

    def __init__(
        self, device: Any, config: Sam3Config, part: PromptPart, images: SlotCache
    ) -> None:
        self._device, self._config, self._part, self._images = device, config, part, images
        width, context = config.model_width, config.text_context
        self._rows = rows_of(config)
        most = PROMPT_RUNS[-1]
        text = [(1, 1, context, width), (1, 1, 1, KEYS)]
        self._ids = {run: self._ids_buffer(run, context) for run in PROMPT_RUNS}
        self._text = [allocate(device, text) for _ in range(most)]
        self._slots = [allocate(device, text) for _ in range(TEXT_SLOTS)]
        self._free_slots = list(range(TEXT_SLOTS))
        self._resident: list[TextSlot | None] = [None] * most
        tokens = config.grid**2
        self._answers = {
            run: ttnn.allocate_tensor_on_device(
                ttnn.Shape((1, 1, run * self._rows, ANSWER_COLUMNS)),
                ttnn.float32,
                ttnn.TILE_LAYOUT,
                device,
                ttnn.DRAM_MEMORY_CONFIG,
            )
            for run in PROMPT_RUNS
        }
        # What a phrase's masks are made of: fused tokens, prompt, mask, queries. One more set is the input
        # of the traces that make masks.
        shapes = [(1, 1, tokens, width), (1, 1, KEYS, width), (1, 1, 1, KEYS)]
        self._mask_inputs = [
            [*allocate(device, shapes), self._queries_buffer()] for _ in range(most + 1)
        ]
        self._pixels = allocate(device, [(1, 1, width, config.mask_size**2)])[0]
        self.buckets = _buckets(config.queries)
        self._kept = {n: self._ids_buffer(1, n) for n in self.buckets}
        self._masks = {
            n: allocate(device, [(1, 1, n, config.mask_size**2)])[0] for n in self.buckets
        }
        self._run = 0
        self._pixels_of: tuple[int, int] | None = None
        self.traces = self._make_traces()

    def compile(self) -> None:
        """Run every trace's work, and every copy between, once."""
        for ids in self._ids.values():
            self._upload_ids(ids, np.zeros(tuple(ids.shape), np.int32))
        for kept in self._kept.values():
            self._upload_ids(kept, np.zeros(tuple(kept.shape), np.int32))
        for name, trace in self.traces.items():
            if name == "pixels":
                self._choose_phrase(0)
            trace.compile()
        copy_all(self._text[0], self._slots[0])
        copy_all(self._slots[0], self._text[0])

    def capture(self) -> None:
        """Record every trace."""
        for trace in self.traces.values():
            trace.capture()

    # -- the backend's calls -------------------------------------------------------------------------

    def encode(self, phrases: Sequence[str]) -> list[TextSlot]:
        """Features of up to 4 phrases, of a number that is one of ``PROMPT_RUNS``.

        Raises:
            RuntimeError: every slot is taken.
        """
        if len(self._free_slots) < len(phrases):
            raise RuntimeError(f"all {TEXT_SLOTS} slots of the text cache are taken")
        ids = tokenize(phrases, self._config.text_context).numpy().astype(np.int32)
        self._upload_ids(self._ids[len(phrases)], ids)
        self._resident = [None] * len(self._resident)
        self.traces[f"text {len(phrases)}"].execute()
        slots = []
        for i in range(len(phrases)):
            slot = TextSlot(self._free_slots.pop())
            weakref.finalize(slot, self._free_slots.append, slot.index)
            copy_all(self._text[i], self._slots[slot.index])
            self._resident[i] = slot
            slots.append(slot)
        return slots

    def ground(self, image: SlotFeatures, text: Sequence[TextSlot]) -> Grounding:
        """Scores, boxes and presence of phrases on an image.

        Raises:
            RuntimeError: the image's features were released.
        """
        self._images.load(image)
        phrases = len(text)
        for i, slot in enumerate(text):
            if self._resident[i] is slot:
                continue
            self._resident[i] = None  # until all of it is there
            copy_all(self._slots[slot.index], self._text[i])
            self._resident[i] = slot
        self._run += 1
        self.traces[f"ground {phrases}"].execute()
        answers = ttnn.to_torch(self._answers[phrases]).float().numpy()
        rows = answers.reshape(phrases, self._rows, ANSWER_COLUMNS)
        queries = self._config.queries
        return Grounding(
            logits=np.ascontiguousarray(rows[:, :queries, 2 * TILE]),
            boxes_cxcywh=np.ascontiguousarray(rows[:, :queries, :4]),
            presence_logits=np.ascontiguousarray(rows[:, queries, TILE]),
            masks=MaskInputs(self._run, image),
        )

    def read_masks(self, masks: MaskInputs, kept: Sequence[tuple[int, int]]) -> Float32Array:
        """Mask logits of (phrase, query) pairs, in order, (n, mask_size, mask_size).

        Raises:
            RuntimeError: there was another ``ground`` since, or the image's features were released.
        """
        size = self._config.mask_size
        logits = np.empty((len(kept), size, size), np.float32)
        if masks.run != self._run:
            raise RuntimeError(
                "these masks belong to an earlier ground: they have been overwritten"
            )
        self._images.load(masks.image)  # another image may have been encoded since
        for phrase in sorted({phrase for phrase, _ in kept}):
            places = [i for i, (p, _) in enumerate(kept) if p == phrase]
            self._embed_pixels(phrase)
            logits[places] = self._masks_of([kept[i][1] for i in places])
        return logits

    # -- masks ---------------------------------------------------------------------------------------

    def _embed_pixels(self, phrase: int) -> None:
        if self._pixels_of == (self._run, phrase):
            return
        self._pixels_of = None  # until all of it is there
        self._choose_phrase(phrase)
        self.traces["pixels"].execute()
        self._pixels_of = self._run, phrase

    def _choose_phrase(self, phrase: int) -> None:
        copy_all(self._mask_inputs[phrase], self._mask_inputs[-1])

    def _masks_of(self, queries: list[int]) -> Float32Array:
        """Masks of some queries of the phrase whose pixels are embedded."""
        count, size = len(queries), self._config.mask_size
        bucket = next(n for n in self.buckets if n >= count)
        padded = np.full((1, bucket), queries[0], np.int32)
        padded[0, :count] = queries
        self._upload_ids(self._kept[bucket], padded)
        self.traces[f"masks {bucket}"].execute()
        logits: Float32Array = ttnn.to_torch(self._masks[bucket]).float().numpy()
        return from_phases(logits.reshape(bucket, size * size)[:count], size)

    # -- traces --------------------------------------------------------------------------------------

    def _make_traces(self) -> dict[str, Trace]:
        work: dict[str, Callable[[], None]] = {}
        for run in PROMPT_RUNS:
            work[f"text {run}"] = partial(self._encode_work, run)
        for run in PROMPT_RUNS:
            work[f"ground {run}"] = partial(self._ground_work, run)
        work["pixels"] = self._pixels_work
        for bucket in self.buckets:
            work[f"masks {bucket}"] = partial(self._masks_work, bucket)
        return {name: Trace(self._device, name, run) for name, run in work.items()}

    def _encode_work(self, run: int) -> None:
        for encoded, buffers in zip(
            self._part.encode(self._ids[run]), self._text[:run], strict=True
        ):
            for tensor, buffer in zip(encoded, buffers, strict=True):
                _move(tensor, buffer)

    def _ground_work(self, run: int) -> None:
        *_, coarsest, geometry = self._images.buffers
        texts = [(tokens, mask) for tokens, mask in self._text[:run]]
        each, prompt, mask = self._part.prompt(texts, geometry)
        answers, queries, memory = self._part.ground(coarsest, prompt, mask)
        _move(answers, self._answers[run])
        rows = ttnn.to_layout(queries, ttnn.ROW_MAJOR_LAYOUT, memory_config=ttnn.L1_MEMORY_CONFIG)
        for i in range(run):
            parts = [_part_of(memory, i, run), each[i], texts[i][1], _part_of(rows, i, run)]
            copy_all(parts, self._mask_inputs[i])

    def _pixels_work(self) -> None:
        memory, prompt, mask, _ = self._mask_inputs[-1]
        finest, middle = self._images.buffers[:4], self._images.buffers[4:8]
        self._part.segmentation_head.pixels(
            memory, prompt, mask, [middle, finest], output=self._pixels
        )

    def _masks_work(self, bucket: int) -> None:
        queries = self._mask_inputs[-1][3]
        table = ttnn.reshape(queries, (self._rows, queries.shape[-1]))
        chosen = ttnn.embedding(
            self._kept[bucket],
            table,
            layout=ttnn.TILE_LAYOUT,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        chosen = ttnn.reshape(chosen, (1, 1, bucket, queries.shape[-1]))
        self._part.segmentation_head.masks(chosen, self._pixels, output=self._masks[bucket])

    # -- buffers -------------------------------------------------------------------------------------

    def _ids_buffer(self, rows: int, columns: int) -> Any:
        return ttnn.allocate_tensor_on_device(
            ttnn.Shape((rows, columns)),
            ttnn.uint32,
            ttnn.ROW_MAJOR_LAYOUT,
            self._device,
            ttnn.DRAM_MEMORY_CONFIG,
        )

    def _queries_buffer(self) -> Any:
        """Row-major, so that rows can be looked up by their number."""
        return ttnn.allocate_tensor_on_device(
            ttnn.Shape((1, 1, self._rows, self._config.model_width)),
            ttnn.bfloat16,
            ttnn.ROW_MAJOR_LAYOUT,
            self._device,
            ttnn.DRAM_MEMORY_CONFIG,
        )

    @staticmethod
    def _upload_ids(buffer: Any, ids: Any) -> None:
        host = ttnn.from_torch(
            torch.from_numpy(ids), dtype=ttnn.uint32, layout=ttnn.ROW_MAJOR_LAYOUT
        )
        ttnn.copy_host_to_device_tensor(host, buffer, cq_id=QUEUE)


def from_phases(masks: Float32Array, size: int) -> Float32Array:
    """(n, size * size) in the pixel decoder's order, phases of phases -> (n, size, size)."""
    half = size // 2
    phases = masks.reshape(len(masks), 2, 2, half, half)
    return phases.transpose(0, 3, 1, 4, 2).reshape(len(masks), size, size)


def _buckets(queries: int) -> tuple[int, ...]:
    """Numbers of masks that are read at once: powers of two up to 64, and all."""
    return (*(n for n in (1, 2, 4, 8, 16, 32, 64) if n < queries), queries)


def _part_of(x: Any, i: int, parts: int) -> Any:
    """The ``i``-th of equal parts of the rows of (1, 1, n, width)."""
    if parts == 1:
        return x
    rows = x.shape[2] // parts
    return ttnn.slice(x, [0, 0, i * rows, 0], [1, 1, (i + 1) * rows, x.shape[3]])


def _move(tensor: Any, buffer: Any) -> None:
    """Into a persistent buffer; ``tensor`` is freed."""
    ttnn.copy(tensor, buffer)
    ttnn.deallocate(tensor)
