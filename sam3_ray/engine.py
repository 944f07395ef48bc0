"""The engine: requests in, answers out. The Python API, the service and the labeller all call it.

A run has three steps, which a caller may overlap on threads of its own::

    preload(source)     any thread     look the image up, else decode and prepare it
    ground(requests)    one at a time  everything on the device
    finish(grounded)    any thread     masks to the image's own size (``sam3_ray.answers``)

``run`` is the last two. Requests of one image are merged: its features are computed once, a phrase that
several requests ask is asked once, and each request picks its own instances by its own threshold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import batched
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from sam3_ray.answers import STAGES, Answer, Grounded, Instances, finish, timed
from sam3_ray.backends.base import (
    NEW_PHRASES,
    TEXT_CACHE_ENTRIES,
    Backend,
    Float32Array,
    ImageFeatures,
    Uint8Array,
)
from sam3_ray.cache import LruCache
from sam3_ray.errors import ImageNotCachedError
from sam3_ray.images import ImageSource, pixel_digest
from sam3_ray.prompt import Prompt, Request
from sam3_ray.selection import Selection, scores_of, select, sigmoid

_FILE_DIGESTS_KEPT = 65536
"""File digests that are remembered as names of cached pixels, about 100 bytes each."""


@dataclass(frozen=True)
class _Image:
    """An image ready for the device, or (``prepared`` None) one whose features are cached."""

    key: str
    height: int
    width: int
    prepared: Any
    decode_ms: float


@dataclass(frozen=True)
class _CachedImage:
    features: ImageFeatures
    height: int
    width: int


class Engine:
    """Owns a backend, the image cache and the text cache.

    Args:
        backend: the model on its device.
        image_cache_bytes: budget of the image cache; None takes the backend's, 0 turns it off.
    """

    def __init__(self, backend: Backend, *, image_cache_bytes: int | None = None) -> None:
        self.backend = backend
        budget = (
            backend.capacity.image_cache_bytes if image_cache_bytes is None else image_cache_bytes
        )
        self._images: LruCache[str, _CachedImage] = LruCache(
            budget, on_evict=lambda image: image.features.release()
        )
        self._texts: LruCache[str, Any] = LruCache(TEXT_CACHE_ENTRIES)
        self._pixel_keys: LruCache[str, str] = LruCache(_FILE_DIGESTS_KEPT)
        self._preloaded: WeakKeyDictionary[ImageSource, _Image] = WeakKeyDictionary()
        self._preloaded_lock = threading.Lock()
        self._device_lock = threading.Lock()
        self._closed = False

    def holds(self, digest: str) -> bool:
        """Whether the features of the image with this file or pixel digest are cached."""
        key = self._pixel_keys.peek(digest) or digest
        return key in self._images

    def is_ready(self, source: ImageSource) -> bool:
        """Whether nothing is left to decode: the features are cached, or it was preloaded."""
        return self._lookup(source) is not None

    def preload(self, source: ImageSource, *, forget_pixels: bool = False) -> None:
        """Decode and prepare an image unless its features are cached. Any thread.

        Args:
            source: the image.
            forget_pixels: have the source let go of its pixels once they are prepared; it is then good for
                one request of one :meth:`ground`.

        Raises:
            ImageError, FileNotFoundError: the image cannot be used.
            ImageNotCachedError: it was named by a digest that is not cached.
        """
        image = self._lookup(source) or self._load(source, always=forget_pixels)
        if forget_pixels and image.prepared is not None:
            source.forget_pixels()

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer requests, in order. A bad one gets an ``error`` and costs the others nothing."""
        return [finish(grounded) for grounded in self.ground(requests)]

    def ground(
        self,
        requests: Sequence[Request],
        *,
        keep: bool = True,
        done: Callable[[int, Grounded], None] = lambda index, grounded: None,
    ) -> list[Grounded]:
        """The device's share of a run. Calls from several threads take turns.

        Args:
            requests: any mix of images and phrases.
            keep: whether results go into the caches (the warm-up's do not).
            done: told of each request, by its index, as soon as its image is done; others may follow. Called
                on this thread, between two images: it should take no time.

        Returns:
            One for each request, in order; what went wrong with one is its ``error``.

        Raises:
            RuntimeError: the engine is closed.
        """
        grounded = [Grounded(request) for request in requests]
        # Decoding is the host's work: do it before the device is taken.
        for i, request in enumerate(requests):
            _try(grounded, [i], partial(self.preload, request.source))
        with self._device_lock:
            self.check_open()
            groups: dict[str, list[int]] = {}
            images: dict[str, _Image] = {}
            for i, request in enumerate(requests):
                if grounded[i].error is None:
                    _try(grounded, [i], partial(self._group, request, i, groups, images))
            for key, members in groups.items():
                step = partial(self._ground_image, images[key], members, grounded, keep)
                _try(grounded, members, step)
                for i in members:
                    done(i, grounded[i])
        return grounded

    def check_open(self) -> None:
        """Raise RuntimeError where the engine is closed."""
        if self._closed:
            raise RuntimeError("this model is closed")

    def clear_caches(self) -> None:
        """Forget every image and every phrase."""
        with self._device_lock:
            self._images.clear()
            self._texts.clear()
            self._pixel_keys.clear()

    def resize_image_cache(self, budget: int | None) -> int:
        """Give the image cache another budget, while the engine works.

        Args:
            budget: in bytes; None takes the backend's. Where the backend's room is fixed, that is the most.

        Returns:
            The budget that holds.
        """
        capacity = self.backend.capacity
        if budget is None or capacity.cache_is_fixed:
            most = capacity.image_cache_bytes
            budget = most if budget is None else min(budget, most)
        with self._device_lock:
            self._images.resize(budget)
        return budget

    def stats(self) -> dict[str, dict[str, int]]:
        """Hits, misses, entries and sizes (bytes for images, entries for phrases) of both caches."""
        return {"image_cache": self._images.stats(), "text_cache": self._texts.stats()}

    def encode_phrases(self, phrases: Sequence[str]) -> None:
        """Compute and keep the text features of phrases, so that their first request finds them.

        Raises:
            RuntimeError: the engine is closed.
        """
        with self._device_lock:
            self.check_open()
            texts = [Prompt(phrase).text for phrase in phrases]
            for group in batched(texts, NEW_PHRASES):
                self._text_features(list(group), keep=True)

    def close(self) -> None:
        """Release the caches and the backend; safe to call more than once."""
        with self._device_lock:
            if self._closed:
                return
            self._closed = True
            self._images.clear()
            self._texts.clear()
            self.backend.close()

    # -- images ------------------------------------------------------------------------------------

    def _lookup(self, source: ImageSource) -> _Image | None:
        """The image where it needs no decoding: its features are cached, or it was preloaded."""
        if source.digest is not None:
            key = self._pixel_keys.get(source.namespace + source.digest)
            cached = None if key is None else self._images.peek(key)
            if key is not None and cached is not None:
                return _Image(key, cached.height, cached.width, None, 0.0)
        with self._preloaded_lock:
            return self._preloaded.get(source)

    def _load(self, source: ImageSource, *, always: bool = False) -> _Image:
        """Decode, and prepare where the features are not cached, or ``always``: they may soon be evicted."""
        started = time.perf_counter()
        pixels = source.pixels()
        key = source.namespace + pixel_digest(pixels)
        known = key in self._images and not always
        prepared = None if known else self.backend.prepare(pixels)
        image = _Image(key, pixels.shape[0], pixels.shape[1], prepared, _ms_since(started))
        with self._preloaded_lock:
            self._preloaded[source] = image
        return image

    def _group(
        self, request: Request, index: int, groups: dict[str, list[int]], images: dict[str, _Image]
    ) -> None:
        image = self._lookup(request.source) or self._load(request.source)
        known = images.get(image.key)
        if known is None or known.prepared is None:
            images[image.key] = image
        groups.setdefault(image.key, []).append(index)

    def _image_features(
        self, image: _Image, sources: list[ImageSource], keep: bool
    ) -> tuple[ImageFeatures, bool]:
        """The features of an image, and whether they came from the cache."""
        cached = self._images.get(image.key) if keep else None
        if cached is not None:
            features, hit = cached.features, True
        else:
            prepared = image.prepared
            if prepared is None:  # evicted since it was looked up
                prepared = self.backend.prepare(_first_pixels(sources))
            features, hit = self.backend.encode_image(prepared), False
            if keep:
                self._images.put(
                    image.key, _CachedImage(features, image.height, image.width), features.nbytes
                )
        if keep and image.key in self._images:
            for source in sources:
                if source.digest is not None:
                    self._pixel_keys.put(source.namespace + source.digest, image.key)
        with self._preloaded_lock:
            for source in sources:
                self._preloaded.pop(source, None)
        return features, hit

    # -- one image on the device -------------------------------------------------------------------

    def _ground_image(
        self, image: _Image, members: list[int], grounded: list[Grounded], keep: bool
    ) -> None:
        requests = {i: grounded[i].request for i in members}
        timing = dict.fromkeys(STAGES, 0.0)
        timing["decode"] = image.decode_ms
        with timed(timing, "image"):
            features, hit = self._image_features(image, [r.source for r in requests.values()], keep)
        try:
            phrases = list(dict.fromkeys(p.text for r in requests.values() for p in r.prompts))
            found: dict[tuple[int, int], Instances] = {}
            for start in range(0, len(phrases), NEW_PHRASES):
                some = phrases[start : start + NEW_PHRASES]
                with timed(timing, "text"):
                    texts = self._text_features(some, keep)
                found |= self._found(image, features, some, texts, requests, timing)
        finally:
            if image.key not in self._images or not keep:
                features.release()
        for i, request in requests.items():
            grounded[i] = Grounded(
                request,
                instances=[found[i, position] for position in range(len(request.prompts))],
                width=image.width,
                height=image.height,
                digest=request.source.digest or image.key,
                cached=hit,
                timing_ms=dict(timing),
            )

    def _found(
        self,
        image: _Image,
        features: ImageFeatures,
        phrases: list[str],
        texts: list[Any],
        requests: dict[int, Request],
        timing: dict[str, float],
    ) -> dict[tuple[int, int], Instances]:
        """The instances of these phrases in every request of one image, by (request, position)."""
        asked: dict[str, list[tuple[int, int, Prompt]]] = {phrase: [] for phrase in phrases}
        for i, request in requests.items():
            for position, prompt in enumerate(request.prompts):
                if prompt.text in asked:
                    asked[prompt.text].append((i, position, prompt))
        scale = np.array([image.width, image.height] * 2, np.float32)
        found: dict[tuple[int, int], Instances] = {}
        start = 0
        for size in self.backend.capacity.plan(len(phrases)):
            run = range(start, start + size)
            start += size
            with timed(timing, "prompts"):
                grounding = self.backend.ground(features, [texts[p] for p in run])
            selections: list[tuple[int, int, int, Selection]] = []
            for row, phrase in enumerate(phrases[p] for p in run):
                scores = scores_of(grounding.logits[row], float(grounding.presence_logits[row]))
                for i, position, prompt in asked[phrase]:
                    request = requests[i]
                    chosen = select(scores, request.threshold_of(prompt), request.max_instances)
                    selections.append((row, i, position, chosen))
            kept = sorted(
                {
                    (row, int(query))
                    for row, i, _, chosen in selections
                    if requests[i].wants_masks
                    for query in chosen.queries
                }
            )
            with timed(timing, "masks"):
                logits = self.backend.read_masks(grounding.masks, kept)
            row_of = {pair: n for n, pair in enumerate(kept)}
            for row, i, position, chosen in selections:
                queries = chosen.queries if requests[i].wants_masks else ()
                found[i, position] = Instances(
                    prompt=phrases[run[row]],
                    scores=chosen.scores,
                    boxes=_boxes_xyxy(grounding.boxes_cxcywh[row][chosen.queries], scale),
                    presence=float(sigmoid(grounding.presence_logits[row])),
                    truncated=chosen.truncated,
                    height=image.height,
                    width=image.width,
                    logits=logits,
                    rows=np.array([row_of[row, int(query)] for query in queries], np.int64),
                )
        return found

    def _text_features(self, phrases: list[str], keep: bool) -> list[Any]:
        # Past the cache both ways: a phrase that was encoded among others has other last bits than alone.
        features = {phrase: self._texts.get(phrase) if keep else None for phrase in phrases}
        new = [phrase for phrase, value in features.items() if value is None]
        if new:
            features.update(zip(new, self.backend.encode_text(new), strict=True))
            if keep:
                for phrase in new:
                    self._texts.put(phrase, features[phrase])
        return [features[phrase] for phrase in phrases]


def _try(grounded: list[Grounded], members: list[int], step: Callable[[], object]) -> None:
    """Run a step; what it raises is the error of the requests it was for, and of no other."""
    try:
        step()
    except Exception as error:  # noqa: BLE001 - it becomes those requests' answer
        for i in members:
            grounded[i] = Grounded(grounded[i].request, error=error)


def _first_pixels(sources: Sequence[ImageSource]) -> Uint8Array:
    """The pixels of the first source that has them; the others may be digests of the same image."""
    for source in sources[:-1]:
        try:
            return source.pixels()
        except ImageNotCachedError:
            continue
    return sources[-1].pixels()


def _boxes_xyxy(boxes_cxcywh: Float32Array, scale: Float32Array) -> Float32Array:
    """(N, 4) relative cxcywh -> (N, 4) xyxy in pixels, clamped to the image."""
    centre, half = boxes_cxcywh[:, :2], boxes_cxcywh[:, 2:] * np.float32(0.5)
    boxes = np.concatenate([centre - half, centre + half], axis=1) * scale
    return np.clip(boxes, np.float32(0.0), scale)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000.0
