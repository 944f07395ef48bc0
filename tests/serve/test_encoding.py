"""Answers as JSON: exactly the documented fields, masks that decode to the engine's."""

import base64
import gzip
import json
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
from pycocotools import mask as coco

from sam3_ray.answers import STAGES, Grounded, Instances
from sam3_ray.images import ImageSource
from sam3_ray.mask_columns import mask_columns
from sam3_ray.masks import png_to_mask, polygon_to_mask
from sam3_ray.prompt import Request
from sam3_ray.serve import encoding as module
from sam3_ray.serve.encoding import Origin, check_mask_pixels, encode_answer, next_step
from sam3_ray.serve.errors import ProblemError
from sam3_ray.serve.schemas import PredictAnswer, PredictJob, Reply

ORIGIN = Origin(input_size=224, checkpoint="demo", replica="abc", chip=None)


REQUEST = Request(ImageSource.from_digest("d" * 32))


@pytest.fixture
def masks() -> np.ndarray:
    masks = np.zeros((2, 40, 60), bool)
    masks[0, 5:20, 10:30] = True
    masks[0, 8:12, 14:20] = False
    masks[1, 0:40, 50:60] = True
    return masks


@pytest.fixture
def grounded(masks) -> Grounded:
    """Logits of the image's own size, in another order than the instances."""
    found = Instances(
        prompt="red circle",
        scores=np.array([0.987654, 0.5], np.float32),
        boxes=np.array([[10.1234, 5, 30, 20], [50, 0, 60, 40]], np.float32),
        presence=0.99996,
        truncated=True,
        height=40,
        width=60,
        logits=np.where(masks, np.float32(3), np.float32(-3))[::-1],
        rows=np.array([1, 0]),
    )
    timing = dict.fromkeys(STAGES, 1.234)
    return Grounded(REQUEST, [found], 60, 40, "d" * 32, cached=True, timing_ms=timing)


def job_for(mask_format: str = "png", **job) -> PredictJob:
    return PredictJob("d" * 32, b"", mask_format=mask_format, sent_at=time.time() - 0.5, **job)


def steps_of(grounded: Grounded, job: PredictJob):
    return encode_answer(grounded, job, ORIGIN, {"queue": 7.0, **grounded.timing_ms})


def reply_of(steps) -> Reply:
    while (reply := next_step(steps)) is None:
        pass
    return reply


def encode(grounded: Grounded, mask_format: str) -> dict:
    reply = reply_of(steps_of(grounded, job_for(mask_format)))
    assert reply.content_encoding is None
    return json.loads(reply.body)


DECODERS = {
    "png": lambda mask, h, w: png_to_mask(base64.b64decode(mask)),
    "rle": lambda mask, h, w: coco.decode(mask).astype(bool),
    "polygon": lambda mask, h, w: polygon_to_mask(mask, h, w),
}


@pytest.mark.parametrize("mask_format", ["png", "rle", "polygon", "none"])
def test_the_fields_are_the_documented_ones(grounded, mask_format):
    body = encode(grounded, mask_format)
    PredictAnswer.model_validate(body)
    assert set(body) == set(PredictAnswer.model_fields)
    (result,) = body["results"]
    assert result["prompt"] == "red circle"
    assert (result["presence"], result["num_instances"], result["truncated"]) == (1.0, 2, True)
    first = result["instances"][0]
    assert first["score"] == 0.9877
    assert first["box_xyxy"] == [10.12, 5.0, 30.0, 20.0]
    assert [i["mask_area"] for i in result["instances"]] == [276, 400]
    assert (body["width"], body["height"], body["input_size"], body["chip"]) == (60, 40, 224, None)
    assert body["cached"] is True


@pytest.mark.parametrize("mask_format", DECODERS)
def test_masks_decode_to_the_engine_s(grounded, masks, mask_format):
    instances = encode(grounded, mask_format)["results"][0]["instances"]
    for instance, mask in zip(instances, masks, strict=True):
        decoded = DECODERS[mask_format](instance["mask"], 40, 60)
        np.testing.assert_array_equal(decoded, mask)


def test_no_masks_where_none_are_wanted(grounded):
    instances = encode(grounded, "none")["results"][0]["instances"]
    assert [i["mask"] for i in instances] == [None, None]


def test_the_times_add_up(grounded):
    timing = encode(grounded, "rle")["timing_ms"]
    assert list(timing) == ["queue", *STAGES, "encode", "total"]
    assert timing["queue"] == 7.0
    assert timing["image"] == 1.23
    assert timing["masks"] > 1.23
    assert timing["total"] >= 500
    assert timing["total"] >= timing["encode"] >= 0


def test_a_compressed_answer_is_the_same(grounded):
    plain = encode(grounded, "png")
    long = replace(grounded, instances=grounded.instances * 8)
    reply = reply_of(steps_of(long, job_for(gzip=True)))
    assert reply.content_encoding == "gzip"
    body = json.loads(gzip.decompress(reply.body))
    assert body["results"] == plain["results"] * 8


@pytest.fixture
def many(grounded, monkeypatch) -> Grounded:
    """Thrice five instances, and steps of two masks."""
    monkeypatch.setattr(module, "STEP_PIXELS", 2 * 40 * 60)
    (found,) = grounded.instances
    five = replace(
        found,
        scores=np.repeat(found.scores[:1], 5),
        boxes=np.repeat(found.boxes[:1], 5, axis=0),
        rows=np.array([1, 0, 1, 1, 0]),
    )
    return replace(grounded, instances=[five] * 3)


@pytest.mark.parametrize("mask_format", ["png", "none"])
def test_large_answers_are_made_in_steps(many, monkeypatch, mask_format):
    made = []
    monkeypatch.setattr(
        "sam3_ray.answers.mask_columns",
        lambda logits, *size: made.append(1) or mask_columns(logits, *size),
    )
    steps = steps_of(many, job_for(mask_format))
    seen = []
    while (reply := next_step(steps)) is None:
        seen.append(len(made))
    assert seen == [2, 4, 6, 8, 10, 12, 14]
    assert made == [1] * 15
    results = json.loads(reply.body)["results"]
    assert [[i["mask_area"] for i in r["instances"]] for r in results] == [
        [276, 400, 276, 276, 400]
    ] * 3


def test_masks_are_dropped_once_they_are_encoded(many, monkeypatch):
    """Of the masks of image size, which can be gigabytes, a step leaves none behind."""
    made = []

    def watched(logits, *size):
        mask = mask_columns(logits, *size)
        made.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr("sam3_ray.answers.mask_columns", watched)
    steps = steps_of(many, job_for("rle"))
    while next_step(steps) is None:
        assert [mask() for mask in made] == [None] * len(made)
    assert len(made) == 15


def test_an_answer_of_a_request_without_masks_is_refused(grounded):
    (found,) = grounded.instances
    bare = replace(grounded, instances=[replace(found, rows=found.rows[:0])])
    with pytest.raises(ValueError, match="needs masks"):
        reply_of(steps_of(bare, job_for()))


def test_no_instances_at_all(grounded):
    (found,) = grounded.instances
    none = replace(found, scores=found.scores[:0], boxes=found.boxes[:0], rows=found.rows[:0])
    (result,) = encode(replace(grounded, instances=[none]), "png")["results"]
    assert (result["num_instances"], result["instances"]) == (0, [])


def test_too_many_mask_pixels_are_a_problem_with_the_numbers(many):
    check_mask_pixels(many, 15 * 40 * 60)
    with pytest.raises(ProblemError) as caught:
        check_mask_pixels(many, 15 * 40 * 60 - 1)
    problem = caught.value.problem
    assert (problem.kind.slug, problem.status) == ("answer-too-large", 413)
    for part in ("15 instances", "60 x 40", "36000 mask pixels", "35999", "max_instances"):
        assert part in problem.detail
