"""Whole answers from an emulated chip, through the public API."""

from __future__ import annotations

import gc
import json
import warnings
from typing import Any

import numpy as np
import pytest

from sam3_ray import Sam3
from sam3_ray.errors import ChipUnavailableError
from tests.blackhole.evaluate import METRICS, MOST_APART, figures
from tests.blackhole.upstream_parts import photo_like
from tests.demo_scenes import scenes

SCORE_TOLERANCE = {"accurate": 0.03, "fast": 0.08}

SMALL_CACHE = 20_000_000
"""Bytes: 28 of the demo checkpoint's images."""


@pytest.mark.parametrize("precision", ["accurate", "fast"])
def test_answers_are_the_cpu_backends(emulator: Any, precision: str) -> None:
    with (
        Sam3.from_pretrained(
            "demo",
            backend="blackhole",
            dispatch="worker",
            precision=precision,
            warmup=0,
            image_cache_bytes=SMALL_CACHE,
        ) as chip,
        Sam3.from_pretrained("demo", backend="cpu") as cpu,
    ):
        for scene in scenes(3):
            phrases = [phrase for phrase, _ in scene.phrases[:4]]
            ours, theirs = chip(scene.image, phrases), cpu(scene.image, phrases)
            for a, b in zip(ours, theirs, strict=True):
                assert a.presence == pytest.approx(b.presence, abs=0.03)
                assert len(a) == len(b)
                # Instances of nearly one score may stand in another order.
                order = [int(np.abs(b.boxes - box).max(axis=1).argmin()) for box in a.boxes]
                assert sorted(order) == list(range(len(b)))
                np.testing.assert_allclose(
                    a.scores, b.scores[order], atol=SCORE_TOLERANCE[precision]
                )
                np.testing.assert_allclose(
                    a.boxes, b.boxes[order], atol=0.01 * max(scene.image.size)
                )
            again = chip(scene.image, phrases)
            assert all(np.array_equal(a.scores, b.scores) for a, b in zip(ours, again, strict=True))
            assert all(np.array_equal(a.masks, b.masks) for a, b in zip(ours, again, strict=True))
        assert chip.info["image_cache"]["hits"] == 3


def test_info_tells_what_runs_where(emulator: Any) -> None:
    with Sam3.from_pretrained(
        "demo", backend="blackhole", dispatch="worker", image_cache_bytes=SMALL_CACHE, warmup=1,
        warmup_variants={"prompt_counts": [1], "image_sizes": [], "max_instances": []},
    ) as model:  # fmt: skip
        info = model.info
        json.dumps(info)
        assert (info["backend"], info["dispatch"], info["grid"]) == (
            "blackhole",
            "worker",
            [11, 10],
        )
        assert info["precision"] == "accurate"
        assert info["dram_bytes"] > SMALL_CACHE
        assert info["image_slots"] * model.engine.backend._images.slot_nbytes > SMALL_CACHE
        assert info["unused_arguments"] == []
        assert model.warmed_variants == ["prompt_counts=1"]
    model.close()
    assert model.info["closed"]
    with pytest.raises(RuntimeError, match="closed"):
        model(photo_like(64), "red circle")


def test_images_leave_the_cache_when_it_is_full(emulator: Any) -> None:
    """More images than slots, and no cache at all: answers stay right, slots are not lost."""
    for budget in (0, 1_500_000):
        with Sam3.from_pretrained(
            "demo", backend="blackhole", dispatch="worker", image_cache_bytes=budget, warmup=0
        ) as model:
            first = model(photo_like(224, 0), "red circle", threshold=0.0)
            for seed in range(1, 6):
                model(photo_like(224, seed), "red circle")
            again = model(photo_like(224, 0), "red circle", threshold=0.0)
            assert np.array_equal(first.scores, again.scores)
            images = model.engine.backend._images
            assert len(images) - images.free_slots == model.info["image_cache"]["entries"]


def test_a_given_device_stays_open(chip: Any) -> None:
    import ttnn

    with Sam3.from_pretrained(
        "demo", backend="blackhole", device=chip, warmup=0, image_cache_bytes=SMALL_CACHE
    ) as model:
        assert model.info["dispatch"] == "given"
        model(photo_like(64), "red circle")
    x = ttnn.ones((1, 1, 32, 32), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=chip)
    assert ttnn.to_torch(x).eq(1).all()


def test_a_device_takes_one_model_and_gets_all_of_it_back(chip: Any) -> None:
    """What a second one allocated would lie where the traces of the first write."""
    import ttnn

    def in_use() -> int:
        view = ttnn.get_memory_view(chip, ttnn.BufferType.DRAM)
        return int(view.total_bytes_allocated_per_bank * view.num_banks)

    options: dict[str, Any] = {
        "backend": "blackhole",
        "device": chip,
        "warmup": 0,
        "image_cache_bytes": SMALL_CACHE,
    }
    first = Sam3.from_pretrained("demo", **options)
    with_model = in_use()
    with pytest.raises(ChipUnavailableError, match="has a model already"):
        Sam3.from_pretrained("demo", **options)
    first(photo_like(64), "red circle")
    first.close()
    gc.collect()
    # The object is still here; the rest are tables of compiled programs, which the device keeps.
    programs = in_use()
    assert programs < with_model / 100
    second = Sam3.from_pretrained("demo", **options)
    second(photo_like(64), "red circle")
    second.close()
    gc.collect()
    assert in_use() == programs


def test_many_new_phrases_in_one_call(emulator: Any) -> None:
    """More than the text cache and its spare slots hold together."""
    with Sam3.from_pretrained(
        "demo", backend="blackhole", dispatch="worker", image_cache_bytes=0, warmup=0
    ) as model:
        results = model(photo_like(64), [f"phrase {i}" for i in range(330)], return_masks=False)
        assert [result.prompt for result in results] == [f"phrase {i}" for i in range(330)]
        alone = model(photo_like(64), "phrase 329", return_masks=False)
        assert alone.presence == pytest.approx(results[329].presence, abs=0.01)


def test_a_cache_that_does_not_fit_is_refused(emulator: Any) -> None:
    with pytest.raises(ValueError, match="does not fit in the chip's free DRAM"):
        Sam3.from_pretrained(
            "demo", backend="blackhole", dispatch="worker", image_cache_bytes=40 * 10**9
        )


def test_forty_frozen_pictures_are_as_near_to_the_cpu_as_they_must(emulator: Any) -> None:
    """Half a point of presence, recall, precision and mask IoU; ``fast`` one point."""
    found = figures(40)
    print(json.dumps(found))
    for name, points in MOST_APART.items():
        for metric in METRICS:
            assert found[name][metric] == pytest.approx(found["cpu"][metric], abs=points), metric


def test_a_chip_is_opened_once_in_a_process(emulator: Any) -> None:
    """Closing one of two handles on a chip would take the device from under the other."""
    options: dict[str, Any] = {
        "backend": "blackhole",
        "dispatch": "worker",
        "warmup": 0,
        "image_cache_bytes": 0,
    }
    with Sam3.from_pretrained("demo", **options) as first:
        with pytest.raises(ChipUnavailableError, match="open in this process already"):
            Sam3.from_pretrained("demo", **options)
        first(photo_like(64), "red circle")
    Sam3.from_pretrained("demo", **options).close()


def test_auto_dispatch_falls_back_with_a_warning(emulator: Any) -> None:
    with pytest.warns(RuntimeWarning, match="enable-eth"):
        model = Sam3.from_pretrained(
            "demo", backend="blackhole", warmup=0, image_cache_bytes=SMALL_CACHE
        )
    assert model.info["dispatch"] == "worker"
    model.close()


def test_no_warning_where_dispatch_is_named(emulator: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        Sam3.from_pretrained(
            "demo",
            backend="blackhole",
            dispatch="worker",
            warmup=0,
            image_cache_bytes=SMALL_CACHE,
        ).close()
