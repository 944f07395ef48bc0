"""SAM3's image model composed from upstream's modules, with nothing allocated on a GPU.

Upstream's ``build_sam3_image_model`` cannot run without one: ``PositionEmbeddingSine`` and
``TransformerDecoder`` precompute tables on "cuda", and the geometry encoder's box path pins memory.
Here the same modules are put together without those two options, and the geometry encoder is asked for
its CLS token only, which is all that a text prompt needs. Attribute names are upstream's, so that a
``state_dict`` has the keys of ``sam3.pt`` (there with the prefix ``detector.``).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sam3_ray.config import Sam3Config
from sam3_ray.upstream import quiet_import

with quiet_import():
    from sam3.model.decoder import TransformerDecoder, TransformerDecoderLayer
    from sam3.model.encoder import TransformerEncoderFusion, TransformerEncoderLayer
    from sam3.model.geometry_encoders import SequenceGeometryEncoder
    from sam3.model.maskformer_segmentation import PixelDecoder, UniversalSegmentationHead
    from sam3.model.model_misc import (
        MLP,
        DotProductScoring,
        MultiheadAttentionWrapper,
        TransformerWrapper,
        inverse_sigmoid,
    )
    from sam3.model.necks import Sam3DualViTDetNeck
    from sam3.model.position_encoding import PositionEmbeddingSine
    from sam3.model.text_encoder_ve import VETextEncoder
    from sam3.model.vitdet import ViT
    from sam3.model.vl_combiner import SAM3VLBackbone


__all__ = [
    "GeometryEncoder",
    "Sam3Modules",
    "build_empty_modules",
    "build_modules",
    "inverse_sigmoid",
]


class GeometryEncoder(SequenceGeometryEncoder):  # type: ignore[misc]
    """Upstream's geometry encoder, and the one token that it gives for a prompt without geometry."""

    def encode_cls(self, features: Tensor, positions: Tensor) -> Tensor:
        """The CLS token after it has looked at the image; it depends on the image only.

        Args:
            features: (h*w, B, C) coarsest neck level.
            positions: (h*w, B, C) its position encoding.

        Returns:
            (1, B, C): what upstream's ``forward`` gives for a prompt of no boxes and no points.
        """
        batch = features.shape[1]
        token = self.cls_embed.weight.view(1, 1, self.d_model).repeat(1, batch, 1)
        padding = torch.zeros(batch, 1, dtype=torch.bool, device=features.device)
        token = self.norm(self.final_proj(token))
        for layer in self.encode:
            token = layer(tgt=token, memory=features, tgt_key_padding_mask=padding, pos=positions)
        return cast(Tensor, self.encode_norm(token))


class Sam3Modules(nn.Module):
    """The parts of SAM3 under upstream's names; the forward passes are in ``backend.py``."""

    def __init__(self, config: Sam3Config) -> None:
        super().__init__()
        self.config = config
        self.backbone = _backbone(config)
        self.geometry_encoder = _geometry_encoder(config)
        self.transformer = _transformer(config)
        self.dot_prod_scoring = _scoring(config)
        self.segmentation_head = _segmentation_head(config)


class _ParametersOnMeta(TorchFunctionMode):
    """Gives parameters no memory; tables made by ``arange`` and ``linspace`` are computed as usual.

    ``with torch.device("meta")`` would do for the parameters, but upstream's ViT reads its drop-path
    rates back with ``item()``, which a meta tensor refuses.
    """

    _FILLED_BY_THE_CHECKPOINT = frozenset({torch.empty, torch.zeros, torch.ones})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._FILLED_BY_THE_CHECKPOINT:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_modules(config: Sam3Config) -> Sam3Modules:
    """The model with upstream's initial values, in eval mode."""
    return Sam3Modules(config).eval()


def build_empty_modules(config: Sam3Config) -> Sam3Modules:
    """The model without memory for its parameters, in eval mode.

    Fill it with ``load_state_dict(weights, assign=True)``: memory-mapped weights are then used where
    they lie, and nothing is loaded twice.
    """
    with _ParametersOnMeta():
        modules = Sam3Modules(config).eval()
    text = modules.backbone.language_backbone.encoder
    text.register_buffer("attn_mask", text.build_causal_mask(), persistent=False)
    return modules


def _position_encoding(config: Sam3Config) -> Any:
    return PositionEmbeddingSine(
        num_pos_feats=config.model_width, normalize=True, scale=None, temperature=10000
    )


def _attention(config: Sam3Config, *, batch_first: bool = False) -> Any:
    return MultiheadAttentionWrapper(
        num_heads=config.heads, dropout=0.0, embed_dim=config.model_width, batch_first=batch_first
    )


def _backbone(config: Sam3Config) -> Any:
    trunk = ViT(
        img_size=config.image_size,
        pretrain_img_size=config.pretrain_image_size,
        patch_size=config.patch_size,
        embed_dim=config.vit_width,
        depth=config.vit_depth,
        num_heads=config.vit_heads,
        mlp_ratio=config.vit_mlp_ratio,
        norm_layer="LayerNorm",
        drop_path_rate=0.0,
        qkv_bias=True,
        use_abs_pos=True,
        tile_abs_pos=True,
        global_att_blocks=config.global_blocks,
        rel_pos_blocks=(),
        use_rope=True,
        use_interp_rope=True,
        window_size=config.window_size,
        pretrain_use_cls_token=True,
        retain_cls_token=False,
        ln_pre=True,
        ln_post=False,
        return_interm_layers=False,
        bias_patch_embed=False,
        use_act_checkpoint=False,
    )
    neck = Sam3DualViTDetNeck(
        position_encoding=_position_encoding(config),
        d_model=config.model_width,
        scale_factors=[4.0, 2.0, 1.0, 0.5],
        trunk=trunk,
        add_sam2_neck=False,
    )
    text = VETextEncoder(
        d_model=config.model_width,
        tokenizer=None,  # phrases arrive as token ids (sam3_ray.text)
        width=config.text_width,
        heads=config.text_heads,
        layers=config.text_layers,
        context_length=config.text_context,
        use_act_checkpoint=False,
    )
    return SAM3VLBackbone(visual=neck, text=text, scalp=1)


def _transformer(config: Sam3Config) -> Any:
    fusion_layer = TransformerEncoderLayer(
        activation="relu",
        d_model=config.model_width,
        dim_feedforward=config.feedforward_width,
        dropout=0.0,
        pos_enc_at_attn=True,
        pos_enc_at_cross_attn_keys=False,
        pos_enc_at_cross_attn_queries=False,
        pre_norm=True,
        self_attention=_attention(config, batch_first=True),
        cross_attention=_attention(config, batch_first=True),
    )
    fusion = TransformerEncoderFusion(
        layer=fusion_layer,
        num_layers=config.fusion_layers,
        d_model=config.model_width,
        num_feature_levels=1,
        frozen=False,
        use_act_checkpoint=False,
        add_pooled_text_to_img_feat=False,
        pool_text_with_mask=True,
    )
    decoder_layer = TransformerDecoderLayer(
        activation="relu",
        d_model=config.model_width,
        dim_feedforward=config.feedforward_width,
        dropout=0.0,
        cross_attention=_attention(config),
        n_heads=config.heads,
        use_text_cross_attention=True,
    )
    decoder = TransformerDecoder(
        layer=decoder_layer,
        num_layers=config.decoder_layers,
        num_queries=config.queries,
        return_intermediate=True,
        box_refine=True,
        num_o2m_queries=0,
        dac=False,  # a second set of queries in upstream's training; without parameters of its own
        boxRPB="log",
        d_model=config.model_width,
        frozen=False,
        interaction_layer=None,
        dac_use_selfatt_ln=True,
        resolution=None,  # with a resolution it precomputes its coordinates on "cuda"
        stride=None,
        use_act_checkpoint=False,
        presence_token=True,
    )
    return TransformerWrapper(encoder=fusion, decoder=decoder, d_model=config.model_width)


def _scoring(config: Sam3Config) -> Any:
    prompt_mlp = MLP(
        input_dim=config.model_width,
        hidden_dim=config.feedforward_width,
        output_dim=config.model_width,
        num_layers=2,
        dropout=0.0,
        residual=True,
        out_norm=nn.LayerNorm(config.model_width),
    )
    return DotProductScoring(
        d_model=config.model_width, d_proj=config.model_width, prompt_mlp=prompt_mlp
    )


def _segmentation_head(config: Sam3Config) -> Any:
    return UniversalSegmentationHead(
        hidden_dim=config.model_width,
        upsampling_stages=config.mask_stages,
        aux_masks=False,
        presence_head=False,
        dot_product_scorer=None,
        act_ckpt=False,
        cross_attend_prompt=_attention(config),
        pixel_decoder=PixelDecoder(
            num_upsampling_stages=config.mask_stages,
            interpolation_mode="nearest",
            hidden_dim=config.model_width,
        ),
    )


def _geometry_encoder(config: Sam3Config) -> GeometryEncoder:
    layer = TransformerEncoderLayer(
        activation="relu",
        d_model=config.model_width,
        dim_feedforward=config.feedforward_width,
        dropout=0.0,
        pos_enc_at_attn=False,
        pre_norm=True,
        self_attention=_attention(config),
        pos_enc_at_cross_attn_queries=False,
        pos_enc_at_cross_attn_keys=True,
        cross_attention=_attention(config),
    )
    return GeometryEncoder(
        pos_enc=_position_encoding(config),
        encode_boxes_as_points=False,
        points_direct_project=True,
        points_pool=True,
        points_pos_enc=True,
        boxes_direct_project=True,
        boxes_pool=True,
        boxes_pos_enc=True,
        d_model=config.model_width,
        num_layers=config.geometry_layers,
        layer=layer,
        roi_size=config.roi_size,
        use_act_ckpt=False,
        add_cls=True,
        add_post_encode_proj=True,
    )
