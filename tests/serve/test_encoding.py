"""Answers as JSON: exactly the documented fields, masks that decode to the engine's."""

import base64
import gzip
import json
import time

import numpy as np
import pytest
from pycocotools import mask as coco

from sam3_ray.engine import STAGES, Answer
from sam3_ray.masks import png_to_mask, polygon_to_mask
from sam3_ray.result import Sam3Result
from sam3_ray.serve.encoding import Origin, encode_answer
from sam3_ray.serve.schemas import PredictAnswer, PredictJob

ORIGIN = Origin(input_size=224, checkpoint="demo", replica="abc", chip=None)


@pytest.fixture
def answer() -> Answer:
    masks = np.zeros((2, 40, 60), bool)
    masks[0, 5:20, 10:30] = True
    masks[0, 8:12, 14:20] = False
    masks[1, 0:40, 50:60] = True
    result = Sam3Result(
        prompt="red circle",
        scores=np.array([0.987654, 0.5], np.float32),
        boxes=np.array([[10.1234, 5, 30, 20], [50, 0, 60, 40]], np.float32),
        masks=masks,
        presence=0.99996,
        width=60,
        height=40,
        truncated=True,
    )
    timing = dict.fromkeys(STAGES, 1.234)
    return Answer([result], 60, 40, "d" * 32, cached=True, timing_ms=timing)


def encode(answer: Answer, mask_format: str, **job) -> dict:
    reply = encode_answer(
        answer,
        PredictJob("d" * 32, b"", mask_format=mask_format, sent_at=time.time() - 0.5, **job),
        ORIGIN,
        queue_ms=7.0,
    )
    assert reply.content_encoding is None
    return json.loads(reply.body)


DECODERS = {
    "png": lambda mask, h, w: png_to_mask(base64.b64decode(mask)),
    "rle": lambda mask, h, w: coco.decode(mask).astype(bool),
    "polygon": lambda mask, h, w: polygon_to_mask(mask, h, w),
}


@pytest.mark.parametrize("mask_format", ["png", "rle", "polygon", "none"])
def test_the_fields_are_the_documented_ones(answer, mask_format):
    body = encode(answer, mask_format)
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
def test_masks_decode_to_the_engine_s(answer, mask_format):
    instances = encode(answer, mask_format)["results"][0]["instances"]
    for instance, mask in zip(instances, answer.results[0].masks, strict=True):
        decoded = DECODERS[mask_format](instance["mask"], 40, 60)
        np.testing.assert_array_equal(decoded, mask)


def test_no_masks_where_none_are_wanted(answer):
    instances = encode(answer, "none")["results"][0]["instances"]
    assert [i["mask"] for i in instances] == [None, None]


def test_the_times_add_up(answer):
    timing = encode(answer, "rle")["timing_ms"]
    assert timing["queue"] == 7.0
    assert timing["image"] == 1.23
    assert timing["total"] >= 500
    assert timing["total"] >= timing["encode"] >= 0


def test_a_compressed_answer_is_the_same(answer):
    plain = encode(answer, "png")
    long = Answer(answer.results * 8, 60, 40, "d" * 32, timing_ms=answer.timing_ms)
    job = PredictJob("d" * 32, b"", gzip=True, sent_at=time.time())
    reply = encode_answer(long, job, ORIGIN, queue_ms=0)
    assert reply.content_encoding == "gzip"
    body = json.loads(gzip.decompress(reply.body))
    assert body["results"] == plain["results"] * 8
