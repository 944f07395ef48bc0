"""Train the demo checkpoint from a seed: a SAM3 of 5.7 million parameters that finds coloured shapes.

One command does all of it: renders the pictures that are missing, trains in four stages, exports.

    python scripts/train_demo_checkpoint.py --run runs/demo --minutes 60

A run that was stopped goes on where it was when the same command is given again: weights, optimizer,
averages and schedule are saved every few minutes, and once all pictures are loaded, each step's follow from
the seed and the number of the step. The stages:

1. ``trunk``: the image encoder alone learns what each patch belongs to (colour, shape, box, mask).
2. ``align``: text and image features meet, on cached features of the frozen image encoder.
3. ``fuse``: the fusion encoder learns the same from there.
4. ``joint``: everything, with Hungarian matching of the queries.

Trained together from the start, text and image take much longer to find each other.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# glibc's allocator gives large blocks back to the system after every step and asks for them again:
# keeping them makes a step a quarter faster. It reads these settings when the process starts.
_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
if __name__ == "__main__" and any(os.environ.get(k) != v for k, v in _ALLOCATOR.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_ALLOCATOR})

import demo_pictures as pictures  # noqa: E402
import numpy as np  # noqa: E402
import open_clip  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from evaluate_demo_checkpoint import Measured, Prediction, measure, size_name  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from scipy.optimize import linear_sum_assignment  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from tqdm import tqdm  # noqa: E402

from sam3_ray.backends.cpu.model import Sam3Modules, build_modules  # noqa: E402
from sam3_ray.config import DEMO  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
GRID = DEMO.grid
PATCHES = GRID * GRID
CELLS = pictures.MASK_SIDE // GRID
"""Mask cells along one side of a patch."""
COLOUR_COUNT = len(pictures.COLOUR_NAMES)
SHAPE_COUNT = len(pictures.SHAPE_NAMES)
CONTEXT = 12
"""Tokens of a phrase in training. The text encoder is causal and padding is masked: the same as 32."""
VOCABULARY_SIZE = 49408
HELD_OUT_SEED = 77_000_001
OFFSET_SCALE = 0.2
"""Box sides relative to a patch are predicted in units of this share of the picture."""

# name, share of the minutes, learning rate, pictures a step, phrases a picture
_STAGES = (
    ("trunk", 0.258, 2e-3, 12, 0),
    ("align", 0.016, 2e-3, 24, 12),
    ("fuse", 0.05, 1e-3, 12, 8),
    ("joint", 0.676, 8e-4, 8, 8),
)
_STAGE_NAMES = tuple(stage[0] for stage in _STAGES)
_TRUNK_RATE = 0.35
"""The image encoder's share of the learning rate in the joint stage."""
_LOWEST_RATE = 0.01
_MASK_PHRASES = 18
"""Phrases of a joint step that also get a mask loss (the mask head is a third of the work)."""
_AVERAGE_DECAY = 0.998
_CACHED_PICTURES = 3500


# --------------------------------------------------------------------------------------- attention


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scaled: bool = False
) -> Tensor:
    """Attention written out, (batch, heads, tokens, width), for training on a CPU.

    The backward pass of torch's fused CPU attention is slow in bfloat16 and for short sequences.
    With ``scaled``, queries and keys carry the scale already.
    """
    if not scaled:
        query = query * query.shape[-1] ** -0.5
    scores = torch.matmul(query, key.transpose(-1, -2))
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    return torch.matmul(scores.softmax(-1), value)


def _multihead_forward(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = False,
    attn_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """``nn.MultiheadAttention.forward`` for the cases of this model, through ``_attend``."""
    width, heads = self.embed_dim, self.num_heads
    weight, bias = self.in_proj_weight, self.in_proj_bias
    if query is key:  # a self-attention; its value may lack the positions
        q, k = F.linear(query, weight[: 2 * width], bias[: 2 * width]).chunk(2, -1)
        v = F.linear(value, weight[2 * width :], bias[2 * width :])
    elif key is value:
        q = F.linear(query, weight[:width], bias[:width])
        k, v = F.linear(key, weight[width:], bias[width:]).chunk(2, -1)
    else:
        q = F.linear(query, weight[:width], bias[:width])
        k = F.linear(key, weight[width : 2 * width], bias[width : 2 * width])
        v = F.linear(value, weight[2 * width :], bias[2 * width :])

    def split(x: Tensor) -> Tensor:
        if self.batch_first:
            return x.unflatten(-1, (heads, -1)).transpose(1, 2)
        return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

    q, k, v = split(q), split(k), split(v)
    scores_bias: Tensor | None = None
    if attn_mask is not None:
        scores_bias = (
            attn_mask if attn_mask.dim() == 2 else attn_mask.view(-1, heads, *attn_mask.shape[1:])
        )
    if key_padding_mask is not None:
        padding = torch.zeros(key_padding_mask.shape, dtype=q.dtype)
        padding = padding.masked_fill(key_padding_mask, -1e4)[:, None, None]
        scores_bias = padding if scores_bias is None else scores_bias + padding
    out = _attend(q, k, v, scores_bias)
    out = out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)
    return self.out_proj(out.flatten(-2)), None


def _vit_attention_forward(self: Any, x: Tensor) -> Tensor:
    """The image encoder's attention, through ``_attend``.

    Rotary positions turn each pair of channels: ``x * cosine + turned(x) * sine``. Upstream does so with
    complex numbers, which have no bfloat16. Here ``turned(x)`` comes out of the same product as ``x``, by
    more rows in the weight, so that everything that follows runs over contiguous memory.
    """
    batch, height, width, channels = x.shape
    weight, bias = self.qkv.weight, self.qkv.bias
    pairs = weight[: 2 * channels].view(channels, 2, channels)
    turned = torch.stack([-pairs[:, 1], pairs[:, 0]], 1).view(2 * channels, channels)
    bias_pairs = bias[: 2 * channels].view(channels, 2)
    turned_bias = torch.stack([-bias_pairs[:, 1], bias_pairs[:, 0]], 1).flatten()
    projected = F.linear(
        x.reshape(batch, height * width, channels),
        torch.cat([weight[: 2 * channels], turned, weight[2 * channels :]]),
        torch.cat([bias[: 2 * channels], turned_bias, bias[2 * channels :]]),
    )
    projected = projected.view(batch, height * width, 5, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    cosine, sine = self.rotation_cosine, self.rotation_sine
    if projected.dtype != torch.bfloat16:
        cosine, sine = self.exact_cosine, self.exact_sine
    query_key = torch.addcmul(projected[:2] * cosine, projected[2:4], sine)
    out = _attend(query_key[0], query_key[1], projected[4], scaled=True)
    return self.proj(out.transpose(1, 2).reshape(batch, height, width, channels))


def use_plain_attention(model: Sam3Modules) -> None:
    """Replace the attention of this model's modules only; torch and upstream stay as they are."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.forward = types.MethodType(_multihead_forward, module)
    for block in model.backbone.vision_backbone.trunk.blocks:
        attention = block.attn
        scale = attention.head_dim**-0.25  # of both factors of a score
        attention.exact_cosine = attention.freqs_cis.real.repeat_interleave(2, -1) * scale
        attention.exact_sine = attention.freqs_cis.imag.repeat_interleave(2, -1) * scale
        attention.rotation_cosine = attention.exact_cosine.bfloat16()
        attention.rotation_sine = attention.exact_sine.bfloat16()
        attention.forward = types.MethodType(_vit_attention_forward, attention)


# --------------------------------------------------------------------------------------- text


class Vocabulary:
    """The few tokens of training: 0 is padding, 1 stands for every token that training never names."""

    UNKNOWN = 1

    def __init__(self) -> None:
        from sam3.model.tokenizer_ve import SimpleTokenizer

        merges = Path(open_clip.__file__).parent / "bpe_simple_vocab_16e6.txt.gz"
        self._tokenizer = SimpleTokenizer(bpe_path=str(merges))
        singular = (*pictures.SHAPE_NAMES, *pictures.GENERIC_NAMES)
        words = [
            *pictures.COLOUR_NAMES,
            *singular,
            *map(pictures.plural, singular),
            *pictures.ARTICLES,
        ]
        known = {token for word in words for token in self._tokenizer.encode(word)}
        known |= {self._tokenizer.sot_token_id, self._tokenizer.eot_token_id}
        self.compact = np.full(VOCABULARY_SIZE, self.UNKNOWN, np.int64)
        """The compact index of each of CLIP's tokens."""
        self.compact[0] = 0
        self.compact[sorted(known)] = 2 + np.arange(len(known))
        self.size = 2 + len(known)
        self._cache: dict[str, NDArray[np.int64]] = {}

    def encode(self, phrase: str) -> NDArray[np.int64]:
        """(CONTEXT,) compact token ids, padded with 0."""
        if phrase not in self._cache:
            tokens = self._tokenizer([phrase], context_length=CONTEXT)[0].numpy()
            self._cache[phrase] = self.compact[tokens]
        return self._cache[phrase]


# --------------------------------------------------------------------------------------- model


class TrainingHeads(nn.Module):
    """Linear heads that only training needs: what a patch belongs to, before and after the text."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DEMO.vit_width)
        # objectness, colours, shapes, box sides, the object's mask inside the patch, the box's centre
        self.parts = (1, COLOUR_COUNT, SHAPE_COUNT, 4, CELLS * CELLS, 2)
        self.patch = nn.Linear(DEMO.vit_width, sum(self.parts))
        self.named = nn.Linear(DEMO.model_width, 1 + 4 + 2)
        """Of the fused features: belongs to something named, its box sides, its centre."""
        self.match_box = nn.Linear(DEMO.model_width, 4)
        self.match_scale = nn.Parameter(torch.tensor([1.0, -2.0]))


@torch.no_grad()
def initialise(model: Sam3Modules, vocabulary: Vocabulary) -> None:
    """Give the model its starting values: those that upstream leaves out, and better ones."""
    text = model.backbone.language_backbone.encoder
    text.token_embedding = nn.Embedding(vocabulary.size, DEMO.text_width)
    text.token_embedding.weight.normal_(0, 0.5)
    text.positional_embedding.normal_(0, 0.1)
    text.text_projection.zero_()  # of the pooled phrase, which SAM3 does not use
    decoder = model.transformer.decoder
    # Queries begin as a grid of anchors, each looking after its part of the picture.
    side = round(math.sqrt(DEMO.queries))
    centres = (torch.arange(side) + 0.5) / side
    size = torch.full((DEMO.queries,), 0.22)
    anchors = torch.stack([centres.repeat(side), centres.repeat_interleave(side), size, size], 1)
    decoder.reference_points.weight.copy_(torch.logit(anchors))
    decoder.query_embed.weight.normal_(0, 0.3)
    decoder.presence_token_head.layers[-1].weight.mul_(0.1)
    decoder.presence_token_head.layers[-1].bias.zero_()


def fit_box_bias(model: Sam3Modules, steps: int = 400) -> None:
    """Fit the box-relative attention bias to "look inside the box": no pull inside, a wall outside."""
    generator = torch.Generator().manual_seed(0)
    softness = torch.linspace(0.12, 0.45, DEMO.heads)
    decoder = model.transformer.decoder
    for mlp in (decoder.boxRPB_embed_x, decoder.boxRPB_embed_y):
        optimizer = torch.optim.Adam(mlp.parameters(), lr=5e-3)
        for _ in range(steps):
            position, centre, size = torch.rand(3, 512, 1, generator=generator).unbind(0)
            half = 0.025 + 0.25 * size
            first, last = position - centre + half, position - centre - half
            outside = F.relu(-first) + F.relu(last)
            wall = -4 * (outside / softness).clamp(max=1)
            sides = torch.cat([first, last], 1) * 8
            sides = sides.sign() * torch.log2(sides.abs() + 1) / math.log2(8)
            loss = (mlp(sides) - wall).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mlp.zero_grad()


@dataclass
class ImageFeatures:
    """The neck's three levels (fine to coarse), and what the detector reads of the coarsest."""

    trunk: Tensor
    levels: list[Tensor]
    sequence: Tensor
    """(patches, pictures, width)."""
    positions: Tensor
    geometry: Tensor
    """(1, pictures, width): the geometry encoder's token for a prompt without geometry."""


@dataclass
class Outputs:
    """Of every decoder layer: (layers, phrases, queries, ...)."""

    logits: Tensor
    boxes: Tensor
    """Centre and size, as shares of the picture."""
    presence: Tensor
    """(layers, phrases)."""
    queries: Tensor
    """The last layer's."""
    memory: Tensor
    prompt: Tensor
    prompt_padding: Tensor


def inverse_sigmoid(x: Tensor, eps: float = 1e-3) -> Tensor:
    """Upstream's, with its margin: the logit of a share."""
    x = x.clamp(0, 1)
    return torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))


def neck_sequence(model: Sam3Modules, trunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Coarsest level, its sequence and positions, from the image encoder's features."""
    vision = model.backbone.vision_backbone
    coarse = vision.convs[2](trunk)
    positions = vision.position_encoding(coarse).to(coarse.dtype)
    return (
        coarse,
        coarse.flatten(2).permute(2, 0, 1),
        positions.flatten(2).permute(2, 0, 1),
    )


def encode_images(model: Sam3Modules, images: Tensor) -> ImageFeatures:
    """The image part; the neck's fourth level is not computed, since SAM3's detector drops it."""
    vision = model.backbone.vision_backbone
    trunk = vision.trunk(images)[-1]
    coarse, sequence, positions = neck_sequence(model, trunk)
    geometry = model.geometry_encoder.encode_cls(sequence, positions)
    levels = [vision.convs[0](trunk), vision.convs[1](trunk), coarse]
    return ImageFeatures(trunk, levels, sequence, positions, geometry)


def encode_text(model: Sam3Modules, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, phrases, width) features and the (phrases, tokens) padding mask."""
    language = model.backbone.language_backbone
    _, features = language.encoder(tokens)
    return language.resizer(features.transpose(0, 1)), tokens.eq(0)


def make_prompt(
    text: Tensor, padding: Tensor, geometry: Tensor, phrase_text: Tensor, phrase_picture: Tensor
) -> tuple[Tensor, Tensor]:
    """Text tokens and the geometry token of each phrase, and which are padding."""
    prompt = torch.cat([text[:, phrase_text], geometry[:, phrase_picture].to(text.dtype)], 0)
    never = torch.zeros(len(phrase_text), 1, dtype=torch.bool)
    return prompt, torch.cat([padding[phrase_text], never], 1)


def fuse(
    model: Sam3Modules, sequence: Tensor, positions: Tensor, prompt: Tensor, padding: Tensor
) -> dict[str, Any]:
    """The fusion encoder, on one copy of the picture for each phrase."""
    result: dict[str, Any] = model.transformer.encoder(
        src=[sequence],
        src_pos=[positions],
        prompt=prompt,
        prompt_pos=torch.zeros_like(prompt),
        prompt_key_padding_mask=padding,
        feat_sizes=[(GRID, GRID)],
    )
    return result


def detect(
    model: Sam3Modules,
    image: ImageFeatures,
    text: tuple[Tensor, Tensor],
    phrase_text: Tensor,
    phrase_picture: Tensor,
) -> Outputs:
    """Fusion encoder, decoder and scoring; upstream's graph with the decoder's every layer kept."""
    prompt, padding = make_prompt(*text, image.geometry, phrase_text, phrase_picture)
    fused = fuse(
        model,
        image.sequence[:, phrase_picture],
        image.positions[:, phrase_picture],
        prompt,
        padding,
    )
    decoder = model.transformer.decoder
    hidden, references, presence, _ = decoder(
        tgt=decoder.query_embed.weight[:, None].expand(-1, len(phrase_text), -1),
        memory=fused["memory"],
        pos=fused["pos_embed"],
        level_start_index=fused["level_start_index"],
        spatial_shapes=fused["spatial_shapes"],
        valid_ratios=fused["valid_ratios"],
        memory_text=prompt,
        text_attention_mask=padding,
    )
    hidden, references = hidden.transpose(1, 2), references.transpose(1, 2)
    boxes = (inverse_sigmoid(references) + decoder.bbox_embed(hidden)).sigmoid()
    return Outputs(
        logits=model.dot_prod_scoring(hidden, prompt, padding).squeeze(-1),
        boxes=boxes,
        presence=presence.squeeze(1),
        queries=hidden[-1],
        memory=fused["memory"],
        prompt=prompt,
        prompt_padding=padding,
    )


def segment(
    model: Sam3Modules,
    image: ImageFeatures,
    outputs: Outputs,
    phrase_picture: Tensor,
    phrases: Tensor,
    queries: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mask logits of some queries of some phrases, and those of the phrase as a whole.

    Args:
        model: the model.
        image: what ``encode_images`` gave.
        outputs: what ``detect`` gave.
        phrase_picture: (all phrases,) the picture of each.
        phrases: (n,) which phrases.
        queries: (n, q, width) the queries of each of them.
    """
    result = model.segmentation_head(
        backbone_feats=image.levels,
        obj_queries=queries[None],
        image_ids=phrase_picture[phrases],
        encoder_hidden_states=outputs.memory[:, phrases],
        prompt=outputs.prompt[:, phrases],
        prompt_mask=outputs.prompt_padding[phrases],
    )
    return result["pred_masks"], result["semantic_seg"][:, 0]


# --------------------------------------------------------------------------------------- data


@dataclass
class Batch:
    """Pictures with what is in them, and phrases about them. Every picture has room for MOST_SHAPES."""

    images: Tensor
    masks: Tensor
    """(pictures, shapes, MASK_SIDE, MASK_SIDE), 0..1."""
    boxes: Tensor
    """(pictures, shapes, 4) left, top, right, bottom."""
    cover: Tensor
    """(pictures, patches): how much of a patch its owner covers."""
    owner: Tensor
    """(pictures, patches): the shape that covers most of a patch."""
    owner_colour: Tensor
    owner_shape: Tensor
    owner_box: Tensor
    owner_mask: Tensor
    """(pictures, patches, CELLS * CELLS): the owner's mask inside the patch."""
    picture_index: Tensor
    """Where in the pool the pictures are."""
    tokens: Tensor
    """(texts, CONTEXT): each text once."""
    phrase_text: Tensor
    phrase_picture: Tensor
    matches: Tensor
    """(phrases, shapes): which shapes a phrase names."""


class Pool:
    """The rendered pictures, in the order of their shards; grows while they are being rendered."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._shards = -(-count // pictures.SHARD_PICTURES)
        self._loaded: list[dict[str, NDArray[Any]]] = []

    def __len__(self) -> int:
        return len(self._loaded) * pictures.SHARD_PICTURES

    @property
    def complete(self) -> bool:
        return len(self._loaded) == self._shards

    def grow(self, shards: int) -> None:
        """Load up to ``shards`` more of what is rendered."""
        for _ in range(shards):
            path = pictures.shard_path(self._folder, len(self._loaded))
            if self.complete or not path.exists():
                return
            with np.load(path) as shard:
                self._loaded.append({name: shard[name] for name in shard.files})

    def gather(self, name: str, indices: NDArray[np.int64]) -> NDArray[Any]:
        shards, offsets = np.divmod(indices, pictures.SHARD_PICTURES)
        return np.stack([self._loaded[s][name][o] for s, o in zip(shards, offsets, strict=True)])


def make_batch(
    pool: Pool,
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    count: int,
    phrases: int,
    *,
    among: int | None = None,
    augment: bool = True,
) -> Batch:
    """``count`` random pictures of the pool (of its first ``among``), mirrored and relit at random."""
    index = rng.integers(among or len(pool), size=count)
    images = pictures.normalise(torch.from_numpy(pool.gather("images", index)))
    masks = torch.from_numpy(pool.gather("masks", index)).float() / 255
    boxes = torch.from_numpy(pool.gather("boxes", index))
    names = pool.gather("names", index)
    if augment:
        mirrored = torch.from_numpy(rng.random(count) < 0.5)
        images[mirrored] = images[mirrored].flip(-1)
        masks[mirrored] = masks[mirrored].flip(-1)
        left, top, right, bottom = boxes[mirrored].unbind(-1)
        boxes[mirrored] = torch.stack([1 - right, top, 1 - left, bottom], -1)
        contrast = torch.from_numpy(rng.uniform(0.94, 1.06, (count, 1, 1, 1))).float()
        brightness = torch.from_numpy(rng.uniform(-0.04, 0.04, (count, 1, 1, 1))).float()
        images = images * contrast + brightness

    shapes = pictures.MOST_SHAPES
    cells = masks.view(count, shapes, GRID, CELLS, GRID, CELLS).transpose(3, 4)
    cells = cells.reshape(count, shapes, PATCHES, CELLS * CELLS)
    cover, owner = cells.mean(-1).max(1)
    known = torch.from_numpy(names).clamp(min=0)

    texts: dict[str, int] = {}
    phrase_text: list[int] = []
    phrase_picture: list[int] = []
    matches = np.zeros((count * phrases, shapes), bool)
    for i in range(count if phrases else 0):
        shown = names[i, 0] >= 0
        for phrase in pictures.draw_phrases(rng, names[i, 0][shown], names[i, 1][shown], phrases):
            matches[len(phrase_text), list(phrase.matches)] = True
            phrase_text.append(texts.setdefault(phrase.text, len(texts)))
            phrase_picture.append(i)
    tokens = [vocabulary.encode(text) for text in texts]
    return Batch(
        images=images,
        masks=masks,
        boxes=boxes,
        cover=cover,
        owner=owner,
        owner_colour=known[:, 0].gather(1, owner),
        owner_shape=known[:, 1].gather(1, owner),
        owner_box=boxes.gather(1, owner[..., None].expand(-1, -1, 4)),
        owner_mask=cells.gather(1, owner[:, None, :, None].expand(-1, 1, -1, CELLS**2))[:, 0],
        picture_index=torch.from_numpy(index),
        tokens=torch.from_numpy(np.stack(tokens)) if tokens else torch.zeros(0, CONTEXT).long(),
        phrase_text=torch.tensor(phrase_text, dtype=torch.long),
        phrase_picture=torch.tensor(phrase_picture, dtype=torch.long),
        matches=torch.from_numpy(matches),
    )


def batches(make: Callable[[int], Batch], first: int, stop: threading.Event) -> Iterator[Batch]:
    """Batches of the steps from ``first`` on, made ahead by a thread."""
    ready: queue.Queue[Batch | Exception] = queue.Queue(3)

    def produce() -> None:
        step = first
        while not stop.is_set():
            try:
                item: Batch | Exception = make(step)
            except Exception as error:  # noqa: BLE001  raised again where the batch is wanted
                item = error
            step += 1
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.5)
                    break
                except queue.Full:
                    continue

    threading.Thread(target=produce, daemon=True).start()
    while True:
        item = ready.get()
        if isinstance(item, Exception):
            raise item
        yield item


# --------------------------------------------------------------------------------------- losses

Losses = dict[str, Tensor]

_CENTRES = (torch.arange(GRID) + 0.5) / GRID
PATCH_CENTRES = torch.stack([_CENTRES.repeat(GRID), _CENTRES.repeat_interleave(GRID)], -1)
"""(patches, 2) x and y."""


def focal(logits: Tensor, target: Tensor, alpha: float, gamma: float) -> Tensor:
    """Binary cross entropy that fades for what is already right."""
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    share = logits.sigmoid()
    miss = share * (1 - target) + (1 - share) * target
    return 2 * entropy * miss.pow(gamma) * (alpha * target + (1 - alpha) * (1 - target))


def corners(boxes: Tensor) -> Tensor:
    """Centre and size to left, top, right, bottom."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], -1)


def centre_and_size(boxes: Tensor) -> Tensor:
    return torch.cat([(boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]], -1)


def generalised_iou(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """GIoU and IoU of boxes given by their corners; shapes broadcast."""

    def area(low: Tensor, high: Tensor) -> Tensor:
        return (high - low).clamp(min=0).prod(-1)

    a_low, a_high, b_low, b_high = first[..., :2], first[..., 2:], second[..., :2], second[..., 2:]
    shared = area(torch.maximum(a_low, b_low), torch.minimum(a_high, b_high))
    union = (area(a_low, a_high) + area(b_low, b_high) - shared).clamp(min=1e-7)
    hull = area(torch.minimum(a_low, b_low), torch.maximum(a_high, b_high)).clamp(min=1e-7)
    iou = shared / union
    return iou - (hull - union) / hull, iou


def share_of(right: Tensor, among: Tensor) -> Tensor:
    return (right & among).sum() / among.sum().clamp(min=1)


def patch_losses(heads: TrainingHeads, trunk: Tensor, batch: Batch) -> tuple[Losses, Losses]:
    """What the image encoder's features say about each patch. Returns losses and figures."""
    predicted = heads.patch(heads.norm(trunk.flatten(2).transpose(1, 2))).float()
    there, colour, shape, sides, mask, centre = predicted.split(heads.parts, -1)
    on = batch.cover > 0.2
    weight = on.float()
    certain = (on | (batch.cover <= 0.05)).float()
    touched = (batch.cover > 0.01).float()
    count = weight.sum().clamp(min=1)

    def over_objects(loss: Tensor) -> Tensor:
        return (loss * weight).sum() / count

    side_target = batch.owner_box - PATCH_CENTRES.repeat(1, 2)
    centre_target = batch.owner_box[..., :2] + batch.owner_box[..., 2:] - 1
    there = there[..., 0]
    there_loss = F.binary_cross_entropy_with_logits(there, weight, reduction="none")
    mask_loss = F.binary_cross_entropy_with_logits(mask, batch.owner_mask, reduction="none").mean(
        -1
    )
    losses = {
        "there": 3 * (there_loss * certain).mean(),
        "colour": over_objects(
            F.cross_entropy(colour.transpose(1, 2), batch.owner_colour, reduction="none")
        ),
        "shape": 2
        * over_objects(F.cross_entropy(shape.transpose(1, 2), batch.owner_shape, reduction="none")),
        "sides": 5 * over_objects((sides * OFFSET_SCALE - side_target).abs().sum(-1)),
        "centre": 2 * over_objects((centre - centre_target).abs().sum(-1)),
        "patch_mask": 2 * (mask_loss * touched).sum() / touched.sum().clamp(min=1),
    }
    with torch.no_grad():
        figures = {
            "colour_right": share_of(colour.argmax(-1) == batch.owner_colour, on),
            "shape_right": share_of(shape.argmax(-1) == batch.owner_shape, on),
            "there_right": share_of((there > 0) == on, certain > 0),
        }
    return losses, figures


def named_patches(batch: Batch) -> tuple[Tensor, Tensor]:
    """(phrases, patches): the patch belongs to something named; the patch counts in the loss."""
    picture = batch.phrase_picture
    cover = batch.cover[picture]
    named = batch.matches.gather(1, batch.owner[picture]) & (cover > 0.2)
    return named.float(), ((cover <= 0.05) | (cover > 0.2)).float()


def _found(logits: Tensor, named: Tensor, counts: Tensor) -> Losses:
    """Precision and recall of patches."""
    yes = (logits.detach() > 0) & (counts > 0)
    return {
        "patch_precision": share_of(named > 0, yes),
        "patch_recall": share_of(logits.detach() > 0, named > 0),
    }


def match_logits(
    heads: TrainingHeads, sequence: Tensor, text: Tensor, padding: Tensor, batch: Batch
) -> Tensor:
    """(phrases, patches): the product of a patch's feature and the phrase's mean token."""
    valid = (~padding).float().t()[..., None]
    phrase = (text.float() * valid).sum(0) / valid.sum(0)
    features = sequence.float().transpose(0, 1)[batch.phrase_picture]
    scores = torch.einsum("npc,nc->np", features, phrase[batch.phrase_text])
    return scores / math.sqrt(DEMO.model_width) * heads.match_scale[0] + heads.match_scale[1]


def align_losses(
    model: Sam3Modules, heads: TrainingHeads, trunk: Tensor, batch: Batch
) -> tuple[Losses, Losses]:
    """Stage 2: a patch's feature answers to the phrases that name it."""
    _, sequence, _ = neck_sequence(model, trunk)
    text, padding = encode_text(model, batch.tokens)
    logits = match_logits(heads, sequence, text, padding, batch)
    named, counts = named_patches(batch)
    total = named.sum().clamp(min=1)
    sides = heads.match_box(sequence.transpose(0, 1)).float() * OFFSET_SCALE
    target = batch.owner_box - PATCH_CENTRES.repeat(1, 2)
    miss = (sides - target).abs().sum(-1)[batch.phrase_picture]
    losses = {
        "match": (focal(logits, named, 0.6, 1.0) * counts).sum() / total,
        "match_sides": 3 * (miss * named).sum() / total,
    }
    return losses, _found(logits, named, counts)


def named_losses(heads: TrainingHeads, memory: Tensor, batch: Batch) -> tuple[Losses, Losses]:
    """The fused features say which patches belong to something named, and to what box."""
    predicted = heads.named(memory.transpose(0, 1)).float()
    logits, sides, centre = predicted.split((1, 4, 2), -1)
    named, counts = named_patches(batch)
    total = named.sum().clamp(min=1)
    box = batch.owner_box[batch.phrase_picture]
    side_miss = (sides * OFFSET_SCALE - (box - PATCH_CENTRES.repeat(1, 2))).abs().sum(-1)
    centre_miss = (centre - (box[..., :2] + box[..., 2:] - 1)).abs().sum(-1)
    losses = {
        "named": 2 * (focal(logits[..., 0], named, 0.6, 1.0) * counts).sum() / total,
        "named_sides": 3 * (side_miss * named).sum() / total,
        "named_centre": 2 * (centre_miss * named).sum() / total,
    }
    return losses, _found(logits[..., 0], named, counts)


def fuse_losses(
    model: Sam3Modules, heads: TrainingHeads, trunk: Tensor, batch: Batch
) -> tuple[Losses, Losses]:
    """Stage 3: the same through the fusion encoder."""
    _, sequence, positions = neck_sequence(model, trunk)
    geometry = model.geometry_encoder.encode_cls(sequence, positions)
    text, padding = encode_text(model, batch.tokens)
    prompt, prompt_padding = make_prompt(
        text, padding, geometry, batch.phrase_text, batch.phrase_picture
    )
    picture = batch.phrase_picture
    fused = fuse(model, sequence[:, picture], positions[:, picture], prompt, prompt_padding)
    losses, figures = named_losses(heads, fused["memory"], batch)
    logits = match_logits(heads, sequence, text, padding, batch)
    named, counts = named_patches(batch)
    entropy = (focal(logits, named, 0.6, 1.0) * counts).sum() / named.sum().clamp(min=1)
    return losses | {"match": 0.3 * entropy}, figures


@torch.no_grad()
def assign(logits: Tensor, boxes: Tensor, target: Tensor, matches: Tensor) -> tuple[Tensor, ...]:
    """The best one-to-one assignment of queries to the named shapes of each phrase.

    Returns:
        Phrase, query and shape of each pair.
    """
    confidence = (logits.clamp(-6, 6) / 3)[..., None]
    distance = (boxes[:, :, None] - target[:, None]).abs().sum(-1)
    overlap, _ = generalised_iou(corners(boxes)[:, :, None], corners(target)[:, None])
    cost = (5 * distance - 2 * overlap - confidence).numpy()
    pairs: list[tuple[int, int, int]] = []
    for phrase in matches.any(1).nonzero()[:, 0].tolist():
        shapes = matches[phrase].nonzero()[:, 0].numpy()
        queries, columns = linear_sum_assignment(cost[phrase][:, shapes])
        pairs += [(phrase, int(q), int(s)) for q, s in zip(queries, shapes[columns], strict=True)]
    return torch.tensor(pairs, dtype=torch.long).reshape(-1, 3).unbind(1)


def joint_losses(
    model: Sam3Modules, heads: TrainingHeads, batch: Batch, rng: np.random.Generator
) -> tuple[Losses, Losses]:
    """Stage 4: everything. Class, box and presence losses of each decoder layer, masks of the last."""
    image = encode_images(model, batch.images)
    text = encode_text(model, batch.tokens)
    outputs = detect(model, image, text, batch.phrase_text, batch.phrase_picture)
    present = batch.matches.any(1)
    target = centre_and_size(batch.boxes)[batch.phrase_picture]
    total = batch.matches.sum().clamp(min=1).float()
    absent = (~present).sum()
    losses: Losses = dict.fromkeys(("class", "box", "overlap", "presence"), torch.zeros(()))
    layers = len(outputs.logits)
    for layer in range(layers):
        weight = 1.0 if layer == layers - 1 else 0.6
        logits, boxes = outputs.logits[layer].float(), outputs.boxes[layer].float()
        phrase, query, shape = assign(logits.detach(), boxes.detach(), target, batch.matches)
        assigned = torch.zeros_like(logits)
        assigned[phrase, query] = 1
        wanted, got = target[phrase, shape], boxes[phrase, query]
        overlap, iou = generalised_iou(corners(got), corners(wanted))
        presence = outputs.presence[layer].float().flatten()
        step_losses = {
            "class": focal(logits, assigned, 0.5, 1.5).sum() / (total + 0.3 * absent),
            "box": 5 * (got - wanted).abs().sum() / total,
            "overlap": 2 * (1 - overlap).sum() / total,
            "presence": 2 * F.binary_cross_entropy_with_logits(presence, present.float()),
        }
        for name, value in step_losses.items():
            losses[name] = losses[name] + weight * value
    more, figures = named_losses(heads, outputs.memory, batch)
    losses |= more
    losses |= _mask_losses(model, image, outputs, batch, (phrase, query, shape), rng)
    more, patch_figures = patch_losses(heads, image.trunk, batch)
    losses |= {name: 0.5 * value for name, value in more.items()}
    with torch.no_grad():
        figures |= patch_figures | {
            "box_iou": iou.mean(),
            "presence_right": ((presence > 0) == present).float().mean(),
            "recall": ((logits[phrase, query] > 0) & (iou > 0.5)).float().mean(),
            "precision": share_of(assigned > 0, logits > 0),
        }
    return losses, figures


def _mask_losses(
    model: Sam3Modules,
    image: ImageFeatures,
    outputs: Outputs,
    batch: Batch,
    pairs: tuple[Tensor, Tensor, Tensor],
    rng: np.random.Generator,
) -> Losses:
    """Masks of a few phrases, more often of those that name several shapes: the hardest to tell apart."""
    phrase, query, shape = pairs
    counts = batch.matches.sum(1).numpy()
    weights = np.minimum(counts, 4) / max(1, np.minimum(counts, 4).sum())
    chosen = min(_MASK_PHRASES, int((counts > 0).sum()))
    if not chosen:
        return {}
    phrases = torch.from_numpy(np.sort(rng.choice(len(counts), chosen, replace=False, p=weights)))
    # Only the assigned queries need a mask, each phrase's in the first places of its row.
    place = torch.full((len(counts),), -1)
    place[phrases] = torch.arange(chosen)
    used = place[phrase] >= 0
    phrase, query, shape = phrase[used], query[used], shape[used]
    row = place[phrase]
    column = (row[:, None] == row[None, :]).tril(-1).sum(1)
    queries = outputs.queries.new_zeros(chosen, int(column.max()) + 1, DEMO.model_width)
    queries = queries.index_put((row, column), outputs.queries[phrase, query])
    masks, whole = segment(model, image, outputs, batch.phrase_picture, phrases, queries)
    logits = masks[row, column].float()
    target = batch.masks[batch.phrase_picture[phrase], shape]
    share = logits.sigmoid()
    shared = (share * target).sum((1, 2))
    dice = 1 - (2 * shared + 1) / (share.sum((1, 2)) + target.sum((1, 2)) + 1)
    named = batch.masks[batch.phrase_picture[phrases]] * batch.matches[phrases][..., None, None]
    union = named.sum(1).clamp(max=1)
    return {
        "mask": 10 * F.binary_cross_entropy_with_logits(logits, target),
        "dice": 3 * dice.mean(),
        "whole_mask": 3 * F.binary_cross_entropy_with_logits(whole.float(), union),
    }


# --------------------------------------------------------------------------------------- measuring


@torch.no_grad()
def predict(
    model: Sam3Modules,
    encode: Callable[[str], NDArray[np.int64]],
    image: Any,
    phrases: Sequence[str],
    threshold: float = 0.5,
) -> list[Prediction]:
    """What the model finds in a PIL image, for each phrase, by the training's own forward pass."""
    features = encode_images(
        model, pictures.normalise(pictures.squash(image, DEMO.image_size))[None]
    )
    text = encode_text(model, torch.from_numpy(np.stack([encode(p) for p in phrases])))
    everyone = torch.arange(len(phrases))
    first_picture = torch.zeros_like(everyone)
    outputs = detect(model, features, text, everyone, first_picture)
    scores = outputs.logits[-1].sigmoid() * outputs.presence[-1].reshape(-1, 1).sigmoid()
    found: list[Prediction] = []
    for phrase in range(len(phrases)):
        keep = scores[phrase] > threshold
        if not keep.any():
            found.append(np.zeros((0, image.height, image.width), bool))
            continue
        chosen = torch.tensor([phrase])
        queries = outputs.queries[phrase, keep][None]
        masks, _ = segment(model, features, outputs, first_picture, chosen, queries)
        masks = F.interpolate(
            masks, (image.height, image.width), mode="bilinear", align_corners=False
        )
        found.append((masks[0] > 0).numpy())
    return found


def measure_held_out(model: Sam3Modules, vocabulary: Vocabulary, count: int) -> Measured:
    """Figures on ``count`` pictures of this generator that training never sees, with unseen nouns."""
    rng = np.random.default_rng(HELD_OUT_SEED)

    def cases() -> Iterator[tuple[Any, NDArray[np.bool_], Sequence[tuple[str, tuple[int, ...]]]]]:
        for _ in range(count):
            picture = pictures.draw_picture(rng, full_size=True)
            phrases = pictures.draw_phrases(
                rng, picture.colours, picture.shapes, 6, pictures.HELD_OUT_NOUNS
            )
            yield picture.image, picture.masks, [(p.text, p.matches) for p in phrases]

    def group(image: Any) -> str:
        return size_name(image) if image.size in pictures.USUAL_SIZES else "other sizes"

    return measure(
        cases(), lambda image, texts: predict(model, vocabulary.encode, image, texts), group
    )


# --------------------------------------------------------------------------------------- training


class Training:
    """The state of a run, and its four stages."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.run: Path = arguments.run
        self.seed: int = arguments.seed
        self.minutes: float = arguments.minutes
        self.save_minutes: float = arguments.save_minutes
        self.measure_minutes: float = arguments.measure_minutes
        self.checkpoint = self.run / "training.pt"
        torch.manual_seed(self.seed)
        self.vocabulary = Vocabulary()
        self.model = build_modules(DEMO)
        self.model.requires_grad_(True)
        self.heads = TrainingHeads()
        initialise(self.model, self.vocabulary)
        if not self.checkpoint.exists():
            fit_box_bias(self.model)
        use_plain_attention(self.model)
        self.pool = Pool(self.run / "pool", arguments.pictures)
        self.stage = 0
        self.step = 0
        self.spent = 0.0
        """Minutes of the current stage, over all runs."""
        self.average: dict[str, Tensor] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self.total_steps: dict[str, int] = {}
        self.stopping = False
        self._saved_optimizer: dict[str, Any] | None = None
        self._features: Tensor | None = None
        self._log = (self.run / "log.jsonl").open("a")
        if self.checkpoint.exists():
            self._load()

    # ---- what survives a stop

    def _load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.average = state["average"]
        self.stage, self.step, self.spent = state["stage"], state["step"], state["spent"]
        self.total_steps = state["total_steps"]
        self._saved_optimizer = state["optimizer"]
        torch.set_rng_state(state["torch_rng"])

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "average": self.average,
            "stage": self.stage,
            "step": self.step,
            "spent": self.spent,
            "total_steps": self.total_steps,
            "optimizer": self.optimizer.state_dict() if self.optimizer else None,
            "torch_rng": torch.get_rng_state(),
        }
        unfinished = self.checkpoint.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(self.checkpoint)

    def log(self, **values: Any) -> None:
        self._log.write(json.dumps(values) + "\n")
        self._log.flush()

    # ---- one stage

    def _parameters(self, name: str) -> list[tuple[list[nn.Parameter], float]]:
        """The parameters that a stage trains, with their share of the learning rate."""
        model, heads = self.model, self.heads
        trunk = list(model.backbone.vision_backbone.trunk.parameters())
        patch = [*heads.norm.parameters(), *heads.patch.parameters()]
        if name == "trunk":
            return [(trunk + patch, 1.0)]
        if name == "joint":
            first = {id(p) for p in trunk + patch}
            everything = [*model.parameters(), *heads.named.parameters()]
            return [
                (trunk + patch, _TRUNK_RATE),
                ([p for p in everything if id(p) not in first], 1.0),
            ]
        text = model.backbone.language_backbone
        meet = [
            *model.backbone.vision_backbone.convs[2].parameters(),
            *text.parameters(),
            heads.match_scale,
        ]
        if name == "align":
            return [(meet + list(heads.match_box.parameters()), 1.0)]
        fusion = [*model.transformer.encoder.parameters(), *model.geometry_encoder.parameters()]
        return [(meet + fusion + list(heads.named.parameters()), 1.0)]

    def _make_optimizer(self, name: str, rate: float) -> torch.optim.Optimizer:
        groups = []
        for parameters, share in self._parameters(name):
            for decayed in (True, False):  # biases, norms and single vectors keep their size
                chosen = [p for p in parameters if (p.dim() > 1) == decayed]
                groups.append(
                    {"params": chosen, "share": share, "weight_decay": 0.02 if decayed else 0.0}
                )
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
        if self._saved_optimizer is not None:
            optimizer.load_state_dict(self._saved_optimizer)
            self._saved_optimizer = None
        return optimizer

    @torch.no_grad()
    def _cache_features(self) -> None:
        """The frozen image encoder's features, so that the two short stages do not compute them."""
        trunk = self.model.backbone.vision_backbone.trunk
        features = []
        count = min(_CACHED_PICTURES, len(self.pool))
        for start in tqdm(range(0, count, 50), desc="features", mininterval=5):
            index = np.arange(start, min(start + 50, count))
            images = torch.from_numpy(self.pool.gather("images", index))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                features.append(trunk(pictures.normalise(images))[-1].bfloat16())
        self._features = torch.cat(features)

    @torch.no_grad()
    def _identify_spaces(self) -> None:
        """After "align": text attention starts as "compare with the phrase", box heads as they were."""
        width = DEMO.model_width
        for layer in self.model.transformer.encoder.layers:
            weight = layer.cross_attn_image.in_proj_weight[: 2 * width]
            weight.mul_(0.3).add_(0.7 * torch.eye(width).repeat(2, 1))
        self.heads.named.weight[1:5].copy_(self.heads.match_box.weight)
        self.heads.named.bias[1:5].copy_(self.heads.match_box.bias)

    def _losses(self, name: str, batch: Batch) -> tuple[Losses, Losses]:
        if name == "trunk":
            return patch_losses(
                self.heads, self.model.backbone.vision_backbone.trunk(batch.images)[-1], batch
            )
        if name == "joint":
            rng = np.random.default_rng((self.seed, self.stage, self.step, 1))
            return joint_losses(self.model, self.heads, batch, rng)
        assert self._features is not None
        trunk = self._features[batch.picture_index]
        losses = align_losses if name == "align" else fuse_losses
        return losses(self.model, self.heads, trunk, batch)

    def _average_weights(self) -> None:
        """A running mean of the weights, shorter at first."""
        decay = min(_AVERAGE_DECAY, (1 + self.step) / (10 + self.step))
        current = dict(self.model.named_parameters())
        if not self.average:
            self.average = {name: value.detach().clone() for name, value in current.items()}
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.values()),
                [current[name].detach() for name in self.average],
                1 - decay,
            )

    def averaged_model(self) -> Sam3Modules:
        """A copy of the model with the running mean of its weights."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.average, strict=False)
        use_plain_attention(model)  # the copy's methods are still bound to the original
        return model

    def _make_batch(self, step: int) -> Batch:
        name, _, _, count, phrases = _STAGES[self.stage]
        rng = np.random.default_rng((self.seed, self.stage, step))
        self.pool.grow(1)
        cached = len(self._features) if self._features is not None else None
        if name in ("align", "fuse"):  # cached features: no mirroring
            return make_batch(
                self.pool, self.vocabulary, rng, count, phrases, among=cached, augment=False
            )
        return make_batch(self.pool, self.vocabulary, rng, count, phrases)

    def run_stage(self) -> None:
        """Train the current stage until its minutes are spent, or until told to stop."""
        name, share, rate, _, _ = _STAGES[self.stage]
        budget = self.minutes * share
        self.pool.grow(2)
        if name in ("align", "fuse") and self._features is None:
            self.pool.grow(-(-_CACHED_PICTURES // pictures.SHARD_PICTURES))
            self._cache_features()
        if name == "fuse" and self.step == 0:
            self._identify_spaces()
        self.optimizer = self._make_optimizer(name, rate)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        warmup = {"trunk": 100, "align": 30, "fuse": 60, "joint": 120}[name]
        sums: dict[str, float] = {}
        summed = 0
        stop = threading.Event()
        stream = batches(self._make_batch, self.step, stop)
        bar = tqdm(
            desc=name,
            total=round(budget * 60),
            initial=round(self.spent * 60),
            unit="s",
            mininterval=15,
            maxinterval=30,
        )
        before = saved = measured = time.monotonic()
        while self.spent < budget and not self.stopping:
            progress = self.spent / budget
            factor = _LOWEST_RATE + (1 - _LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
            factor *= min(1.0, (self.step + 1) / warmup)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["share"] * factor
            batch = next(stream)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses, figures = self._losses(name, batch)
            loss = torch.stack(list(losses.values())).sum()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, 2.0 if name == "joint" else 1.0)
            if torch.isfinite(norm):
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if name == "joint":
                self._average_weights()
            self.step += 1
            summed += 1
            for key, value in {**losses, **figures, "loss": loss, "norm": norm}.items():
                sums[key] = sums.get(key, 0.0) + float(value.detach())
            now = time.monotonic()
            self.spent += (now - before) / 60
            bar.update(min(round(self.spent * 60), bar.total) - bar.n)
            before = now
            if self.step % 50 == 0:
                means = {key: round(value / summed, 4) for key, value in sums.items()}
                self.log(
                    stage=name,
                    step=self.step,
                    minutes=round(self.spent, 3),
                    pictures=len(self.pool),
                    **means,
                )
                bar.set_postfix(step=self.step, loss=means["loss"])
                sums, summed = {}, 0
            if now - saved > self.save_minutes * 60:
                self.save()
                saved = now
            if name == "joint" and now - measured > self.measure_minutes * 60:
                result = measure_held_out(self.averaged_model(), self.vocabulary, 40)
                self.log(stage=name, step=self.step, held_out=result.figures())
                measured = time.monotonic()
        bar.close()
        stop.set()
        self.total_steps[name] = self.step
        if self.spent >= budget:
            self.stage, self.step, self.spent, self.optimizer = self.stage + 1, 0, 0.0, None
        self.save()

    def train(self) -> bool:
        """All stages that are left. Returns whether the training is complete."""
        while self.stage < len(_STAGES) and not self.stopping:
            self.run_stage()
        return self.stage == len(_STAGES)


# --------------------------------------------------------------------------------------- export


def export(model: Sam3Modules, vocabulary: Vocabulary, path: Path) -> None:
    """Write a checkpoint as ``Sam3.from_pretrained`` reads it: sam3.pt's keys, in float16."""
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    text = "backbone.language_backbone.encoder."
    # Every token that training never named gets the one row that learned to mean "not here".
    rows = torch.from_numpy(vocabulary.compact)
    weights[text + "token_embedding.weight"] = weights[text + "token_embedding.weight"][rows]
    # Positions that training never reached go on as the last one that it did.
    positions = weights[text + "positional_embedding"]
    positions[CONTEXT:] = positions[CONTEXT - 1]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    torch.save(
        {
            "model": {f"detector.{name}": value.half() for name, value in weights.items()},
            "sam3_ray_config": DEMO.to_dict(),
        },
        unfinished,
    )
    unfinished.replace(path)


def _start_rendering(run: Path, count: int, seed: int) -> subprocess.Popen[bytes] | None:
    """Render what the pool lacks in a process of low priority; wait for the first pictures."""
    pool = run / "pool"
    shards = range(-(-count // pictures.SHARD_PICTURES))
    if all(pictures.shard_path(pool, index).exists() for index in shards):
        return None
    command = [sys.executable, str(ROOT / "scripts" / "demo_pictures.py"), "pool", str(pool)]
    command += ["--count", str(count), "--seed", str(seed), "--side", str(DEMO.image_size)]
    renderer = subprocess.Popen(["nice", "-n", "5", *command])
    while not pictures.shard_path(pool, 1).exists():
        if renderer.poll() is not None:
            raise RuntimeError(f"rendering the pictures failed (exit code {renderer.returncode})")
        time.sleep(1)
    return renderer


def _parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--run", type=Path, default=Path("runs/demo"), help="work folder, resumable"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "sam3_ray" / "demo" / "sam3_demo.pt")
    parser.add_argument("--minutes", type=float, default=60, help="of training, over all stages")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pictures", type=int, default=20000, help="pictures to render")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-minutes", type=float, default=2)
    parser.add_argument("--measure-minutes", type=float, default=8)
    parser.add_argument("--held-out", type=int, default=200, help="pictures of the final figures")
    parser.add_argument(
        "--export-now", action="store_true", help="export the run as it is; train nothing"
    )
    return parser.parse_args(argv)


def _write_metrics(
    path: Path, training: Training, command: str, figures: Mapping[str, Any]
) -> None:
    metrics = json.loads(path.read_text()) if path.exists() else {}
    metrics |= {
        "seed": training.seed,
        "command": command,
        "minutes": training.minutes,
        "steps": training.total_steps,
        "held_out": figures,
    }
    path.write_text(json.dumps(metrics, indent=2) + "\n")


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    arguments.run.mkdir(parents=True, exist_ok=True)
    renderer = None
    if not arguments.export_now:
        renderer = _start_rendering(arguments.run, arguments.pictures, arguments.seed)
    training = Training(arguments)

    def stop(*_: Any) -> None:
        training.stopping = True  # the step under way is finished and saved

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    complete = arguments.export_now or training.train()
    if renderer is not None and renderer.poll() is None:
        renderer.terminate()
    if not complete:
        print("stopped; the same command goes on from here")
        return
    model = training.averaged_model()
    export(model, training.vocabulary, arguments.out)
    figures = measure_held_out(model, training.vocabulary, arguments.held_out).figures()
    training.log(exported=str(arguments.out), held_out=figures)
    given = [argument for argument in sys.argv[1:] if argument != "--export-now"]
    command = "python scripts/train_demo_checkpoint.py " + " ".join(given)
    _write_metrics(arguments.out.with_name("metrics.json"), training, command, figures)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
