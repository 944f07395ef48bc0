"""Upstream's image part with its inner values, and our parts fed with them: what the parity tests compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sam3_ray.backends.blackhole.precision import PRECISIONS
from sam3_ray.config import Sam3Config

UPDATE_BAR = {"accurate": 0.9995, "fast": 0.998}
"""PCC of what a block adds to its input, and of a neck level, each fed upstream's own input."""

END_TO_END_BAR = {"accurate": 0.999, "fast": 0.99}


def pcc(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation coefficient of all elements."""
    pair = torch.stack([a.flatten().double(), b.flatten().double()])
    return float(torch.corrcoef(pair)[0, 1])


def photo_like(size: int, seed: int = 3) -> np.ndarray:
    """(size, size, 3) uint8: smooth colours at several scales with noise, as a photograph has."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.zeros(1, 3, size, size)
    for cells in (3, 9, 40):
        coarse = torch.rand(1, 3, cells, cells, generator=generator)
        image += torch.nn.functional.interpolate(coarse, size=size, mode="bicubic") / cells**0.5
    image += 0.03 * torch.randn(image.shape, generator=generator)
    image = (image - image.min()) / (image.max() - image.min())
    return (image[0].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()


@dataclass
class Recording:
    """What upstream computes for one picture, float32.

    Attributes:
        block_inputs, block_outputs: (grid, grid, width) of each block.
        levels: three (C, h, w), fine to coarse.
        geometry: (C,) CLS token.
    """

    block_inputs: list[Tensor] = field(default_factory=list)
    block_outputs: list[Tensor] = field(default_factory=list)
    levels: tuple[Tensor, ...] = ()
    geometry: Tensor = field(default_factory=lambda: torch.zeros(0))


@torch.inference_mode()
def record(modules: Any, square: np.ndarray) -> Recording:
    """Run upstream's modules (``build_modules``) on a square uint8 picture."""
    recording = Recording()

    def keep(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        recording.block_inputs.append(inputs[0][0])
        recording.block_outputs.append(output[0])

    hooks = [
        block.register_forward_hook(keep) for block in modules.backbone.vision_backbone.trunk.blocks
    ]
    image = torch.from_numpy(square).permute(2, 0, 1)[None].float() / 127.5 - 1
    output = modules.backbone.forward_image(image)
    for hook in hooks:
        hook.remove()
    recording.levels = tuple(level[0] for level in output["backbone_fpn"])
    coarsest = output["backbone_fpn"][-1].flatten(2).permute(2, 0, 1)
    positions = output["vision_pos_enc"][-1].flatten(2).permute(2, 0, 1)
    recording.geometry = modules.geometry_encoder.encode_cls(coarsest, positions).flatten()
    return recording


class LoadedPart:
    """Our image part on an open chip.

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
        from sam3_ray.backends.blackhole.parts.image import IGNORED, OWNED, ImagePart
        from sam3_ray.backends.blackhole.placement import Placement

        self.device, self.config = device, config
        self._store = WeightStore(OWNED, IGNORED)
        self.part = ImagePart(Placement(device, PRECISIONS[precision]), self._store.root, config)
        self._store.load(weights, device, path=Path("weights of a test"))

    def close(self) -> None:
        self._store.release()

    def block_updates(self, recording: Recording) -> Iterator[float]:
        """PCC of each block's update, each fed upstream's own input."""
        for block, given, expected in zip(
            self.part.backbone.blocks,
            recording.block_inputs,
            recording.block_outputs,
            strict=True,
        ):
            x = self._in_window_order(given)
            before = self._from_window_order(x)
            after = self._from_window_order(self.part.backbone.run_block(block, x))
            yield pcc(after - before, expected - given)

    def neck_levels(self, recording: Recording) -> list[float]:
        """PCC of each level, fed upstream's last block."""
        levels = self.part.neck(self._in_window_order(recording.block_outputs[-1]))
        return [
            pcc(self._as_map(level), expected)
            for level, expected in zip(levels, recording.levels, strict=True)
        ]

    def geometry(self, recording: Recording) -> float:
        """PCC of the CLS token, fed upstream's coarsest level."""
        level = self._upload(recording.levels[-1].flatten(1).t())
        return pcc(self._token(self.part.geometry(level)), recording.geometry)

    def end_to_end(self, square: np.ndarray, recording: Recording) -> list[float]:
        """PCC of the three levels and the token, from the pixels on."""
        import ttnn

        from sam3_ray.backends.blackhole.parts.backbone import patches

        pixels = ttnn.from_torch(
            torch.from_numpy(patches(square, self.config))[None, None],
            dtype=ttnn.uint8,
            layout=ttnn.ROW_MAJOR_LAYOUT,
            device=self.device,
        )
        *levels, token = self.part(pixels)
        return [
            pcc(self._as_map(level), expected)
            for level, expected in zip(levels, recording.levels, strict=True)
        ] + [pcc(self._token(token), recording.geometry)]

    def _in_window_order(self, tokens: Tensor) -> Any:
        """Upstream's own window partition, not ours."""
        from sam3.model.vitdet import window_partition

        windows, _ = window_partition(tokens[None], self.config.window_size)
        return self._upload(windows.reshape(-1, tokens.shape[-1]))

    def _from_window_order(self, x: Any) -> Tensor:
        from sam3.model.vitdet import window_unpartition

        window, grid = self.config.window_size, self.config.grid
        windows = self._read(x).reshape(-1, window, window, self.config.vit_width)
        return window_unpartition(windows, window, (grid, grid), (grid, grid))[0]

    def _as_map(self, level: Any) -> Tensor:
        values = self._read(level)
        side = round(values.numel() ** 0.5 / self.config.model_width**0.5)
        return values.reshape(side, side, self.config.model_width).permute(2, 0, 1)

    def _token(self, rows: Any) -> Tensor:
        """The token, of which every row is a copy."""
        values = self._read(rows)[0, 0]
        assert (values == values[:1]).all()
        return values[0]

    def _upload(self, rows: Tensor) -> Any:
        import ttnn

        return ttnn.from_torch(
            rows[None, None].contiguous(),
            dtype=ttnn.bfloat16,
            layout=ttnn.TILE_LAYOUT,
            device=self.device,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )

    @staticmethod
    def _read(x: Any) -> Tensor:
        import ttnn

        return ttnn.to_torch(x).float()
