"""A SAM3 of ours as ``transformers``' ``Sam3Model``: its configuration and its weights, under its names.

Written from the module trees of the two implementations. Every tensor must find its place: a name that no
rule knows is an error here, and the caller loads the result with ``strict=True``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers.models.sam3.configuration_sam3 import Sam3Config as TransformersConfig

from sam3_ray.config import Sam3Config

TRUNK = "backbone.vision_backbone.trunk"
NECK = "backbone.vision_backbone.convs"
TEXT = "backbone.language_backbone"
DECODER = "transformer.decoder"
HEAD = "segmentation_head"

VIT_NORM_EPSILON = 1e-5
"""Upstream's (``vitdet.py``); the default of transformers is 1e-6, which moves scores by up to 1e-5 here."""

POINT_PROMPTS = re.compile(r"geometry_encoder\.points_\w+_project\.(weight|bias)")
"""The only parameters of upstream's that transformers' image model lacks."""


def _mlp(theirs: str, ours: str, layers: int) -> dict[str, str]:
    return {f"{ours}.layers.{i}": f"{theirs}.layer{i + 1}" for i in range(layers)}


# Modules with a weight and perhaps a bias; "#" stands for a layer's number.
MODULES: dict[str, str] = {
    # image encoder
    f"{TRUNK}.patch_embed.proj": "vision_encoder.backbone.embeddings.patch_embeddings.projection",
    f"{TRUNK}.ln_pre": "vision_encoder.backbone.layer_norm",
    f"{TRUNK}.blocks.#.norm1": "vision_encoder.backbone.layers.#.layer_norm1",
    f"{TRUNK}.blocks.#.norm2": "vision_encoder.backbone.layers.#.layer_norm2",
    f"{TRUNK}.blocks.#.mlp.fc1": "vision_encoder.backbone.layers.#.mlp.fc1",
    f"{TRUNK}.blocks.#.mlp.fc2": "vision_encoder.backbone.layers.#.mlp.fc2",
    f"{NECK}.#.dconv_2x2": "vision_encoder.neck.fpn_layers.#.scale_layers.0",
    f"{NECK}.#.dconv_2x2_0": "vision_encoder.neck.fpn_layers.#.scale_layers.0",
    f"{NECK}.#.dconv_2x2_1": "vision_encoder.neck.fpn_layers.#.scale_layers.2",  # 1 is the GELU
    f"{NECK}.#.conv_1x1": "vision_encoder.neck.fpn_layers.#.proj1",
    f"{NECK}.#.conv_3x3": "vision_encoder.neck.fpn_layers.#.proj2",
    # text encoder
    f"{TEXT}.encoder.token_embedding": "text_encoder.text_model.embeddings.token_embedding",
    f"{TEXT}.encoder.transformer.resblocks.#.ln_1": "text_encoder.text_model.encoder.layers.#.layer_norm1",
    f"{TEXT}.encoder.transformer.resblocks.#.ln_2": "text_encoder.text_model.encoder.layers.#.layer_norm2",
    f"{TEXT}.encoder.transformer.resblocks.#.mlp.c_fc": "text_encoder.text_model.encoder.layers.#.mlp.fc1",
    f"{TEXT}.encoder.transformer.resblocks.#.mlp.c_proj": "text_encoder.text_model.encoder.layers.#.mlp.fc2",
    f"{TEXT}.encoder.ln_final": "text_encoder.text_model.final_layer_norm",
    f"{TEXT}.resizer": "text_projection",
    # geometry encoder
    "geometry_encoder.label_embed": "geometry_encoder.label_embed",
    "geometry_encoder.cls_embed": "geometry_encoder.cls_embed",
    "geometry_encoder.boxes_direct_project": "geometry_encoder.boxes_direct_project",
    "geometry_encoder.boxes_pool_project": "geometry_encoder.boxes_pool_project",
    "geometry_encoder.boxes_pos_enc_project": "geometry_encoder.boxes_pos_enc_project",
    "geometry_encoder.img_pre_norm": "geometry_encoder.vision_layer_norm",
    "geometry_encoder.final_proj": "geometry_encoder.final_proj",
    "geometry_encoder.norm": "geometry_encoder.prompt_layer_norm",
    "geometry_encoder.encode_norm": "geometry_encoder.output_layer_norm",
    "geometry_encoder.encode.#.norm1": "geometry_encoder.layers.#.layer_norm1",
    "geometry_encoder.encode.#.norm2": "geometry_encoder.layers.#.layer_norm2",
    "geometry_encoder.encode.#.norm3": "geometry_encoder.layers.#.layer_norm3",
    "geometry_encoder.encode.#.linear1": "geometry_encoder.layers.#.mlp.fc1",
    "geometry_encoder.encode.#.linear2": "geometry_encoder.layers.#.mlp.fc2",
    # fusion encoder
    "transformer.encoder.layers.#.norm1": "detr_encoder.layers.#.layer_norm1",
    "transformer.encoder.layers.#.norm2": "detr_encoder.layers.#.layer_norm2",
    "transformer.encoder.layers.#.norm3": "detr_encoder.layers.#.layer_norm3",
    "transformer.encoder.layers.#.linear1": "detr_encoder.layers.#.mlp.fc1",
    "transformer.encoder.layers.#.linear2": "detr_encoder.layers.#.mlp.fc2",
    # decoder: upstream numbers the norms in another order than it applies them
    f"{DECODER}.layers.#.norm2": "detr_decoder.layers.#.self_attn_layer_norm",
    f"{DECODER}.layers.#.catext_norm": "detr_decoder.layers.#.text_cross_attn_layer_norm",
    f"{DECODER}.layers.#.norm1": "detr_decoder.layers.#.vision_cross_attn_layer_norm",
    f"{DECODER}.layers.#.norm3": "detr_decoder.layers.#.mlp_layer_norm",
    f"{DECODER}.layers.#.linear1": "detr_decoder.layers.#.mlp.fc1",
    f"{DECODER}.layers.#.linear2": "detr_decoder.layers.#.mlp.fc2",
    f"{DECODER}.norm": "detr_decoder.output_layer_norm",
    f"{DECODER}.query_embed": "detr_decoder.query_embed",
    f"{DECODER}.reference_points": "detr_decoder.reference_points",
    f"{DECODER}.presence_token": "detr_decoder.presence_token",
    f"{DECODER}.presence_token_out_norm": "detr_decoder.presence_layer_norm",
    **_mlp("detr_decoder.box_head", f"{DECODER}.bbox_embed", 3),
    **_mlp("detr_decoder.presence_head", f"{DECODER}.presence_token_head", 3),
    **_mlp("detr_decoder.ref_point_head", f"{DECODER}.ref_point_head", 2),
    **_mlp("detr_decoder.box_rpb_embed_x", f"{DECODER}.boxRPB_embed_x", 2),
    **_mlp("detr_decoder.box_rpb_embed_y", f"{DECODER}.boxRPB_embed_y", 2),
    # scoring
    **_mlp("dot_product_scoring.text_mlp", "dot_prod_scoring.prompt_mlp", 2),
    "dot_prod_scoring.prompt_mlp.out_norm": "dot_product_scoring.text_mlp_out_norm",
    "dot_prod_scoring.prompt_proj": "dot_product_scoring.text_proj",
    "dot_prod_scoring.hs_proj": "dot_product_scoring.query_proj",
    # segmentation head
    f"{HEAD}.pixel_decoder.conv_layers.#": "mask_decoder.pixel_decoder.conv_layers.#",
    f"{HEAD}.pixel_decoder.norms.#": "mask_decoder.pixel_decoder.norms.#",
    f"{HEAD}.mask_predictor.mask_embed.layers.#": "mask_decoder.mask_embedder.layers.#",
    f"{HEAD}.instance_seg_head": "mask_decoder.instance_projection",
    f"{HEAD}.semantic_seg_head": "mask_decoder.semantic_projection",
    f"{HEAD}.cross_attn_norm": "mask_decoder.prompt_cross_attn_norm",
}

# Attentions whose query, key and value are one tensor in upstream, stacked in this order.
ATTENTIONS: dict[str, str] = {
    f"{TRUNK}.blocks.#.attn": "vision_encoder.backbone.layers.#.attention",
    f"{TEXT}.encoder.transformer.resblocks.#.attn": "text_encoder.text_model.encoder.layers.#.self_attn",
    "geometry_encoder.encode.#.self_attn": "geometry_encoder.layers.#.self_attn",
    "geometry_encoder.encode.#.cross_attn_image": "geometry_encoder.layers.#.cross_attn",
    "transformer.encoder.layers.#.self_attn": "detr_encoder.layers.#.self_attn",
    "transformer.encoder.layers.#.cross_attn_image": "detr_encoder.layers.#.cross_attn",
    f"{DECODER}.layers.#.self_attn": "detr_decoder.layers.#.self_attn",
    f"{DECODER}.layers.#.ca_text": "detr_decoder.layers.#.text_cross_attn",
    f"{DECODER}.layers.#.cross_attn": "detr_decoder.layers.#.vision_cross_attn",
    f"{HEAD}.cross_attend_prompt": "mask_decoder.prompt_cross_attn",
}
PACKED_SUFFIXES = {
    "in_proj_weight": "weight",
    "in_proj_bias": "bias",
    "qkv.weight": "weight",
    "qkv.bias": "bias",
}
OUTPUT_SUFFIXES = {
    "out_proj.weight": "weight",
    "out_proj.bias": "bias",
    "proj.weight": "weight",
    "proj.bias": "bias",
}


def transformers_config(config: Sam3Config) -> TransformersConfig:
    """The same dimensions in transformers' words."""
    detector = {
        "hidden_size": config.model_width,
        "num_attention_heads": config.heads,
        "intermediate_size": config.feedforward_width,
    }
    return TransformersConfig(
        vision_config={
            "model_type": "sam3_vision_model",
            "fpn_hidden_size": config.model_width,
            "backbone_feature_sizes": [[side, side] for side in config.level_sizes],
            "backbone_config": {
                "model_type": "sam3_vit_model",
                "hidden_size": config.vit_width,
                "intermediate_size": config.vit_mlp_width,
                "num_hidden_layers": config.vit_depth,
                "num_attention_heads": config.vit_heads,
                "image_size": config.image_size,
                "patch_size": config.patch_size,
                "pretrain_image_size": config.pretrain_image_size,
                "window_size": config.window_size,
                "global_attn_indexes": list(config.global_blocks),
                "layer_norm_eps": VIT_NORM_EPSILON,
            },
        },
        text_config={
            "model_type": "clip_text_model",
            "vocab_size": 49408,
            "hidden_size": config.text_width,
            "intermediate_size": config.text_width * 4,
            "projection_dim": 512,
            "num_hidden_layers": config.text_layers,
            "num_attention_heads": config.text_heads,
            "max_position_embeddings": config.text_context,
            "hidden_act": "gelu",
        },
        geometry_encoder_config={
            **detector,
            "num_layers": config.geometry_layers,
            "roi_size": config.roi_size,
        },
        detr_encoder_config={**detector, "num_layers": config.fusion_layers},
        detr_decoder_config={
            **detector,
            "num_layers": config.decoder_layers,
            "num_queries": config.queries,
        },
        mask_decoder_config={
            "hidden_size": config.model_width,
            "num_attention_heads": config.heads,
            "num_upsampling_stages": config.mask_stages,
        },
    )


def transformers_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Upstream's parameters (without ``detector.``) under the names of ``Sam3Model``.

    Raises:
        KeyError: a name that no rule covers, or two tensors for one place.
    """
    converted: dict[str, Tensor] = {}
    for name, value in weights.items():
        if POINT_PROMPTS.fullmatch(name):
            continue
        for new_name, tensor in _convert(name, value).items():
            if new_name in converted:
                raise KeyError(f"{name}: {new_name} has a tensor already")
            converted[new_name] = tensor
    return converted


def _convert(name: str, value: Tensor) -> dict[str, Tensor]:
    if name == f"{TRUNK}.pos_embed":  # the first position is the class token's, which is not used
        return {"vision_encoder.backbone.embeddings.position_embeddings": value[:, 1:]}
    if name == f"{TEXT}.encoder.positional_embedding":
        return {"text_encoder.text_model.embeddings.position_embedding.weight": value}
    if name == f"{TEXT}.encoder.text_projection":  # a matrix there, a linear layer here
        return {"text_encoder.text_projection.weight": value.T}
    for suffix, leaf in PACKED_SUFFIXES.items():
        place = _place(ATTENTIONS, name, suffix)
        if place is not None:
            parts = torch.chunk(value, 3)
            return {
                f"{place}.{letter}_proj.{leaf}": part
                for letter, part in zip("qkv", parts, strict=True)
            }
    for suffix, leaf in OUTPUT_SUFFIXES.items():
        place = _place(ATTENTIONS, name, suffix)
        if place is not None:
            output = "out_proj" if place.startswith("text_encoder") else "o_proj"  # CLIP's name
            return {f"{place}.{output}.{leaf}": value}
    for leaf in ("weight", "bias"):
        place = _place(MODULES, name, leaf)
        if place is not None:
            return {f"{place}.{leaf}": value}
    raise KeyError(f"no rule for {name}")


def _place(table: Mapping[str, str], name: str, suffix: str) -> str | None:
    """Their module for ours, if ``name`` is ``suffix`` of a module in the table."""
    module = name.removesuffix(f".{suffix}")
    if module == name:
        return None
    if module in table:
        return table[module]
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", module)
    if len(numbers) != 1:
        return None
    theirs = table.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "#", module))
    return None if theirs is None else theirs.replace("#", numbers[0])
