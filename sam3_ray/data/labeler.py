"""``Sam3Labeler``: the callable class for ``ray.data.Dataset.map_batches``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from sam3_ray import chips
from sam3_ray.api import Sam3
from sam3_ray.backends.base import TEXT_CACHE_ENTRIES
from sam3_ray.cache import LruCache
from sam3_ray.data.attempts import DEATHS, Attempts, ByteBudget, Gate
from sam3_ray.data.columns import Batch, Row, kept_columns, rows_of
from sam3_ray.data.labels import (
    KillsProcessError,
    Label,
    NoImageError,
    PromptsError,
    error_kind,
    error_values,
    label_of,
)
from sam3_ray.data.machine import BATCH_SIZE, plan_actors
from sam3_ray.data.openings import Openings
from sam3_ray.data.ray_session import this_actor
from sam3_ray.data.reading import read_input
from sam3_ray.data.schema import MaskFormat, check_kept, label_schema
from sam3_ray.engine import Engine
from sam3_ray.images import ImageSource, stored_size
from sam3_ray.prompt import (
    DEFAULT_MAX_INSTANCES,
    DEFAULT_THRESHOLD,
    Prompt,
    Request,
    as_prompts,
)
from sam3_ray.settings import MIB, REPO_ID

IMAGES_AT_WORK = 6
"""Images that one actor reads, decodes, has on the device and encodes at a time."""

DECODE_BYTES = 13
"""Memory that a pixel may take while its image is decoded and prepared: 4 in Pillow, 4 more where it is
turned upright, 3 as an array, and what the format's decoder holds. Then only the model's input stays."""

MASK_BYTES: dict[MaskFormat, int] = {"rle": 3, "polygon": 12, "none": 0}
"""Memory that a pixel may take while the image's masks are encoded, which is done one by one."""

WORK_BYTES = 1024 * MIB
"""Memory for images at work in one actor; a larger one waits until it is alone. So what a batch takes is
bounded in bytes, whatever its rows: 6 pictures of a camera are decoded at a time, and 1 of 8000 x 6000."""

KNOWN_LABELS_BYTES = 32 * MIB
"""Labels that are kept, so that a picture that comes twice is labelled once."""

IMAGE_CACHE_BYTES = 256 * MIB
"""Budget of the engine's image cache: other phrases of an image just seen skip the image part."""

FAILURES_IN_A_ROW = 8
"""So many images that fail for no reason of their own mean that the model, or its device, is broken."""

MAX_RESTARTS = 64
"""Of one actor: twice for each image that kills its process."""

CALLS_AT_A_TIME = 2
"""So that the first image of a batch is decoded while the last of the one before is on the device."""


class BrokenModelError(RuntimeError):
    """The model fails on image after image: labelling stops, before all of them become errors."""


class Sam3Labeler:
    """Labels batches of images. One actor has one model on one device::

        ds = ray.data.read_binary_files(folder, include_paths=True)
        ds.map_batches(
            Sam3Labeler,
            fn_constructor_kwargs={"prompts": ["car", "person"]},
            **Sam3Labeler.options(),
        )

    A row has its image in a column ``bytes`` (an encoded file), else ``path`` (a file or URI), else ``image``
    (an (H, W, 3) uint8 array, or what else ``sam3_ray.load_image`` takes for an array). Each row comes back,
    in order, with the columns of ``sam3_ray.data.schema.label_schema``; an image that cannot be used has its
    ``error`` set, and costs the others nothing.

    Args:
        prompts: the phrases to look for in each image; None: a column ``prompts`` has those of each row.
        threshold: keep instances with a score above it.
        max_instances: at most so many a phrase and image, highest scores first (1 to 200).
        masks: ``rle`` (COCO's, compressed), ``polygon`` (flat rings, even-odd), or ``none``.
        keep: columns of the input that go through; None: ``path``, where there is one.
        repo_id, revision, checkpoint_path: the weights, as in ``Sam3.from_pretrained``.
        backend: ``auto`` is the chip that Ray gave this actor, else the CPU.
        num_threads: torch's host threads; None follows the CPUs that Ray reserved for this actor.
        attempts: a folder that all actors share, for finding images that kill their process
            (``sam3_ray.data.attempts``); None leaves such an image to fail the job.
        actors: how many share that folder: one whose model does not open leaves the work to the others
            (``sam3_ray.data.openings``).
        open_engine: opens something else than ``Sam3.from_pretrained`` would.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        WeightsNotFoundError, WeightsAccessError, CheckpointError: of the weights.
        ChipUnavailableError: the chip does not open.
    """

    def __init__(
        self,
        prompts: str | Prompt | Sequence[str | Prompt] | None = None,
        *,
        threshold: float = DEFAULT_THRESHOLD,
        max_instances: int = DEFAULT_MAX_INSTANCES,
        masks: MaskFormat = "rle",
        keep: Sequence[str] | None = None,
        repo_id: str = REPO_ID,
        revision: str | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        backend: Literal["auto", "cpu", "blackhole"] = "auto",
        num_threads: int | None = None,
        image_cache_bytes: int = IMAGE_CACHE_BYTES,
        attempts: str | os.PathLike[str] | None = None,
        actors: int = 1,
        open_engine: Callable[[], Engine] | None = None,
    ) -> None:
        self._prompts = None if prompts is None else check_prompts(prompts)
        self._options: dict[str, Any] = {"threshold": threshold, "max_instances": max_instances}
        # Out of its range, an option fails here, not in each row.
        Request(ImageSource.from_digest("0" * 32), return_masks=masks != "none", **self._options)
        label_schema(masks)
        self._masks = masks
        self._keep = None if keep is None else tuple(keep)
        check_kept(self._keep or ())
        self._attempts = None if attempts is None else Attempts(os.fspath(attempts))
        self._gate = Gate()
        self._memory = ByteBudget(WORK_BYTES)
        self._known: LruCache[tuple[str, tuple[Prompt, ...]], Label] = LruCache(KNOWN_LABELS_BYTES)
        self._pending: dict[tuple[str, tuple[Prompt, ...]], threading.Event] = {}
        self._lock = threading.Lock()
        self._failures = 0
        self._broken: BrokenModelError | None = None
        if open_engine is None:
            open_engine = partial(
                _open_model,
                repo_id,
                revision=revision,
                checkpoint_path=checkpoint_path,
                backend=_backend_here(backend),
                num_threads=num_threads or _threads_here(),
                image_cache_bytes=image_cache_bytes,
            )
        if attempts is None:
            self._engine = open_engine()
        else:
            self._engine = Openings(Path(attempts), actors).open(open_engine)
        if self._prompts is not None:
            self._engine.encode_phrases([prompt.text for prompt in self._prompts])
        self._workers = ThreadPoolExecutor(IMAGES_AT_WORK, thread_name_prefix="sam3_ray-label")
        # One thread owns the device, whichever of the calls an image came with.
        self._device = ThreadPoolExecutor(1, thread_name_prefix="sam3_ray-device")

    @staticmethod
    def options(
        backend: Literal["auto", "cpu", "blackhole"] = "auto",
        *,
        size: int | None = None,
        batch_size: int | None = BATCH_SIZE,
        repo_id: str = REPO_ID,
        checkpoint_path: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """The arguments of ``map_batches`` that are right for this machine, or the Ray that is connected to.

        One actor a chip with its ``TTNPU``, or on the CPU as many as CPUs and memory allow; a CPU left to the
        tasks that read; two calls at a time in an actor, which overlap decoding and the device; and finite
        retries, where Ray Data's own are endless.

        Args:
            backend: ``auto`` is chips where there are any.
            size: so many actors instead of all that fit.
            batch_size: rows of a call.
            repo_id, checkpoint_path: of the model, whose size decides how many the memory holds.

        Raises:
            ValueError: chips are asked for that are not there.
        """
        import ray.data

        actors = plan_actors(backend, size=size, repo_id=repo_id, checkpoint_path=checkpoint_path)
        return {
            "compute": ray.data.ActorPoolStrategy(
                size=actors.size,
                max_tasks_in_flight_per_actor=2 * CALLS_AT_A_TIME,
                max_concurrent_calls_per_actor=CALLS_AT_A_TIME,
                enable_true_multi_threading=True,
            ),
            "batch_size": batch_size,
            "batch_format": "pyarrow",
            "num_cpus": actors.num_cpus,
            "resources": actors.resources,
            "max_restarts": MAX_RESTARTS,
            "max_task_retries": MAX_RESTARTS,
        }

    def __call__(self, batch: Batch) -> pa.Table:
        """Label a batch, which Ray Data gives as a table (``batch_format="pyarrow"``) or a dict of arrays.

        Raises:
            ValueError: no column has images, or a column that is to be kept is not there.
            TypeError: a batch of another format.
            BrokenModelError: image after image fails for no reason of its own.
        """
        kept = kept_columns(batch, self._keep)
        labels = list(self._workers.map(self._label_row, rows_of(batch, self._prompts)))
        if self._broken is not None:
            raise self._broken
        schema = label_schema(self._masks)
        return pa.Table.from_arrays(
            [*kept.columns, *pa.Table.from_pylist(labels, schema=schema).columns],
            schema=label_schema(self._masks, kept.schema),
        )

    def close(self) -> None:
        """Release the device and end the threads."""
        self._workers.shutdown(cancel_futures=True)
        self._device.shutdown(cancel_futures=True)
        self._engine.close()

    # -- one row, on a worker's thread -------------------------------------------------------------

    def _label_row(self, row: Row) -> dict[str, Any]:
        if self._broken is not None:
            return error_values(self._broken)  # of a batch that raises
        try:
            key = None if self._attempts is None else row.key()
            if self._attempts is None or key is None:
                return self._label(row)
            deaths = self._attempts.deaths(key)
            if deaths >= DEATHS:
                raise KillsProcessError(
                    f"the process that worked on this image died {DEATHS} times, the last time with no "
                    "other image at work"
                )
            place = self._gate.alone() if deaths else self._gate.together()
            with place, self._attempts.at_work(key):
                return self._label(row)
        except Exception as error:  # noqa: BLE001 - it is this row's error
            return error_values(error)

    def _label(self, row: Row) -> dict[str, Any]:
        digest = None
        try:
            prompts = self._prompts or check_prompts(row.prompts, PromptsError)
            source, pixels = self._source(row)
            digest = source.digest
            if digest is None:
                return self._computed(source, pixels, prompts).values
            return self._once(digest, source, pixels, prompts).values
        except Exception as error:  # noqa: BLE001 - it is this row's error
            self._count_failure(error)
            return error_values(error, digest)

    def _source(self, row: Row) -> tuple[ImageSource, int]:
        """The image, read and not decoded, and how many pixels it has, as far as that is known."""
        if row.value is None:
            raise NoImageError(f"the row's {row.column} is null")
        if row.column == "image":
            source = ImageSource.of(np.asarray(row.value))
            return source, int(np.asarray(row.value).size) // 3
        if row.column == "path":
            if not isinstance(row.value, str):
                raise NoImageError(f"the row's path is a {type(row.value).__name__}, no text")
            data, name = read_input(row.value), row.value
        else:
            data, name = bytes(row.value), "bytes"
        width, height = stored_size(data) or (0, 0)
        return ImageSource.from_file(data, name), width * height

    def _once(
        self, digest: str, source: ImageSource, pixels: int, prompts: tuple[Prompt, ...]
    ) -> Label:
        """The label of a file: known, waited for where it is being made, or made."""
        key = (digest, prompts)
        while True:
            known = self._known.get(key)
            if known is not None:
                return known
            with self._lock:
                pending = self._pending.get(key)
                if pending is None:
                    mine = self._pending[key] = threading.Event()
                    break
            pending.wait()
        try:
            label = self._known.peek(key) or self._computed(source, pixels, prompts)
            self._known.put(key, label, label.nbytes)
            return label
        finally:
            with self._lock:
                del self._pending[key]
            mine.set()

    def _computed(self, source: ImageSource, pixels: int, prompts: tuple[Prompt, ...]) -> Label:
        request = Request(source, prompts, return_masks=self._masks != "none", **self._options)
        with self._memory.hold(DECODE_BYTES * pixels):
            self._engine.preload(source, forget_pixels=True)
        [grounded] = self._device.submit(self._engine.ground, [request]).result()
        if grounded.error is not None:
            raise grounded.error
        with self._memory.hold(MASK_BYTES[self._masks] * grounded.width * grounded.height):
            label = label_of(grounded, self._masks)
        with self._lock:
            self._failures = 0
        return label

    def _count_failure(self, error: Exception) -> None:
        if error_kind(error) != "failed":
            return
        with self._lock:
            self._failures += 1
            if self._failures >= FAILURES_IN_A_ROW and self._broken is None:
                self._broken = BrokenModelError(
                    f"{self._failures} images in a row failed for no reason of their own, the last with "
                    f"{type(error).__name__}: {error}"
                )


def _open_model(repo_id: str, **options: Any) -> Engine:
    return Sam3.from_pretrained(repo_id, **options).engine


def check_prompts(
    prompts: str | Prompt | Sequence[str | Prompt], error: type[ValueError] = ValueError
) -> tuple[Prompt, ...]:
    """Phrases as Prompts, each once.

    Raises:
        TypeError, ValueError: phrases that cannot be asked, or more than an actor keeps encoded.
    """
    try:
        checked = tuple(dict.fromkeys(as_prompts(prompts)))
    except (TypeError, ValueError) as raised:
        if error is ValueError:
            raise
        raise error(str(raised)) from raised
    texts = [prompt.text for prompt in checked]
    if len(set(texts)) < len(texts):
        raise error("prompts has a phrase with two thresholds")
    if len(texts) > TEXT_CACHE_ENTRIES:
        raise error(
            f"{len(texts)} prompts; an actor keeps {TEXT_CACHE_ENTRIES} phrases encoded: split the list"
        )
    return checked


def _assigned() -> dict[str, float] | None:
    """What Ray reserved for this actor; None outside of one."""
    actor = this_actor()
    return None if actor is None else dict(actor.get_assigned_resources())


def _backend_here(
    backend: Literal["auto", "cpu", "blackhole"],
) -> Literal["auto", "cpu", "blackhole"]:
    assigned = _assigned()
    if backend != "auto" or assigned is None:
        return backend
    return "blackhole" if assigned.get(chips.RAY_RESOURCE) else "cpu"


def _threads_here() -> int | None:
    assigned = _assigned()
    return None if assigned is None else max(1, int(assigned.get("CPU", 1.0)))


__all__ = ["BrokenModelError", "Sam3Labeler"]
