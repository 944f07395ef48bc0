"""Sam3Result and its conversions, against pycocotools and supervision."""

import json
import pickle
import sys
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import supervision
from pycocotools import mask as coco
from pycocotools.coco import COCO

from sam3_ray.result import Sam3Result

HEIGHT, WIDTH = 40, 60


def found(count: int = 3, prompt: str = "car") -> Sam3Result:
    """Rectangles, each smaller than the one before."""
    masks = np.zeros((count, HEIGHT, WIDTH), bool)
    boxes = np.zeros((count, 4), np.float32)
    for index in range(count):
        x0, y0, x1, y1 = 2 + 4 * index, 3 + index, 50 - 3 * index, 35 - 2 * index
        masks[index, y0:y1, x0:x1] = True
        boxes[index] = x0 + 0.25, y0 + 0.25, x1 - 0.25, y1 - 0.25
    return Sam3Result(
        prompt=prompt,
        scores=np.array([0.97341, 0.81711, 0.79691, 0.6, 0.55] * 3, np.float32)[:count],
        boxes=boxes,
        masks=masks,
        presence=0.998,
        width=WIDTH,
        height=HEIGHT,
    )


def test_repr_length_and_fields() -> None:
    result = found()
    assert repr(result) == (
        "Sam3Result(prompt='car', num_instances=3, scores=[0.973, 0.817, 0.797], "
        "presence=0.998, width=60, height=40)"
    )
    assert len(result) == result.num_instances == 3
    assert "truncated=True" in repr(replace(result, truncated=True))
    assert "... 4 more]" in repr(found(12))
    with pytest.raises(FrozenInstanceError):
        result.prompt = "bus"  # type: ignore[misc]


def test_keys_as_in_upstreams_state() -> None:
    result = found()
    for key in ("masks", "boxes", "scores", "mask_logits"):
        assert result[key] is getattr(result, key)
    for wrong in ("mask", "presence", 0):
        with pytest.raises(KeyError, match="masks, boxes, scores, mask_logits"):
            result[wrong]  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("boxes", np.zeros((2, 4), np.float32)),
        ("masks", np.zeros((3, WIDTH, HEIGHT), bool)),
        ("mask_logits", np.zeros((2, 8, 8), np.float32)),
        ("scores", np.zeros((3, 1), np.float32)),
    ],
)
def test_fields_that_do_not_fit(name: str, value: np.ndarray) -> None:
    with pytest.raises(ValueError, match=f"Sam3Result: {name} has shape"):
        replace(found(), **{name: value})


def test_to_dict_is_json_and_unrounded() -> None:
    result = found()
    assert result.masks is not None
    summary = json.loads(json.dumps(result.to_dict()))
    assert list(summary) == [
        "prompt",
        "num_instances",
        "presence",
        "truncated",
        "width",
        "height",
        "instances",
    ]
    assert (summary["prompt"], summary["num_instances"], summary["truncated"]) == ("car", 3, False)
    assert (summary["width"], summary["height"], summary["presence"]) == (WIDTH, HEIGHT, 0.998)
    for index, instance in enumerate(summary["instances"]):
        assert np.float32(instance["score"]) == result.scores[index]
        assert np.array_equal(np.float32(instance["box_xyxy"]), result.boxes[index])
        assert instance["mask_area"] == result.masks[index].sum()
    plain = replace(result, masks=None).to_dict()
    assert all("mask_area" not in instance for instance in plain["instances"])


def test_nothing_found() -> None:
    empty = found(0)
    assert len(empty) == 0
    assert empty.to_dict()["instances"] == []
    assert empty.to_coco(1, 1) == []
    assert len(empty.to_supervision()) == 0
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(empty.overlay(pixels)), pixels)


def test_coco_results_load_in_pycocotools() -> None:
    result = found()
    assert result.masks is not None
    entries = json.loads(json.dumps(result.to_coco(image_id=7, category_id=3)))
    # loadRes puts the box's area in its place
    assert [entry["area"] for entry in entries] == result.masks.sum(axis=(1, 2)).tolist()
    data = COCO()
    data.dataset = {
        "images": [{"id": 7, "width": WIDTH, "height": HEIGHT}],
        "categories": [{"id": 3, "name": "car"}],
        "annotations": [],
        "info": {},
    }
    data.createIndex()
    assert all("id" not in entry for entry in entries)
    loaded = data.loadRes(entries)
    annotations = loaded.loadAnns(loaded.getAnnIds(imgIds=[7], catIds=[3]))
    assert len(annotations) == 3
    for annotation, mask, box, score in zip(
        annotations, result.masks, result.boxes, result.scores, strict=True
    ):
        np.testing.assert_array_equal(coco.decode(annotation["segmentation"]).astype(bool), mask)
        x, y, width, height = annotation["bbox"]
        assert [x, y, x + width, y + height] == pytest.approx(box.tolist())
        assert np.float32(annotation["score"]) == score
        assert annotation["iscrowd"] == 0


def test_coco_without_masks_is_a_detection() -> None:
    for entry in replace(found(), masks=None).to_coco(1, 1):
        assert "segmentation" not in entry
        assert entry["area"] == pytest.approx(entry["bbox"][2] * entry["bbox"][3])


@pytest.mark.parametrize("with_masks", [True, False])
def test_supervision(with_masks: bool) -> None:
    result = found() if with_masks else replace(found(), masks=None)
    detections = result.to_supervision(class_id=4)
    assert isinstance(detections, supervision.Detections)
    np.testing.assert_array_equal(detections.xyxy, result.boxes)
    np.testing.assert_array_equal(detections.confidence, result.scores)
    assert detections.class_id.tolist() == [4, 4, 4]
    assert detections["class_name"].tolist() == ["car"] * 3
    if with_masks:
        np.testing.assert_array_equal(detections.mask, result.masks)
    else:
        assert detections.mask is None
    if with_masks:
        merged = supervision.Detections.merge(
            [detections, found(2, "bus").to_supervision(class_id=5)]
        )
        assert merged["class_name"].tolist() == ["car"] * 3 + ["bus"] * 2


def test_without_supervision_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "supervision":
                raise ModuleNotFoundError("No module named 'supervision'", name="supervision")

    monkeypatch.delitem(sys.modules, "supervision")
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"sam3-ray\[supervision\]"):
        found().to_supervision()


def test_it_travels_between_processes() -> None:
    result = found()
    copy = pickle.loads(pickle.dumps(result))
    assert repr(copy) == repr(result)
    np.testing.assert_array_equal(copy.masks, result.masks)
