"""Upstream's own model and processor on a machine without CUDA: the reference of the parity tests.

Upstream allocates tables on "cuda" while it is built and pins memory on the box path. Both are worked
around here, inside the tests, and nowhere in the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch.overrides import TorchFunctionMode

from sam3_ray.backends.cpu.model import build_modules
from sam3_ray.config import FULL, Sam3Config
from sam3_ray.text import find_bpe_file
from sam3_ray.upstream import quiet_import

with quiet_import():
    from sam3.model.sam3_image import Sam3Image
    from sam3.model.sam3_image_processor import Sam3Processor
    from sam3.model.tokenizer_ve import SimpleTokenizer


class CudaOn(TorchFunctionMode):
    """Sends what upstream allocates on "cuda" to another device; with ``everything``, all else too."""

    def __init__(self, device: str, *, everything: bool = False) -> None:
        super().__init__()
        self._device = device
        self._everything = everything

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        filled = self._everything and func in (torch.empty, torch.ones, torch.zeros)
        if filled or "cuda" in str(kwargs.get("device")):
            kwargs["device"] = self._device
        return func(*args, **kwargs)


@contextmanager
def no_pinned_memory() -> Iterator[None]:
    """``pin_memory`` needs an accelerator; on the CPU a tensor is as good unpinned."""
    with patch.object(torch.Tensor, "pin_memory", lambda self, *_: self):
        yield


def build_full_upstream(device: str = "cpu") -> Any:
    """facebook/sam3 by upstream's own builder, random weights (``device="meta"``: no memory at all)."""
    from sam3.model_builder import build_sam3_image_model

    with CudaOn(device, everything=device == "meta"):
        return build_sam3_image_model(
            bpe_path=str(find_bpe_file()),
            device="cpu",
            eval_mode=True,
            load_from_HF=False,
            enable_segmentation=True,
            enable_inst_interactivity=False,
        )


def reduced_upstream(config: Sam3Config, state_dict: dict[str, torch.Tensor]) -> Any:
    """``Sam3Image`` at other dimensions than upstream's builder knows."""
    modules = build_modules(config)
    modules.load_state_dict({k: v.float() for k, v in state_dict.items()}, strict=False)
    modules.backbone.language_backbone.tokenizer = SimpleTokenizer(bpe_path=str(find_bpe_file()))
    return Sam3Image(
        backbone=modules.backbone,
        transformer=modules.transformer,
        input_geometry_encoder=modules.geometry_encoder,
        segmentation_head=modules.segmentation_head,
        num_feature_levels=1,
        o2m_mask_predict=True,
        dot_prod_scoring=modules.dot_prod_scoring,
        use_instance_query=False,
        multimask_output=True,
        inst_interactive_predictor=None,
        matcher=None,
    ).eval()


def random_state(modules: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random values for every parameter, so that none of upstream's zeros hides a mistake.

    Scales are those at which scores differ between queries and boxes between layers.
    """
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in modules.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1 and name.endswith("weight"):  # a norm's gain
            state[name] = 1 + 0.1 * noise
        elif parameter.ndim == 1:
            state[name] = 0.1 * noise
        elif "reference_points" in name or "embed.weight" in name or "_embedding" in name:
            state[name] = noise
        else:
            state[name] = noise / parameter[0].numel() ** 0.5
    return state


def save_checkpoint(path: Path, state: dict[str, torch.Tensor], config: Sam3Config) -> None:
    """A file in sam3.pt's layout, with a tracker's key that is not ours."""
    content: dict[str, Any] = {
        "model": {f"detector.{k}": v for k, v in state.items()} | {"tracker.x": torch.zeros(1)}
    }
    if config != FULL:
        content["sam3_ray_config"] = config.to_dict()
    torch.save(content, path)


@dataclass(frozen=True)
class Reference:
    """Upstream's answer for one phrase, all of its queries, high score first."""

    scores: np.ndarray
    boxes: np.ndarray
    mask_probabilities: np.ndarray

    def threshold_for(self, at_least: int) -> float:
        """A threshold in the widest gap among those that keep ``at_least`` instances or more."""
        candidates = self.scores[at_least - 1 : at_least + 10]
        gaps = candidates[:-1] - candidates[1:]
        best = int(np.argmax(gaps))
        return float((candidates[best] + candidates[best + 1]) / 2)


def ask_upstream(processor: Sam3Processor, image: Image.Image, phrase: str) -> Reference:
    """Everything that upstream's processor gives for one phrase, without a threshold."""
    processor.set_confidence_threshold(-1.0)
    with no_pinned_memory():
        state = processor.set_text_prompt(prompt=phrase, state=processor.set_image(image))
    order = torch.argsort(state["scores"], descending=True, stable=True)
    return Reference(
        state["scores"][order].numpy(),
        state["boxes"][order].numpy(),
        state["masks_logits"][order, 0].numpy(),  # probabilities, for all their name
    )
