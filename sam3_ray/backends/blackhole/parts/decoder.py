"""The decoder (upstream: ``decoder.TransformerDecoder``): queries find instances and refine their boxes.

Rows. The queries come first, then the presence token, then empty rows up to whole tiles; attention masks the
empty ones. A phrase's rows are ``rows_of(config)``, so that several phrases follow each other in whole tiles.

Boxes are kept as logits in float32: ``inverse_sigmoid(sigmoid(u))`` is ``u`` with its ends cut off, so that a
layer's refinement is a cut and an addition.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import ttnn
from torch import Tensor

from sam3_ray.backends.blackhole.modules import Scope, as_row, constant
from sam3_ray.backends.blackhole.parts.attention import (
    HeadsProjection,
    PackedProjection,
    PromptAttention,
    attention,
    joined,
    query_scale,
    split_heads,
)
from sam3_ray.backends.blackhole.parts.layers import (
    LayerNorm,
    Linear,
    exact_linear,
    linear,
)
from sam3_ray.backends.blackhole.placement import TILE, Placement, whole_tiles
from sam3_ray.config import Sam3Config

MASKED = -1e9
"""Added to a score, it leaves no weight after a softmax, and is finite in bfloat16."""

HIDDEN_BYTES = 720 * 1024
"""What the hidden layer of the box bias may take of a core's L1. Of four phrases it has 88 MB: 717 KiB on
each of 120 cores, which fits because nothing else of that size is there meanwhile; of 110 it does not (seen
on the mock)."""

FEW_BUFFERS = 48 * 1024
"""Bytes of a core's L1 for the product of that hidden layer, which leaves no more."""

BOX_LOGIT_LIMIT = math.log((1 - 1e-3) / 1e-3)
"""Where ``inverse_sigmoid`` (eps 1e-3, sam3/model/model_misc.py) cuts a box's logit off."""


def rows_of(config: Sam3Config) -> int:
    """Rows of one phrase: the queries and the presence token in whole tiles."""
    return whole_tiles(config.queries + 1)


def sine_matrix(width: int) -> tuple[Tensor, Tensor]:
    """A matrix and a phase whose sine is upstream's ``gen_sineembed_for_position`` of (x, y, w, h).

    Returns:
        (32, 2 * width) float32, of which the first four rows count, and (2 * width,).
    """
    half = width // 2
    places = torch.arange(half)
    frequencies = 2 * torch.pi / 10000.0 ** (2 * (places // 2) / half)
    matrix = torch.zeros(TILE, 4 * half)
    for block, coordinate in enumerate((1, 0, 2, 3)):  # y before x
        matrix[coordinate, block * half : (block + 1) * half] = frequencies
    # The odd ones are cosines.
    return matrix, ((places % 2) * torch.pi / 2).repeat(4)


def edge_matrix() -> Tensor:
    """(32, 32): times (cx, cy, w, h), it gives 8 * (x0, x1, y0, y1)."""
    matrix = torch.zeros(TILE, TILE)
    for column, (centre, size, sign) in enumerate(
        ((0, 2, -0.5), (0, 2, 0.5), (1, 3, -0.5), (1, 3, 0.5))
    ):
        matrix[centre, column] = 8.0
        matrix[size, column] = 8.0 * sign
    return matrix


def spread_matrix(grid: int) -> Tensor:
    """(2 * padded, grid * grid): a row for each column of pixels, then one for each row of pixels."""
    padded = whole_tiles(grid)
    matrix = torch.zeros(2 * padded, grid, grid)
    for i in range(grid):
        matrix[i, :, i] = 1.0
        matrix[padded + i, i, :] = 1.0
    return matrix.reshape(2 * padded, grid * grid)


def side_by_side(a: Tensor, b: Tensor) -> Tensor:
    """Two matrices on a diagonal: one product does both, and neither sees the other's input."""
    right_of_a, left_of_b = torch.zeros(len(a), b.shape[1]), torch.zeros(len(b), a.shape[1])
    return torch.cat([torch.cat([a, right_of_a], dim=1), torch.cat([left_of_b, b], dim=1)])


class BoxBias:
    """What a query's box adds to its attention to each pixel (upstream: ``_get_rpb_matrix``, "log").

    The bias of a pixel is that of its column plus that of its row. Both come from the distances of the box's
    edges, through one network whose halves do not touch, and are spread over the pixels by a product with a
    matrix of zeros and ones.

    Upstream adds nothing for the presence token. Here its row has no coordinates: its distances, and so its
    bias, are the same for every pixel, which a softmax does not see.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width, heads, grid = config.model_width, config.heads, config.grid
        self._place, self._heads, self._grid = place, heads, grid
        self._padded = whole_tiles(grid)
        self._rows = rows_of(config)
        device = place.device
        both = {
            f"boxRPB_embed_{axis}.layers.{layer}.{kind}": shape
            for kind, shapes in (
                ("weight", ((width, 2), (heads, width))),
                ("bias", ((width,), (heads,))),
            )
            for layer, shape in enumerate(shapes)
            for axis in ("x", "y")
        }
        first = {k: both[k] for k in both if ".0.weight" in k}
        first_bias = {k: both[k] for k in both if ".0.bias" in k}
        second = {k: both[k] for k in both if ".1.weight" in k}
        second_bias = {k: both[k] for k in both if ".1.bias" in k}

        def of_distances(x: Tensor, y: Tensor) -> Tensor:
            # log2(1 + |8 d|) / log2(8): the natural logarithm is computed, the rest is here.
            matrix = torch.zeros(TILE, 2 * width)
            matrix[0:2, :width], matrix[2:4, width:] = x.t(), y.t()
            return matrix / (math.log(2) * math.log2(8))

        self._first = scope.parameter(first, of_distances, dtype=ttnn.bfloat16, name="rpb.0.weight")
        self._first_bias = scope.parameter(
            first_bias,
            lambda x, y: as_row(torch.cat([x, y])),
            dtype=ttnn.bfloat16,
            name="rpb.0.bias",
        )
        self._second = scope.parameter(
            second,
            lambda x, y: side_by_side(x.t(), y.t()),
            dtype=ttnn.bfloat16,
            name="rpb.1.weight",
        )
        self._second_bias = scope.parameter(
            second_bias,
            lambda x, y: as_row(torch.cat([x, y])),
            dtype=ttnn.bfloat16,
            name="rpb.1.bias",
        )
        coordinates = torch.zeros(1, self._rows, self._padded, TILE)
        coordinates[:, : config.queries] = (8.0 * torch.arange(self._padded) / grid)[:, None]
        self._coordinates = constant(device, coordinates, dtype=ttnn.float32)
        self._edges = constant(device, edge_matrix(), dtype=ttnn.float32)
        self._spread = constant(device, spread_matrix(grid))

    def __call__(self, boxes: Any, phrases: int) -> Any:
        """(1, 1, phrases * rows, 32) float32 cxcywh -> (phrases, heads, rows, grid * grid)."""
        place, padded, rows = self._place, self._padded, phrases * self._rows
        edges = exact_linear(place, boxes, self._edges)
        edges = ttnn.reshape(edges, (phrases, self._rows, 1, TILE))
        distances = ttnn.subtract(self._coordinates, edges, memory_config=ttnn.L1_MEMORY_CONFIG)
        ttnn.deallocate(edges)
        # sign(d) * log(1 + |d|), in one pass
        logarithms = ttnn.multiply(
            distances,
            distances,
            input_tensor_a_activations=[ttnn.UnaryWithParam(ttnn.UnaryOpType.SIGN)],
            input_tensor_b_activations=[
                ttnn.UnaryWithParam(ttnn.UnaryOpType.ABS),
                ttnn.UnaryWithParam(ttnn.UnaryOpType.LOG1P),
            ],
            dtype=ttnn.bfloat16,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        ttnn.deallocate(distances)
        flat = ttnn.reshape(logarithms, (1, 1, rows * padded, TILE))
        hidden = linear(
            place,
            flat,
            self._first.value,
            self._first_bias.value,
            activation="relu",
            memory=place.memory_for(
                rows * padded,
                self._first.value.shape[-1],
                most=HIDDEN_BYTES * place.grid[0] * place.grid[1],
            ),
        )
        ttnn.deallocate(flat)
        by_axis = linear(
            place, hidden, self._second.value, self._second_bias.value, buffers=FEW_BUFFERS
        )
        ttnn.deallocate(hidden)
        by_axis = ttnn.reshape(by_axis, (phrases, self._rows, padded, 2 * self._heads))
        by_head = ttnn.permute(by_axis, (0, 3, 1, 2), memory_config=ttnn.L1_MEMORY_CONFIG)
        ttnn.deallocate(by_axis)
        halves = [
            ttnn.slice(
                by_head,
                [0, start, 0, 0],
                [phrases, start + self._heads, self._rows, padded],
                memory_config=ttnn.L1_MEMORY_CONFIG,
            )
            for start in (0, self._heads)
        ]
        ttnn.deallocate(by_head)
        together = ttnn.concat(halves, dim=3, memory_config=ttnn.L1_MEMORY_CONFIG)
        for half in halves:
            ttnn.deallocate(half)
        stacked = ttnn.reshape(together, (1, 1, rows * self._heads, 2 * padded))
        bias = linear(
            place,
            stacked,
            self._spread,
            None,
            memory=ttnn.DRAM_MEMORY_CONFIG,  # where the attention operation wants a mask
        )
        ttnn.deallocate(together)
        return ttnn.reshape(bias, (phrases, self._heads, self._rows, self._grid**2))


class Layer:
    """Upstream's ``TransformerDecoderLayer.forward``: itself, the phrase, the image, a feed-forward."""

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width = config.model_width
        self._place, self._heads = place, config.heads
        own = scope / "self_attn"
        self._own_heads = HeadsProjection(place, own, config, positions=True)
        self._self_output = Linear(place, own / "out_proj", width, width)
        self._norm2 = LayerNorm(place, scope / "norm2", width)
        self._text = PromptAttention(place, scope / "ca_text", config)
        self._catext_norm = LayerNorm(place, scope / "catext_norm", width)
        image = scope / "cross_attn"
        self._image_query = PackedProjection(
            place, image, width, (0, width), scale=query_scale(config)
        )
        self._image_heads = HeadsProjection(place, image, config, queries=False, positions=True)
        self._image_output = Linear(place, image / "out_proj", width, width)
        self._norm1 = LayerNorm(place, scope / "norm1", width)
        self._linear1 = Linear(
            place, scope / "linear1", width, config.feedforward_width, activation="relu"
        )
        self._linear2 = Linear(place, scope / "linear2", config.feedforward_width, width)
        self._norm3 = LayerNorm(place, scope / "norm3", width)

    def __call__(
        self,
        x: Any,
        query_positions: Any,
        empty: Any,
        prompt: Any,
        mask: Any,
        memory: Any,
        bias: Any,
    ) -> Any:
        """One layer.

        Args:
            x: (1, 1, phrases * rows, width) float32; consumed.
            query_positions: the same shape and type, zero where there is no query.
            empty: (1, 1, rows, rows), masks the empty rows as keys.
            prompt, mask: as ``PromptAttention`` takes them.
            memory: (1, 1, phrases * n, 2 * width), fused tokens with their positions beside them.
            bias: (phrases, heads, rows, n).
        """
        x = _normed(self._norm2, x, self._self_attention(x, query_positions, empty, mask.shape[0]))
        placed = ttnn.add(x, query_positions, memory_config=ttnn.L1_MEMORY_CONFIG)
        x = _normed(self._catext_norm, x, self._text(placed, prompt, mask))
        x = _normed(self._norm1, x, self._image_attention(x, query_positions, memory, bias))
        hidden = self._linear1(x)
        update = self._linear2(hidden)
        ttnn.deallocate(hidden)
        return _normed(self._norm3, x, update)

    def _self_attention(self, x: Any, query_positions: Any, empty: Any, phrases: int) -> Any:
        placed = ttnn.concat([x, query_positions], dim=3, memory_config=ttnn.L1_MEMORY_CONFIG)
        q, k, v = self._own_heads(placed, phrases)
        ttnn.deallocate(placed)
        heads = attention(self._place, q, k, v, mask=empty, scaled=True)
        return joined(self._self_output, heads)

    def _image_attention(self, x: Any, query_positions: Any, memory: Any, bias: Any) -> Any:
        phrases = bias.shape[0]
        placed = ttnn.add(x, query_positions, memory_config=ttnn.L1_MEMORY_CONFIG)
        q = split_heads(self._image_query(placed), phrases, self._heads)
        ttnn.deallocate(placed)
        k, v = self._image_heads(memory, phrases)
        return joined(self._image_output, attention(self._place, q, k, v, mask=bias, scaled=True))


def _normed(norm: LayerNorm, x: Any, update: Any) -> Any:
    """norm(x + update); both are consumed."""
    result = norm(x, update)
    for tensor in (x, update):
        ttnn.deallocate(tensor)
    return result


class Decoder:
    """Fused image tokens and phrases -> what each query is, its box, and the phrase's presence.

    Args:
        place: where it runs.
        scope: of upstream's ``transformer.decoder``.
        config: the model's dimensions.
    """

    def __init__(self, place: Placement, scope: Scope, config: Sam3Config) -> None:
        width, queries, rows = config.model_width, config.queries, rows_of(config)
        self._place, self._rows = place, rows
        device = place.device

        def tokens(embeddings: Tensor, presence: Tensor) -> Tensor:
            empty = torch.zeros(rows - queries - 1, width)
            return torch.cat([embeddings, presence, empty])[None, None]

        def logits(points: Tensor) -> Tensor:
            start = torch.zeros(rows, TILE)
            start[:queries, :4] = points
            return start[None, None]

        self._tokens = scope.parameter(
            {"query_embed.weight": (queries, width), "presence_token.weight": (1, width)},
            tokens,
            dtype=ttnn.float32,
        )
        self._logits = scope.parameter(
            {"reference_points.weight": (queries, 4)}, logits, dtype=ttnn.float32
        )
        sine, phase = sine_matrix(width)
        self._sine = constant(device, sine, dtype=ttnn.float32)
        self._phase = constant(device, phase.reshape(1, 1, 1, -1), dtype=ttnn.float32)
        head = scope / "ref_point_head" / "layers"
        self._position_head = [
            Linear(place, head / 0, 2 * width, width, activation="relu"),
            Linear(place, head / 1, width, width),
        ]
        is_query = torch.zeros(1, 1, rows, width)
        is_query[:, :, :queries] = 1.0
        self._is_query = constant(device, is_query, dtype=ttnn.float32)
        empty = torch.zeros(1, 1, rows, rows)
        empty[..., queries + 1 :] = MASKED
        self._empty = constant(device, empty)
        self._bias = BoxBias(place, scope, config)
        self.layers = [
            Layer(place, scope / "layers" / i, config) for i in range(config.decoder_layers)
        ]
        self._norm = LayerNorm(place, scope / "norm", width)
        self._box_head = mlp(
            place, scope / "bbox_embed" / "layers", width, width, 4, layers=3, exact=True
        )
        self._presence_norm = LayerNorm(place, scope / "presence_token_out_norm", width)
        self._presence_head = mlp(
            place, scope / "presence_token_head" / "layers", width, width, 1, layers=3
        )

    def __call__(self, memory: Any, positions: Any, prompt: Any, mask: Any) -> tuple[Any, Any, Any]:
        """Decode.

        Args:
            memory, positions: (1, 1, phrases * n, width), fused tokens and where they are.
            prompt, mask: as ``PromptAttention`` takes them.

        Returns:
            Queries after their norm, (1, 1, phrases * rows, width); box logits, (1, 1, phrases * rows, 32)
            float32, of which four columns count; presence logits, the same, one column, in the presence
            token's row.
        """
        phrases = mask.shape[0]
        x = ttnn.concat([self._tokens.value] * phrases, dim=2, memory_config=ttnn.L1_MEMORY_CONFIG)
        logits = ttnn.concat(
            [self._logits.value] * phrases, dim=2, memory_config=ttnn.L1_MEMORY_CONFIG
        )
        placed = self.placed(memory, positions)
        for layer in self.layers:
            boxes = ttnn.sigmoid(logits, memory_config=ttnn.L1_MEMORY_CONFIG)
            query_positions = self.query_positions(boxes, phrases)
            bias = self._bias(boxes, phrases)
            ttnn.deallocate(boxes)
            x = layer(x, query_positions, self._empty, prompt, mask, placed, bias)
            for tensor in (query_positions, bias):
                ttnn.deallocate(tensor)
            queries = self._norm(x)
            logits = self.refined(logits, queries)
        ttnn.deallocate(placed)
        return queries, logits, self.presence(x)

    @staticmethod
    def placed(memory: Any, positions: Any) -> Any:
        """Fused tokens with their positions beside them, (1, 1, phrases * n, 2 * width)."""
        return ttnn.concat([memory, positions], dim=3, memory_config=ttnn.L1_MEMORY_CONFIG)

    def presence(self, x: Any) -> Any:
        """(1, 1, phrases * rows, 32) float32: the presence logit in the presence token's row, column 0."""
        return run_mlp(self._presence_head, self._presence_norm(x), float32_output=True)

    def query_positions(self, boxes: Any, phrases: int) -> Any:
        """(1, 1, phrases * rows, 32) boxes -> positions of the queries, zero in the other rows; float32."""
        angles = exact_linear(self._place, boxes, self._sine, bias=self._phase)
        sines = ttnn.sin(angles, memory_config=ttnn.L1_MEMORY_CONFIG)
        ttnn.deallocate(angles)
        positions = run_mlp(self._position_head, sines, float32_output=True)
        _, _, total, width = positions.shape
        positions = ttnn.reshape(positions, (phrases, 1, total // phrases, width))
        positions = ttnn.multiply(positions, self._is_query, output_tensor=positions)
        return ttnn.reshape(positions, (1, 1, total, width))

    def refined(self, logits: Any, queries: Any) -> Any:
        """Box logits with what the queries would change; ``logits`` is consumed."""
        change = run_mlp(self._box_head, queries)
        kept = ttnn.clamp(
            logits,
            min=-BOX_LOGIT_LIMIT,
            max=BOX_LOGIT_LIMIT,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
        ttnn.deallocate(logits)
        result = ttnn.add(kept, change, memory_config=ttnn.L1_MEMORY_CONFIG)
        for tensor in (kept, change):
            ttnn.deallocate(tensor)
        return result


def mlp(
    place: Placement,
    scope: Scope,
    inputs: int,
    hidden: int,
    outputs: int,
    *,
    layers: int,
    exact: bool = False,
) -> list[Linear]:
    """Upstream's ``MLP``: relu between the layers."""
    widths = [inputs, *[hidden] * (layers - 1), outputs]
    return [
        Linear(
            place,
            scope / i,
            widths[i],
            widths[i + 1],
            activation="relu" if i < layers - 1 else None,
            pad_outputs=True,
            exact=exact,
        )
        for i in range(layers)
    ]


def run_mlp(layers: list[Linear], x: Any, *, float32_output: bool = False) -> Any:
    """Apply an ``mlp``."""
    for i, layer in enumerate(layers):
        is_last = i == len(layers) - 1
        x = layer(x, dtype=ttnn.float32 if is_last and float32_output else ttnn.bfloat16)
    return x
