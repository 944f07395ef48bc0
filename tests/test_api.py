"""``Sam3``: the public calls of spec/PYTHON.md, on the demo checkpoint."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import sam3_ray
from sam3_ray import Prompt, Sam3, Sam3Result
from sam3_ray.errors import ImageError, WeightsNotFoundError
from tests.demo_scenes import Scene, scenes


@pytest.fixture(scope="module")
def model() -> Iterator[Sam3]:
    with Sam3.from_pretrained("demo", backend="cpu") as model:
        yield model


@pytest.fixture(scope="module")
def scene() -> Scene:
    """A picture with at least three shapes, and no side of the model's own size."""
    return next(
        s for s in scenes(30, seed=21) if len(s.colours) >= 3 and s.image.width != s.image.height
    )


def phrase_of(scene: Scene, index: int = 0) -> str:
    return f"{scene.colours[index]} {scene.shapes[index]}"


def test_public_names() -> None:
    for name in sam3_ray.__all__:
        assert getattr(sam3_ray, name) is not None
    assert sam3_ray.PINNED_REVISION == "3c879f39826c281e95690f02c7821c4de09afae7"
    with pytest.raises(AttributeError, match="Sam4"):
        _ = sam3_ray.Sam4  # type: ignore[attr-defined]


def test_a_phrase_gives_a_result_and_a_list_gives_a_list(model: Sam3, scene: Scene) -> None:
    one = model(scene.image, phrase_of(scene))
    assert isinstance(one, Sam3Result)
    many = model(scene.image, ["car", f"  {phrase_of(scene)} "])
    assert [r.prompt for r in many] == ["car", phrase_of(scene)]
    assert (one.width, one.height) == scene.image.size
    assert one.masks is not None
    assert one.masks.shape == (len(one), scene.image.height, scene.image.width)
    assert (one.masks.dtype, one.boxes.dtype, one.scores.dtype) == (bool, np.float32, np.float32)
    assert np.all(np.diff(one.scores) <= 0)
    assert np.all((one.boxes >= 0) & (one.boxes <= np.array([*scene.image.size] * 2)))


def test_it_finds_what_is_there_and_nothing_else(model: Sam3, scene: Scene) -> None:
    wanted = phrase_of(scene)
    truth = [
        mask
        for mask, colour, shape in zip(scene.masks, scene.colours, scene.shapes, strict=True)
        if f"{colour} {shape}" == wanted
    ]
    found = model(scene.image, wanted)
    assert found.masks is not None
    assert len(found) == len(truth)
    for mask in truth:
        iou = [(mask & m).sum() / (mask | m).sum() for m in found.masks]
        assert max(iou) > 0.6
    assert found.presence > 0.5
    nothing = model(scene.image, "penguin")
    assert (len(nothing), nothing.presence < 0.5) == (0, True)
    assert nothing.masks is not None
    assert nothing.masks.shape == (0, scene.image.height, scene.image.width)


def test_every_form_of_one_image_gives_the_same(model: Sam3, scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "scene.png"
    scene.image.save(path)
    array = np.asarray(scene.image)
    forms: list[Any] = [
        path,
        str(path),
        path.read_bytes(),
        scene.image,
        array,
        np.ascontiguousarray(array.transpose(2, 0, 1)),
        torch.from_numpy(array.copy()).permute(2, 0, 1),
        np.dstack([array, np.full(array.shape[:2], 9, np.uint8)]),
    ]
    expected = model(forms[0], phrase_of(scene))
    for form in forms[1:]:
        result = model(form, phrase_of(scene))
        np.testing.assert_array_equal(result.scores, expected.scores)
        np.testing.assert_array_equal(result.masks, expected.masks)


def test_options(model: Sam3, scene: Scene) -> None:
    everything = model(scene.image, "shape", threshold=0.0, max_instances=200, return_masks=False)
    assert len(everything) == model.engine.backend.config.queries
    assert (everything.masks, everything.mask_logits) == (None, None)
    few = model(scene.image, "shape", threshold=0.0, max_instances=2, return_mask_logits=True)
    assert few.truncated
    assert few.mask_logits is not None
    assert few.mask_logits.shape == (2, 64, 64)
    np.testing.assert_allclose(few.scores, everything.scores[:2], atol=1e-6)
    own = model(scene.image, [Prompt("shape", threshold=0.999), "shape"], threshold=0.0)
    assert len(own[0]) < len(own[1])


@pytest.mark.parametrize(
    ("prompts", "options", "error"),
    [
        ("", {}, ValueError),
        (None, {}, TypeError),
        ([], {}, ValueError),
        ("car", {"threshold": 2}, ValueError),
        ("car", {"threshold": float("nan")}, ValueError),
        ("car", {"threshold": 10**400}, ValueError),
        ("car", {"threshold": -(10**5000)}, ValueError),
        ("car", {"max_instances": 10**5000}, ValueError),
        ("car", {"threshold": "high"}, TypeError),
        ("car", {"max_instances": 0}, ValueError),
        ("car", {"colour": 1}, TypeError),
    ],
)
def test_what_does_not_fit_is_refused(
    model: Sam3, prompts: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        model(np.zeros((8, 8, 3), np.uint8), prompts, **options)
    with pytest.raises(error):
        model.predict_many([np.zeros((8, 8, 3), np.uint8)], prompts, **options)


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (2, 3)])
def test_tiny_images(model: Sam3, size: tuple[int, int]) -> None:
    result = model(np.zeros((*size, 3), np.uint8), "red circle", threshold=0.0, max_instances=3)
    assert result.masks is not None
    assert result.masks.shape == (3, *size)


def test_exif_orientation(model: Sam3, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate 90 degrees clockwise to see it upright
    sideways = scene.image.transpose(Image.Transpose.ROTATE_90)
    buffer = io.BytesIO()
    sideways.save(buffer, "PNG", exif=exif)
    upright = model(buffer.getvalue(), phrase_of(scene))
    expected = model(scene.image, phrase_of(scene))
    np.testing.assert_array_equal(upright.masks, expected.masks)
    monkeypatch.setenv("SAM3_EXIF", "0")
    model.engine.clear_caches()
    assert model(buffer.getvalue(), "car").width == scene.image.height


def test_calls_from_several_threads(model: Sam3, scene: Scene) -> None:
    expected = model(scene.image, phrase_of(scene)).scores
    seen: list[Any] = []

    def call() -> None:
        seen.append(model(scene.image, phrase_of(scene)).scores)

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 6
    for scores in seen:
        np.testing.assert_array_equal(scores, expected)


def test_warmup(scene: Scene) -> None:
    with Sam3.from_pretrained("demo", backend="cpu") as model:
        assert model.warmed_variants == []
        ran = model.warmup(prompts=["red circle"], image_sizes=[(60, 90)], max_instances=[4])
        assert list(ran) == ["image_sizes=(60, 90)", "max_instances=4", "prompts='red circle'"]
        assert all(seconds >= 0 for seconds in ran.values())
        assert model.warmup(prompts=["red circle"], image_sizes=[(60, 90)]) == {}
        assert model.warmed_variants == list(ran)
        stats = model.engine.stats()
        assert stats["image_cache"]["entries"] == 0
        assert stats["text_cache"]["entries"] == 1
        warm = model(scene.image, "red circle", threshold=0.1, return_mask_logits=True)
    with Sam3.from_pretrained("demo", backend="cpu") as model:
        cold = model(scene.image, "red circle", threshold=0.1, return_mask_logits=True)
    np.testing.assert_array_equal(warm.scores, cold.scores)
    np.testing.assert_array_equal(warm.mask_logits, cold.mask_logits)


@pytest.mark.parametrize(
    ("variants", "error"),
    [
        ({"colours": (1,)}, ValueError),
        ({"prompt_counts": (0,)}, ValueError),
        ({"image_sizes": (720,)}, ValueError),
        ({"max_instances": (201,)}, ValueError),
        ({"prompts": ("",)}, ValueError),
        ({"prompts": "car"}, TypeError),
    ],
)
def test_bad_warmup_variants(variants: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Sam3.from_pretrained("demo", backend="cpu", warmup_variants=variants)


def test_chip_only_arguments_are_listed_as_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3_TEXT_WORKERS", "4")
    with Sam3.from_pretrained(
        "demo",
        backend="cpu",
        device_id=1,
        dispatch="worker",
        precision="fast",
        warmup=3,
        warmup_variants={"prompts": ["star"]},
        num_threads=1,
        cache_image=False,
    ) as model:
        info = model.info
        assert info["unused_arguments"] == [
            "device_id", "dispatch", "precision", "warmup", "SAM3_TEXT_WORKERS",
        ]  # fmt: skip
        assert (info["backend"], info["checkpoint"]) == ("cpu", "demo")
        assert info["image_cache"]["budget"] == 0
        assert info["warmup"]["variants"] == ["prompts='star'"]
        assert info["num_threads"] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "gpu"},
        {"dispatch": "fast"},
        {"precision": "double"},
        {"warmup": -1},
        {"num_threads": 0},
        {"image_cache_bytes": -1},
    ],
)
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    name = next(iter(arguments))
    with pytest.raises(ValueError, match=name if name != "image_cache_bytes" else "-1"):
        Sam3.from_pretrained("demo", **{"backend": "cpu", **arguments})


def test_python_never_falls_back_to_the_demo_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAM3_WEIGHTS_DIR", str(tmp_path / "empty"))
    with pytest.raises(WeightsNotFoundError, match="empty"):
        Sam3.from_pretrained(backend="cpu")


def test_close_twice_and_use_after_close() -> None:
    model = Sam3.from_pretrained("demo", backend="cpu")
    model.close()
    model.close()
    image = np.zeros((8, 8, 3), np.uint8)
    uses = [
        partial(model, image, "car"),
        partial(model.predict_many, [image], "car"),
        partial(next, model.predict_iter(["none.png"], "car", on_error="return")),
        partial(model.warmup, prompts=["zebra"]),
        partial(model.warmup, prompt_counts=[1]),
        partial(model.engine.encode_phrases, ["zebra"]),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="this model is closed"):
            use()
    assert model.info["checkpoint"] == "demo"
    del model, uses, use
    gc.collect()


def test_a_quiet_console_and_an_exit_without_close() -> None:
    """A script that forgets ``close`` prints what it prints and nothing else."""
    script = textwrap.dedent("""
        import numpy as np
        from sam3_ray import Sam3
        model = Sam3.from_pretrained("demo", backend="cpu")
        print(len(model(np.zeros((30, 40, 3), np.uint8), "car")))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_load_image_is_what_the_model_sees(scene: Scene) -> None:
    np.testing.assert_array_equal(sam3_ray.load_image(scene.image), np.asarray(scene.image))
    with pytest.raises(ImageError):
        sam3_ray.load_image(np.zeros((0, 4, 3), np.uint8))


@pytest.mark.parametrize("value", [-1, 1e7, True, "1 GB"])
def test_a_cache_budget_is_a_number_of_bytes(value: object) -> None:
    with pytest.raises(ValueError, match="image_cache_bytes must be a number of bytes"):
        Sam3.from_pretrained("demo", backend="cpu", image_cache_bytes=value)
