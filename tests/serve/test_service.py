"""The real service over real HTTP: two replicas of the demo checkpoint, the real engine."""

import asyncio
import base64
import io
import re
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco

from sam3_ray import Sam3
from sam3_ray.images import file_digest
from sam3_ray.masks import png_to_mask, polygon_to_mask
from sam3_ray.serve.errors import ProblemError
from sam3_ray.serve.schemas import PredictAnswer
from tests.serve.fakes import assert_problem, wait_until

RAW = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def model() -> Iterator[Sam3]:
    """The Python API on the same checkpoint, with a replica's number of threads."""
    with Sam3.from_pretrained("demo", backend="cpu", num_threads=1) as model:
        yield model


def drawn(seed: int, size: int = 64) -> bytes:
    """A PNG of noise, another for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def predict(service: httpx.Client, data: bytes, prompts, **options) -> dict:
    body = {"image": base64.b64encode(data).decode(), "prompts": prompts, **options}
    response = service.post("/predict", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_four_ways_give_the_same_answer(service, pictures):
    picture = pictures[0]
    first = predict(
        service, picture.data, [picture.phrase, "car"], threshold=0.4, mask_format="rle"
    )
    options = {"prompts": [picture.phrase, "car"], "threshold": "0.4", "mask_format": "rle"}
    digest = {"image_digest": first["image_digest"]}
    others = [
        service.post("/predict", files={"image": ("a.png", picture.data)}, data=options),
        service.post("/predict", content=picture.data, headers=RAW, params=options),
        service.post("/predict", json=digest | options | {"threshold": 0.4}),
        service.post("/predict", params=digest | options),
    ]
    assert first["image_digest"] == file_digest(picture.data)
    assert first["results"][0]["num_instances"] >= 1
    assert first["checkpoint"] == "demo"
    PredictAnswer.model_validate(first)
    for response in others:
        answer = response.json()
        assert answer["results"] == first["results"]
        assert answer["cached"] is True
        assert (answer["replica"], answer["threshold"]) == (first["replica"], 0.4)


def test_http_gives_what_the_python_api_gives(service, pictures, model):
    for picture in pictures[1:4]:
        phrases = [phrase for phrase, _ in picture.scene.phrases][:3]
        expected = model(picture.data, phrases)
        answer = predict(service, picture.data, phrases, mask_format="rle")
        assert (answer["height"], answer["width"]) == picture.scene.masks.shape[1:]
        assert answer["input_size"] == model.engine.backend.config.image_size
        for result, reference in zip(answer["results"], expected, strict=True):
            assert result["prompt"] == reference.prompt
            assert result["presence"] == pytest.approx(reference.presence, abs=1e-4)
            assert result["num_instances"] == len(reference) == len(result["instances"])
            scores = [instance["score"] for instance in result["instances"]]
            assert scores == pytest.approx(list(reference.scores), abs=1e-4)
            assert scores == sorted(scores, reverse=True)
            for instance, box, mask in zip(
                result["instances"], reference.boxes, reference.masks, strict=True
            ):
                assert instance["box_xyxy"] == pytest.approx(list(box), abs=0.02)
                np.testing.assert_array_equal(coco.decode(instance["mask"]).astype(bool), mask)
                assert instance["mask_area"] == mask.sum()


def test_every_mask_format_is_the_same_mask(service, pictures, model):
    picture = pictures[0]
    masks = model(picture.data, picture.phrase).masks
    height, width = masks.shape[1:]
    answers = {
        name: predict(service, picture.data, [picture.phrase], mask_format=name)["results"][0]
        for name in ("png", "rle", "polygon", "none")
    }
    for i, mask in enumerate(masks):
        encoded = {name: result["instances"][i]["mask"] for name, result in answers.items()}
        np.testing.assert_array_equal(png_to_mask(base64.b64decode(encoded["png"])), mask)
        np.testing.assert_array_equal(coco.decode(encoded["rle"]).astype(bool), mask)
        polygon = polygon_to_mask(encoded["polygon"], height, width)
        grown = np.array(Image.fromarray(mask).resize((width, height)))  # a copy to compare in
        for axis in (0, 1):
            for step in (1, -1):
                grown |= np.roll(mask, step, axis)
        assert not (polygon & ~grown).any(), "no pixel further out than one"
        assert (polygon != mask).mean() < 0.01
        assert encoded["none"] is None


def test_warming_then_the_digest(service, pictures):
    data = drawn(1)
    answer = predict(service, data, [])
    assert (answer["results"], answer["cached"]) == ([], False)
    digest = answer["image_digest"]
    hit = service.post("/predict", json={"image_digest": digest, "prompts": ["red circle"]}).json()
    assert (hit["cached"], len(hit["results"])) == (True, 1)
    assert (hit["width"], hit["height"]) == (64, 64)
    assert predict(service, data, [])["cached"] is True


def test_a_digest_that_is_not_cached(service):
    response = service.post("/predict", json={"image_digest": "0" * 32, "prompts": ["car"]})
    assert_problem(response, 404, "image-not-cached", "0" * 32)


@pytest.mark.parametrize("mask_format", ["none", "polygon"])
def test_an_answer_with_too_many_mask_pixels_says_what_to_ask_for(service, mask_format):
    file = io.BytesIO()
    Image.new("1", (4000, 4000)).save(file, "PNG")
    body = {
        "image": base64.b64encode(file.getvalue()).decode(),
        "prompts": ["star", "red shape"],
        "threshold": 0,
        "max_instances": 20,
        "mask_format": mask_format,
    }
    response = service.post("/predict", json=body)
    assert_problem(response, 413, "answer-too-large", "40 instances.*max_instances")
    assert str(service.get("/info").json()["limits"]["max_mask_pixels"]) in response.text
    fits = service.post("/predict", json=body | {"max_instances": 2, "mask_format": "none"})
    assert [r["num_instances"] for r in fits.json()["results"]] == [2, 2]


def test_thresholds_and_max_instances(service, pictures):
    picture = pictures[0]
    prompts = [{"text": picture.phrase, "threshold": 0.0}, picture.phrase]
    answer = predict(
        service, picture.data, prompts, threshold=1.0, max_instances=2, mask_format="none"
    )
    loose, strict = answer["results"]
    assert (loose["num_instances"], loose["truncated"]) == (2, True)
    assert (strict["num_instances"], strict["truncated"]) == (0, False)


def test_gzip(service, pictures):
    prompts = [phrase for phrase, named in pictures[0].scene.phrases if named][:4]
    body = {
        "image": base64.b64encode(pictures[0].data).decode(),
        "prompts": prompts,
        "mask_format": "polygon",
        "threshold": 0.1,
    }
    packed = service.post("/predict", json=body, headers={"accept-encoding": "gzip"})
    plain = service.post("/predict", json=body, headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert packed.json()["results"] == plain.json()["results"]


def truncated_jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (400, 300), "red").save(file, "JPEG")
    return file.getvalue()[:-200]


def too_many_pixels() -> bytes:
    """A PNG that says it is 40000 x 40000; its header is all there is."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


IMAGE_FAULTS = {
    "text": (b"hello", 415, "not-an-image"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "not-an-image"),
    "truncated": (truncated_jpeg(), 415, "not-an-image"),
    "bomb": (too_many_pixels(), 413, "image-too-large"),
    "damaged": (truncated_jpeg()[:60], 415, "not-an-image"),
    "upload": (b"x" * (32 * 1024 * 1024 + 1), 413, "too-large"),
    "empty": (b"", 400, "no-image"),
}


@pytest.mark.parametrize("name", IMAGE_FAULTS)
def test_images_that_cannot_be_used(service, name):
    data, status, slug = IMAGE_FAULTS[name]
    response = service.post("/predict", content=data, headers=RAW)
    assert_problem(response, status, slug)
    # In the service's own words: no name of a variable, a library or its error, no bytes in Python's way.
    assert not re.search(
        r"bytes:|b['\"]|Pillow|PIL|SAM3_|[a-z]Error|DOS", response.json()["detail"]
    )


def test_requests_that_cannot_be_used(service):
    assert_problem(service.get("/nothing"), 404, "not-found")
    assert_problem(service.get("/predict"), 405, "method-not-allowed")
    assert_problem(service.post("/predict", json={"image": "!"}), 400, "invalid-base64")
    assert_problem(service.post("/predict", content=b"x"), 415, "unsupported-media-type")
    assert_problem(service.post("/predict", json={"typo": 1}), 422, "invalid-request", "typo")


def test_a_ten_megabyte_upload(service):
    data = drawn(2, 1900)
    assert len(data) > 10_000_000
    answer = predict(service, data, ["red circle"], mask_format="rle")
    assert (answer["width"], answer["height"]) == (1900, 1900)


async def post_all(url: str, bodies: list[dict], timeout: float = 120) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=url, timeout=timeout) as client:
        return await asyncio.gather(*(client.post("/predict", **body) for body in bodies))


def test_good_and_bad_requests_at_once_get_their_own_answers(service, ray_url, pictures):
    bodies, expected = [], []
    for i, picture in enumerate(pictures * 3):
        phrases = [phrase for phrase, _ in picture.scene.phrases][: 1 + i % 3]
        bodies.append({"content": picture.data, "headers": RAW, "params": {"prompts": phrases}})
        expected.append((200, file_digest(picture.data), phrases))
        bodies.append({"content": b"bad %d" % i, "headers": RAW})
        expected.append((415, None, None))
        if i % 4 == 0:
            bodies.append({"json": {"image_digest": f"{i:032x}"}})
            expected.append((404, None, None))
    responses = asyncio.run(post_all(ray_url, bodies))
    alone: dict[tuple[str, str], dict] = {}
    for response, (status, digest, phrases) in zip(responses, expected, strict=True):
        assert response.status_code == status, response.text
        if status == 200:
            body = response.json()
            assert body["image_digest"] == digest
            assert [result["prompt"] for result in body["results"]] == phrases
            for result in body["results"]:
                # In whatever company: the same instances for the same picture and phrase.
                known = alone.setdefault((digest, result["prompt"]), result)
                assert result["num_instances"] == known["num_instances"]
                for one, other in zip(result["instances"], known["instances"], strict=True):
                    assert one["score"] == pytest.approx(other["score"], abs=1.1e-4)
                    assert one["box_xyxy"] == pytest.approx(other["box_xyxy"], abs=0.02)


def test_one_image_always_goes_to_one_replica_and_both_are_used(service):
    owners = []
    for seed in range(100, 112):
        data = drawn(seed)
        answers = [predict(service, data, []) for _ in range(2)]
        answers.append(service.post("/predict", json={"image_digest": file_digest(data)}).json())
        assert [answer["cached"] for answer in answers] == [False, True, True]
        (owner,) = {answer["replica"] for answer in answers}
        owners.append(owner)
    assert len(set(owners)) == 2


def test_clients_that_hang_up_leave_room_for_the_others(service, ray_url, pictures):
    async def abort_all() -> int:
        aborted = 0

        async def one(client: httpx.AsyncClient, seed: int) -> None:
            nonlocal aborted
            try:
                await client.post("/predict", content=drawn(seed, 400), headers=RAW, timeout=0.05)
            except httpx.TimeoutException:
                aborted += 1

        async with httpx.AsyncClient(base_url=ray_url) as client:
            await asyncio.gather(*(one(client, seed) for seed in range(1000, 1060)))
        return aborted

    assert asyncio.run(abort_all()) > 30
    bodies = [
        {"content": picture.data, "headers": RAW, "params": {"prompts": picture.phrase}}
        for picture in pictures * 4
    ]
    assert {r.status_code for r in asyncio.run(post_all(ray_url, bodies))} == {200}


def test_another_application_calls_it_without_http(service, pictures):
    from ray import serve

    picture = pictures[0]
    handle = serve.get_app_handle("sam3")
    prompts = [picture.phrase, {"text": "car", "threshold": 0.9}]
    answer = handle.predict.remote(picture.data, prompts).result(timeout_s=60)
    assert (
        answer["results"] == predict(service, picture.data, prompts, mask_format="rle")["results"]
    )
    with pytest.raises(ProblemError) as caught:
        handle.predict.remote(b"no image").result(timeout_s=60)
    assert caught.value.problem.status == 415
    with pytest.raises(ProblemError, match="5 phrases"):
        handle.predict.remote(picture.data, list("abcde")).result(timeout_s=60)


def test_info_and_health(service):
    info = service.get("/info").json()
    assert (info["checkpoint"], info["backend"], info["chips"]) == ("demo", "cpu", [])
    assert info["limits"]["max_prompts"] == 4
    assert len({replica["place"] for replica in info["replicas"]}) == 2
    assert sum(replica["image_cache"]["hits"] for replica in info["replicas"]) > 0
    for path in ("/health", "/healthz"):
        assert service.get(path).json() == {"status": "ok"}
    assert service.get("/").headers["content-type"].startswith("text/html")
    assert "/predict" in service.get("/docs").text


def test_our_series_are_there_from_the_start(service):
    """What has not happened yet is at zero, not missing."""
    import ray

    port = ray.nodes()[0]["MetricsExportPort"]
    wanted = [f'outcome="{outcome}"' for outcome in ("ok", "client_error", "failed", "cancelled")]
    text = ""

    def all_there() -> bool:
        """The ingress and the replicas report at times of their own."""
        nonlocal text
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
        requests = " ".join(lines("ray_sam3_requests"))
        return all(word in requests for word in wanted) and bool(
            lines("ray_sam3_image_cache_bytes")
        )

    def lines(name: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(name)]

    wait_until(all_there)
    failed = [line for line in lines("ray_sam3_requests") if 'outcome="failed"' in line]
    assert {float(line.rsplit(" ", 1)[1]) for line in failed} == {0.0}
