"""The engine: merging, caches, isolation of errors, on the demo checkpoint and the real backend."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sam3_ray.answers import STAGES, Answer, finish
from sam3_ray.backends.base import Capacity
from sam3_ray.backends.cpu.backend import CpuBackend
from sam3_ray.checkpoint import DEMO_CHECKPOINT
from sam3_ray.engine import Engine
from sam3_ray.errors import ImageDecodeError, ImageNotCachedError
from sam3_ray.images import ImageSource, file_digest
from sam3_ray.prompt import Prompt, Request
from sam3_ray.result import Sam3Result
from tests.demo_scenes import Scene, scenes


class CountingBackend(CpuBackend):
    """The real backend, counting what the engine asks of it."""

    def __init__(self) -> None:
        super().__init__(DEMO_CHECKPOINT)
        self.images = 0
        self.phrases: list[str] = []
        self.runs: list[int] = []
        self.masks = 0
        self.fail_next_ground = False

    def encode_image(self, prepared: Any) -> Any:
        self.images += 1
        return super().encode_image(prepared)

    def encode_text(self, phrases: Sequence[str]) -> Any:
        self.phrases.extend(phrases)
        return super().encode_text(phrases)

    def ground(self, image: Any, text: Sequence[Any]) -> Any:
        if self.fail_next_ground:
            self.fail_next_ground = False
            raise RuntimeError("the chip is on fire")
        self.runs.append(len(text))
        return super().ground(image, text)

    def read_masks(self, masks: Any, kept: Sequence[tuple[int, int]]) -> Any:
        self.masks += len(kept)
        return super().read_masks(masks, kept)


@pytest.fixture
def backend() -> CountingBackend:
    return CountingBackend()


@pytest.fixture
def engine(backend: CountingBackend) -> Iterator[Engine]:
    engine = Engine(backend)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def pictures() -> list[Scene]:
    return [scene for scene in scenes(12, seed=5) if len(scene.colours) >= 2]


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def request(image: Any, *phrases: str | Prompt, **options: Any) -> Request:
    prompts = tuple(p if isinstance(p, Prompt) else Prompt(p) for p in phrases)
    source = image if isinstance(image, ImageSource) else ImageSource.of(image)
    return Request(source, prompts, **options)


def named(scene: Scene, index: int = 0) -> str:
    return f"{scene.colours[index]} {scene.shapes[index]}"


def assert_same_bits(first: Sam3Result, second: Sam3Result) -> None:
    np.testing.assert_array_equal(first.scores, second.scores)
    np.testing.assert_array_equal(first.boxes, second.boxes)
    np.testing.assert_array_equal(first.mask_logits, second.mask_logits)
    np.testing.assert_array_equal(first.masks, second.masks)


def test_plan_uses_the_largest_runs_first() -> None:
    capacity = Capacity((1, 2, 4), 0)
    assert [capacity.plan(n) for n in (0, 1, 3, 4, 7, 9)] == [
        [], [1], [2, 1], [4], [4, 2, 1], [4, 4, 1],
    ]  # fmt: skip


def test_requests_of_one_image_share_everything(
    engine: Engine, backend: CountingBackend, pictures: list[Scene]
) -> None:
    scene = pictures[0]
    data = png(scene.image)
    answers = engine.run(
        [
            request(data, named(scene), "car"),
            request(data, "car", named(scene), named(scene, 1)),
            request(scene.image, "car", threshold=0.0, max_instances=3),
        ]
    )
    assert backend.images == 1
    assert backend.phrases == list(dict.fromkeys([named(scene), "car", named(scene, 1)]))
    assert [len(a.unwrap()) for a in answers] == [2, 3, 1]
    assert_equal_instances(answers[0].results[0], answers[1].results[1])
    assert len(answers[2].results[0]) == 3
    assert answers[2].results[0].truncated


def assert_equal_instances(first: Sam3Result, second: Sam3Result) -> None:
    np.testing.assert_array_equal(first.scores, second.scores)
    np.testing.assert_array_equal(first.masks, second.masks)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_a_hit_gives_the_bits_of_the_miss(
    engine: Engine, pictures: list[Scene], count: int
) -> None:
    scene = pictures[1]
    data = png(scene.image)
    phrases = [named(scene, 0), named(scene, 1), "car", "red shape", "circle", "dog", "star"][
        :count
    ]
    ask = lambda: engine.run(  # noqa: E731
        [request(data, *phrases, threshold=0.05, return_mask_logits=True)]
    )[0]
    miss, hit = ask(), ask()
    engine.clear_caches()
    again = ask()
    assert (miss.cached, hit.cached, again.cached) == (False, True, False)
    for results in zip(miss.unwrap(), hit.unwrap(), again.unwrap(), strict=True):
        assert_same_bits(results[0], results[1])
        assert_same_bits(results[0], results[2])


def test_in_a_batch_answers_differ_by_rounding_only(engine: Engine, pictures: list[Scene]) -> None:
    phrases = ["red circle", "blue shape", "star", "white ring", "green cross", "triangle", "car"]
    requests = [
        request(scene.image, *phrases[n % 3 : n % 3 + 1 + n % 4], return_mask_logits=True)
        for n, scene in enumerate(pictures[:5])
    ] + [request(pictures[0].image, *phrases, return_mask_logits=True)]
    together = engine.run(requests)
    for one, batched in zip(requests, together, strict=True):
        engine.clear_caches()
        alone = engine.run([one])[0]
        assert len(alone.unwrap()) == len(one.prompts)
        for mine, theirs in zip(alone.unwrap(), batched.unwrap(), strict=True):
            assert mine.prompt == theirs.prompt
            assert len(mine) == len(theirs)
            np.testing.assert_allclose(mine.scores, theirs.scores, atol=1e-5, rtol=0)
            np.testing.assert_allclose(mine.mask_logits, theirs.mask_logits, atol=1e-3, rtol=0)


def test_an_image_is_known_by_its_file_and_by_its_pixels(
    engine: Engine, backend: CountingBackend, pictures: list[Scene]
) -> None:
    image = pictures[0].image
    bmp = io.BytesIO()
    image.save(bmp, "BMP")
    forms = [png(image), bmp.getvalue(), image, np.asarray(image)]
    cached = [engine.run([request(form, "star")])[0].cached for form in forms]
    assert cached == [False, True, True, True]
    assert backend.images == 1
    by_digest = engine.run([request(ImageSource.from_digest(file_digest(forms[1])), "star")])[0]
    assert by_digest.cached
    assert by_digest.digest == file_digest(forms[1])
    assert (by_digest.width, by_digest.height) == image.size
    assert engine.holds(file_digest(forms[0]))
    assert not engine.holds("0" * 32)


def test_a_known_file_is_not_decoded_again(
    engine: Engine, pictures: list[Scene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(pictures[0].image))
    engine.run([request(path, "star")])
    monkeypatch.setattr(ImageSource, "pixels", lambda self: pytest.fail("decoded"))
    assert engine.run([request(path, "circle")])[0].cached


def test_an_unknown_digest(engine: Engine) -> None:
    answer = engine.run([request(ImageSource.from_digest("f" * 32), "star")])[0]
    with pytest.raises(ImageNotCachedError, match="f" * 32):
        answer.unwrap()


def test_a_bad_image_costs_no_other_request_its_answer(
    engine: Engine, pictures: list[Scene]
) -> None:
    good = png(pictures[0].image)
    answers = engine.run(
        [
            request(good, "star"),
            request(b"not an image", "star"),
            request(good[: len(good) // 2], "star"),
            request(ImageSource.from_digest("e" * 32), "star"),
            request(pictures[1].image, "circle"),
        ]
    )
    kinds = [type(a.error) for a in answers]
    none = type(None)
    assert kinds == [none, ImageDecodeError, ImageDecodeError, ImageNotCachedError, none]
    assert len(answers[0].results) == len(answers[4].results) == 1


def test_a_failing_device_call_costs_only_its_image(
    engine: Engine, backend: CountingBackend, pictures: list[Scene]
) -> None:
    backend.fail_next_ground = True
    answers = engine.run([request(s.image, "star") for s in pictures[:2]])
    with pytest.raises(RuntimeError, match="on fire"):
        answers[0].unwrap()
    assert answers[1].error is None
    assert engine.run([request(pictures[0].image, "star")])[0].error is None


def test_no_prompts_warm_the_cache(
    engine: Engine, backend: CountingBackend, pictures: list[Scene]
) -> None:
    data = png(pictures[0].image)
    answer = engine.run([request(data)])[0]
    assert answer.unwrap() == []
    assert (answer.width, answer.height, answer.digest) == (
        *pictures[0].image.size,
        file_digest(data),
    )
    assert engine.run([request(ImageSource.from_digest(file_digest(data)), "star")])[0].cached
    assert backend.images == 1


def test_image_budget_and_eviction(backend: CountingBackend, pictures: list[Scene]) -> None:
    one = backend.encode_image(backend.prepare(np.asarray(pictures[0].image))).nbytes
    engine = Engine(backend, image_cache_bytes=2 * one)
    first, second, third = (png(scene.image) for scene in pictures[:3])
    for data in (first, second, third):
        engine.run([request(data, "star")])
    assert [engine.holds(file_digest(d)) for d in (first, second, third)] == [False, True, True]
    assert engine.stats()["image_cache"]["size"] == 2 * one
    assert engine.stats()["image_cache"]["evictions"] == 1


def test_without_an_image_cache(backend: CountingBackend, pictures: list[Scene]) -> None:
    engine = Engine(backend, image_cache_bytes=0)
    for _ in range(2):
        assert not engine.run([request(pictures[0].image, "star")])[0].cached
    assert backend.images == 3 - 1


def test_text_cache_holds_256_phrases(
    engine: Engine, backend: CountingBackend, pictures: list[Scene]
) -> None:
    engine.encode_phrases([f"phrase {n}" for n in range(256)])
    engine.run([request(pictures[0].image, "phrase 3")])
    assert len(backend.phrases) == 256
    engine.encode_phrases(["one more"])
    assert engine.stats()["text_cache"]["entries"] == 256
    engine.run([request(pictures[0].image, "phrase 0")])  # the oldest one left
    assert backend.phrases[-1] == "phrase 0"


def test_masks_are_computed_only_where_asked(
    engine: Engine, backend: CountingBackend, pictures: list[Scene]
) -> None:
    scene = pictures[0]
    answer = engine.run([request(scene.image, named(scene), return_masks=False)])[0]
    assert answer.results[0].masks is None
    assert answer.results[0].mask_logits is None
    assert len(answer.results[0]) >= 1
    assert backend.masks == 0


def test_timing_has_every_stage(engine: Engine, pictures: list[Scene]) -> None:
    timing = engine.run([request(png(pictures[0].image), "star")])[0].timing_ms
    assert set(timing) == set(STAGES)
    assert all(value >= 0 for value in timing.values())
    assert timing["image"] > 0


def test_preload_runs_beside_the_device(engine: Engine, pictures: list[Scene]) -> None:
    """While one thread owns the device, another decodes; nobody deadlocks and answers keep their order."""
    datas = [png(scene.image) for scene in pictures[:6]]
    expected = [engine.run([request(d, "shape")])[0].results[0].scores for d in datas]
    engine.clear_caches()
    sources = [ImageSource.of(d) for d in datas]
    with ThreadPoolExecutor(3) as pool:
        preloading = [pool.submit(engine.preload, source) for source in sources]
        runs = [pool.submit(engine.run, [request(s, "shape")]) for s in sources]
        for future in preloading:
            future.result()
        for run, scores in zip(runs, expected, strict=True):
            np.testing.assert_array_equal(run.result()[0].unwrap()[0].scores, scores)


def test_pixels_can_be_forgotten_once_they_are_prepared(
    engine: Engine, backend: CountingBackend, pictures: list[Scene]
) -> None:
    data = png(pictures[0].image)
    expected = engine.run([request(data, "shape")])[0].unwrap()[0].scores
    for cached in (True, False):  # another file with the same pixels, then one of nobody's
        if not cached:
            engine.clear_caches()
        source = ImageSource.of(data + b"more")
        engine.preload(source, forget_pixels=True)
        engine.preload(source)  # it is there: nothing is decoded again
        [answer] = engine.run([request(source, "shape")])
        np.testing.assert_array_equal(answer.unwrap()[0].scores, expected)
        assert answer.cached is cached
        with pytest.raises(ImageNotCachedError):
            source.pixels()
    assert backend.images == 2


def test_threads_take_turns_on_the_device(
    backend: CountingBackend, pictures: list[Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, worst = 0, 0
    guard = threading.Lock()
    original = CpuBackend.ground

    def ground(self: CpuBackend, *arguments: Any) -> Any:
        nonlocal inside, worst
        with guard:
            inside += 1
            worst = max(worst, inside)
        try:
            return original(self, *arguments)
        finally:
            with guard:
                inside -= 1

    monkeypatch.setattr(CpuBackend, "ground", ground)
    engine = Engine(backend)
    with ThreadPoolExecutor(6) as pool:
        answers: list[list[Answer]] = list(
            pool.map(lambda s: engine.run([request(s.image, "star", "circle")]), pictures[:6])
        )
    assert worst == 1
    assert all(a[0].error is None for a in answers)


def test_a_closed_engine_says_so(engine: Engine, pictures: list[Scene]) -> None:
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.run([request(pictures[0].image, "star")])


def test_masks_one_at_a_time_are_the_masks(engine: Engine, pictures: list[Scene]) -> None:
    """What the service makes one by one is bit for bit what a call gives at once."""
    scene = pictures[0]
    asked = request(scene.image, "shape", named(scene), threshold=0.0, max_instances=11)
    (grounded,) = engine.ground([asked])
    whole = finish(grounded).unwrap()
    height, width = scene.image.height, scene.image.width
    assert grounded.mask_pixels == 22 * height * width
    for found, result in zip(grounded.instances, whole, strict=True):
        masks = [columns.whole() for columns in found.mask_columns()]
        assert result.masks is not None
        assert result.masks.any()
        np.testing.assert_array_equal(masks, result.masks)


def test_requests_of_a_batch_share_the_logits_of_a_run(
    engine: Engine, pictures: list[Scene]
) -> None:
    """Eight requests of one image and phrase hold its mask logits once; each picks its own rows."""
    image = pictures[0].image
    requests = [request(image, "shape", threshold=0.0, max_instances=n) for n in range(1, 9)]
    found = [grounded.instances[0] for grounded in engine.ground(requests)]
    assert len({id(instances.logits) for instances in found}) == 1
    assert len(found[0].logits) == 8
    for n, instances in enumerate(found, 1):
        np.testing.assert_array_equal(instances.mask_logits(), found[-1].mask_logits()[:n])


def test_an_answer_that_cannot_be_finished_is_an_error_of_its_own(
    engine: Engine, pictures: list[Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(logits: Any, height: int, width: int) -> Any:
        raise MemoryError(f"no room for {height} x {width}")

    monkeypatch.setattr("sam3_ray.answers.upsample_masks", failing)
    with_masks, without = engine.run(
        [
            request(pictures[0].image, "star", threshold=0.0),
            request(pictures[0].image, "star", threshold=0.0, return_masks=False),
        ]
    )
    with pytest.raises(MemoryError, match="no room"):
        with_masks.unwrap()
    assert len(without.unwrap()[0]) > 0
