"""The CPU backend against upstream's ``Sam3Processor``: same weights, same PIL image, every phrase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sam3_ray import Sam3, Sam3Config
from sam3_ray.backends.cpu.model import build_empty_modules, build_modules
from sam3_ray.checkpoint import DEMO_CHECKPOINT, load_checkpoint
from sam3_ray.config import FULL
from tests.demo_scenes import scenes
from tests.parity.upstream import (
    Sam3Processor,
    ask_upstream,
    build_full_upstream,
    random_state,
    reduced_upstream,
    save_checkpoint,
)

SCORE_TOLERANCE = 1e-5
BOX_TOLERANCE_PX = 1e-2
UNDECIDED_LOGIT = 1e-4
UNDECIDED_SHARE = 1e-3
AT_LEAST = 10

REDUCED = Sam3Config(
    image_size=224,
    pretrain_image_size=112,  # the position table is tiled
    vit_width=64,
    vit_depth=4,
    vit_heads=2,
    vit_mlp_ratio=3.5,
    window_size=8,
    global_blocks=(1, 3),
    text_width=48,
    text_heads=3,
    text_layers=2,
    model_width=64,
    heads=4,
    feedforward_width=96,
    fusion_layers=2,
    decoder_layers=3,
    geometry_layers=2,
    queries=40,
)
PHRASES = ("red circle", "a very long phrase that is cut, " * 6, "dog")


def test_our_composition_has_upstreams_parameters() -> None:
    """At full size: every name and shape of upstream's own builder, and no other."""
    upstream = build_full_upstream("meta")
    ours = build_empty_modules(FULL)
    expected = {name: tuple(p.shape) for name, p in upstream.named_parameters()}
    assert {name: tuple(p.shape) for name, p in ours.named_parameters()} == expected
    count = sum(p.numel() for p in ours.parameters())
    assert 830e6 < count < 850e6


@pytest.fixture(scope="module")
def reduced_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    save_checkpoint(folder / "sam3.pt", random_state(build_modules(REDUCED)), REDUCED)
    return folder / "sam3.pt"


def photo_like_images() -> Iterator[Image.Image]:
    generator = np.random.default_rng(7)
    for width, height in ((224, 224), (301, 200), (90, 333)):
        coarse = generator.integers(0, 255, (9, 7, 3), dtype=np.uint8)
        yield Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def assert_same_as_upstream(
    model: Sam3, processor: Sam3Processor, image: Image.Image, phrases: Sequence[str]
) -> None:
    for phrase in phrases:
        reference = ask_upstream(processor, image, phrase)
        threshold = reference.threshold_for(AT_LEAST)
        count = int((reference.scores > threshold).sum())
        assert count >= AT_LEAST
        ours = model(image, phrase, threshold=threshold, max_instances=200)

        assert len(ours) == count
        np.testing.assert_allclose(
            ours.scores, reference.scores[:count], atol=SCORE_TOLERANCE, rtol=0
        )
        # Equal scores may swap places: compare instance by instance after ordering by box.
        mine = np.lexsort(np.round(ours.boxes, 1).T)
        limits = np.array([image.width, image.height] * 2)
        expected_boxes = np.clip(reference.boxes[:count], 0, limits)
        theirs = np.lexsort(np.round(expected_boxes, 1).T)
        np.testing.assert_allclose(
            ours.boxes[mine], expected_boxes[theirs], atol=BOX_TOLERANCE_PX, rtol=0
        )
        assert ours.masks is not None
        probabilities = torch.from_numpy(reference.mask_probabilities[:count][theirs])
        different = ours.masks[mine] != (probabilities > 0.5).numpy()
        undecided = (torch.logit(probabilities).abs() < UNDECIDED_LOGIT).numpy()
        assert not (different & ~undecided).any()
        assert different.mean() <= UNDECIDED_SHARE


@pytest.mark.parametrize("through", ["checkpoint_path", "folder", "SAM3_WEIGHTS_DIR"])
def test_reduced_random_model(
    reduced_checkpoint: Path, through: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if through == "SAM3_WEIGHTS_DIR":
        monkeypatch.setenv("SAM3_WEIGHTS_DIR", str(reduced_checkpoint.parent))
        path = None
    else:
        path = reduced_checkpoint if through == "checkpoint_path" else reduced_checkpoint.parent
    config, state = load_checkpoint(reduced_checkpoint)
    assert config == REDUCED
    processor = Sam3Processor(
        reduced_upstream(config, state), resolution=config.image_size, device="cpu"
    )
    with Sam3.from_pretrained(checkpoint_path=path, backend="cpu") as model:
        for image in photo_like_images():
            assert_same_as_upstream(model, processor, image, PHRASES)


def test_demo_checkpoint_on_twenty_pictures() -> None:
    config, state = load_checkpoint(DEMO_CHECKPOINT)
    processor = Sam3Processor(
        reduced_upstream(config, state), resolution=config.image_size, device="cpu"
    )
    with Sam3.from_pretrained("demo", backend="cpu") as model:
        for scene in scenes(20, seed=11):
            assert_same_as_upstream(model, processor, scene.image, [scene.phrases[0][0]])


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_full_size_random_model(tmp_path: Path) -> None:
    """840 M parameters, upstream's own builder: about 12 GB of memory and ten minutes."""
    upstream = build_full_upstream()
    state = random_state(upstream)
    upstream.load_state_dict(state, strict=False)
    save_checkpoint(tmp_path / "sam3.pt", state, FULL)
    del state
    processor = Sam3Processor(upstream, device="cpu")
    image = next(photo_like_images()).resize((640, 427))
    with Sam3.from_pretrained(checkpoint_path=tmp_path, backend="cpu") as model:
        assert_same_as_upstream(model, processor, image, ["red circle"])
