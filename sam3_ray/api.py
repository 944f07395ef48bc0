"""The Python API: one model on one device."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from sam3_ray.answers import Answer
from sam3_ray.backends.base import Backend
from sam3_ray.checkpoint import find_checkpoint
from sam3_ray.engine import Engine
from sam3_ray.images import ImageSource
from sam3_ray.prompt import (
    DEFAULT_MAX_INSTANCES,
    DEFAULT_THRESHOLD,
    Prompt,
    Request,
    as_prompts,
)
from sam3_ray.result import Sam3Result
from sam3_ray.settings import REPO_ID, default_num_threads, settings
from sam3_ray.stream import answer_each, checked_images
from sam3_ray.warmup import DEFAULT_WARMUP_VARIANTS, WarmUp, checked_variants

if TYPE_CHECKING:
    from sam3_ray.images import ImageLike

BackendName = Literal["auto", "cpu", "blackhole"]

_CHIP_ONLY_ARGUMENTS = ("device_id", "device", "dispatch", "precision", "warmup")


class Sam3:
    """Text-prompted instance segmentation: an image and noun phrases in, instances out.

    Make one with :meth:`from_pretrained`. Calls from several threads take turns. Use it in a ``with``
    statement, or call :meth:`close`; a model still open when Python exits is closed then.

    Attributes:
        engine: what runs requests; the service and the labeller use it directly.
    """

    def __init__(self, engine: Engine, info: dict[str, Any]) -> None:
        self.engine = engine
        self._info = info
        self._warm_up = WarmUp(engine)
        _open_models.add(self)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str = REPO_ID,
        *,
        revision: str | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        device_id: int = 0,
        device: Any = None,
        dispatch: Literal["auto", "eth", "worker"] = "auto",
        warmup: int = 2,
        warmup_variants: Mapping[str, Iterable[Any]] | Literal[False] | None = None,
        num_threads: int | None = None,
        cache_image: bool = True,
        verbose: bool = False,
        backend: BackendName = "auto",
        precision: Literal["accurate", "fast"] | None = None,
        image_cache_bytes: int | None = None,
    ) -> Self:
        """Load the weights, open the device, and prepare for the first call.

        Args:
            repo_id: Hub repository that holds sam3.pt, or ``demo``: the small checkpoint in the package.
            revision: of the repository; default TT_WEIGHTS_REVISION, else ``PINNED_REVISION``.
            checkpoint_path: a local sam3.pt, or a folder that holds it, instead of the Hub.
                SAM3_WEIGHTS_DIR does the same.
            device_id: chip to open; chips only.
            device: an open ttnn device, which ``close`` leaves open; chips only.
            dispatch: how work reaches the chip's cores (``device_open_kwargs``); chips only.
            warmup: trace warm-up forwards, 0 for no warm-up at all; chips only.
            warmup_variants: what to prepare. None: ``DEFAULT_WARMUP_VARIANTS`` on a chip, nothing on the
                CPU, which compiles nothing. A dict replaces the defaults of the keys it names. False: none.
            num_threads: torch's host threads; default SAM3_NUM_THREADS, else 17, at most the CPUs here.
            cache_image: keep the features of images, so that the next phrases skip the image part.
            verbose: show tt-metal's log and the steps of ``sam3_ray``.
            backend: ``auto`` is a chip where there is one, else the CPU.
            precision: of the chip's arithmetic; chips only.
            image_cache_bytes: budget of the image cache; default SAM3_IMAGE_CACHE_BYTES, else the
                backend's own.

        Raises:
            WeightsNotFoundError, WeightsAccessError: no weights; the message says what to do.
            CheckpointError: the checkpoint is broken or does not fit.
            TypeError, ValueError: an argument out of its range.
        """
        started = time.perf_counter()
        _check_argument("backend", backend, ("auto", "cpu", "blackhole"))
        _check_argument("dispatch", dispatch, ("auto", "eth", "worker"))
        _check_argument("precision", precision, (None, "accurate", "fast"))
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
            raise ValueError(f"warmup must be a number of forwards, at least 0, got {warmup!r}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        if image_cache_bytes is not None and (
            isinstance(image_cache_bytes, bool)
            or not isinstance(image_cache_bytes, int)
            or image_cache_bytes < 0
        ):
            raise ValueError(
                f"image_cache_bytes must be a number of bytes, at least 0, got {image_cache_bytes!r}"
            )
        asked = checked_variants(warmup_variants) if warmup_variants else {}
        _configure_console(verbose)
        chosen = _choose_backend(backend)
        checkpoint = find_checkpoint(
            repo_id,
            revision=revision,
            checkpoint_path=None if checkpoint_path is None else Path(checkpoint_path),
        )
        threads = default_num_threads() if num_threads is None else num_threads
        budget = 0 if not cache_image else image_cache_bytes
        if budget is None:
            budget = settings().image_cache_bytes
        machine: Backend
        if chosen == "blackhole":
            from sam3_ray.backends.blackhole import open_backend

            machine = open_backend(
                checkpoint.path,
                device_id=device_id,
                device=device,
                dispatch=dispatch,
                precision=precision,
                image_cache_bytes=budget,
                num_threads=threads,
            )
            if warmup_variants is not False:
                asked = DEFAULT_WARMUP_VARIANTS | asked
            unused = []
        else:
            from sam3_ray.backends.cpu.backend import CpuBackend

            machine = CpuBackend(checkpoint.path, num_threads=threads)
            given = {
                "device_id": device_id != 0,
                "device": device is not None,
                "dispatch": dispatch != "auto",
                "precision": precision is not None,
                "warmup": warmup != 2,
            }
            unused = [name for name in _CHIP_ONLY_ARGUMENTS if given[name]]
        try:
            model = cls(
                Engine(machine, image_cache_bytes=budget),
                {
                    "backend": chosen,
                    "checkpoint": checkpoint.label,
                    "checkpoint_path": str(checkpoint.path),
                    "revision": checkpoint.revision,
                    "config": machine.config.to_dict(),
                    "unused_arguments": unused
                    + (["SAM3_TEXT_WORKERS"] if "SAM3_TEXT_WORKERS" in os.environ else []),
                },
            )
            if warmup and asked:
                model.warmup(**asked)
        except BaseException:
            machine.close()
            raise
        model._info["load_seconds"] = round(time.perf_counter() - started, 3)
        return model

    @overload  # a str is a sequence of str too: the first signature that fits is meant
    def __call__(  # type: ignore[overload-overlap]
        self,
        image: ImageLike,
        prompts: str | Prompt,
        *,
        threshold: float = ...,
        max_instances: int = ...,
        return_masks: bool = ...,
        return_mask_logits: bool = ...,
    ) -> Sam3Result: ...

    @overload
    def __call__(
        self,
        image: ImageLike,
        prompts: Sequence[str | Prompt],
        *,
        threshold: float = ...,
        max_instances: int = ...,
        return_masks: bool = ...,
        return_mask_logits: bool = ...,
    ) -> list[Sam3Result]: ...

    def __call__(
        self,
        image: ImageLike,
        prompts: str | Prompt | Sequence[str | Prompt],
        *,
        threshold: float = DEFAULT_THRESHOLD,
        max_instances: int = DEFAULT_MAX_INSTANCES,
        return_masks: bool = True,
        return_mask_logits: bool = False,
    ) -> Sam3Result | list[Sam3Result]:
        """Find every instance of each phrase.

        Args:
            image: a path, encoded bytes, a PIL image, a numpy array or a torch tensor
                (``sam3_ray.load_image`` tells which arrays).
            prompts: a noun phrase or several; a ``Prompt`` carries a threshold of its own.
            threshold: keep instances with a score above it.
            max_instances: at most so many a phrase, highest scores first (1 to 200).
            return_masks: False skips the masks at the image's size (``masks`` is None).
            return_mask_logits: also give the raw mask logits.

        Returns:
            One ``Sam3Result`` for a phrase, a list in the same order for a list.

        Raises:
            ImageError, FileNotFoundError: the image cannot be used.
            TypeError, ValueError: a phrase or an option that does not fit.
            RuntimeError: the model is closed.
        """
        request = _request(
            ImageSource.of(image),
            prompts,
            threshold=threshold,
            max_instances=max_instances,
            return_masks=return_masks,
            return_mask_logits=return_mask_logits,
        )
        results = self.engine.run([request])[0].unwrap()
        return results[0] if isinstance(prompts, (str, Prompt)) else results

    def predict_many(
        self,
        images: Iterable[ImageLike],
        prompts: str | Prompt | Sequence[str | Prompt],
        **options: Any,
    ) -> list[Any]:
        """``model(image, prompts, **options)`` for each image, in order.

        The next image is read and decoded on a host thread while the model works on this one.

        Raises:
            As a call, with the image's index and name in the message.
        """
        return list(self.predict_iter(images, prompts, **options))

    def predict_iter(
        self,
        images: Iterable[ImageLike],
        prompts: str | Prompt | Sequence[str | Prompt],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Any,
    ) -> Iterator[Any]:
        """``predict_many`` one by one, for more images than results fit in memory.

        Args:
            images: any iterable, but not one array that might be an image itself; it is read one image ahead.
            prompts: as in a call.
            on_error: ``return`` yields the exception in the place of a bad image's results.
            **options: as in a call.

        Raises:
            As a call; TypeError too where ``images`` is one image. An error that is an image's comes when its
            turn does, all others at once.
        """
        _check_argument("on_error", on_error, ("raise", "return"))
        upcoming = checked_images(images)
        single = isinstance(prompts, (str, Prompt))
        _request(ImageSource.from_digest("0" * 32), prompts, **options)  # bad options fail at once
        answers = answer_each(
            self.engine, upcoming, lambda source: _request(source, prompts, **options)
        )
        return self._outcomes(answers, single=single, on_error=on_error)

    @staticmethod
    def _outcomes(
        answers: Generator[Answer, None, None], *, single: bool, on_error: str
    ) -> Iterator[Any]:
        with closing(answers):  # ends its thread now, not when a traceback is collected
            for answer in answers:
                if answer.error is None:
                    yield answer.results[0] if single else answer.results
                elif on_error == "return":
                    yield answer.error
                else:
                    raise answer.error

    def warmup(
        self,
        *,
        prompt_counts: Iterable[int] = (),
        image_sizes: Iterable[tuple[int, int]] = (),
        max_instances: Iterable[int] = (),
        prompts: Iterable[str] = (),
    ) -> dict[str, float]:
        """Prepare more kinds of request; one that is prepared already is skipped.

        Args:
            prompt_counts: numbers of phrases a call.
            image_sizes: (height, width) in pixels.
            max_instances: read-back sizes.
            prompts: phrases whose text features are computed and kept now.

        Returns:
            {variant: seconds} of the variants that ran.
        """
        return self._warm_up.run(
            {
                "prompt_counts": prompt_counts,
                "image_sizes": image_sizes,
                "max_instances": max_instances,
                "prompts": prompts,
            }
        )

    @property
    def warmed_variants(self) -> list[str]:
        """The variants that are prepared."""
        return list(self._warm_up.seconds)

    @property
    def info(self) -> dict[str, Any]:
        """Checkpoint, device, caches and warm-up; JSON-friendly."""
        return {
            **self._info,
            **self.engine.backend.info(),
            **self.engine.stats(),
            "warmup": {
                "variants": self.warmed_variants,
                "seconds": round(sum(self._warm_up.seconds.values()), 3),
            },
        }

    def close(self) -> None:
        """Release the device, its buffers and the caches. Safe to call more than once."""
        _open_models.discard(self)
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_open_models: weakref.WeakSet[Sam3] = weakref.WeakSet()


@atexit.register
def _close_open_models() -> None:
    for model in list(_open_models):
        model.close()


def _request(
    source: ImageSource,
    prompts: str | Prompt | Sequence[str | Prompt],
    **options: Any,
) -> Request:
    return Request(source=source, prompts=as_prompts(prompts), **options)


def _check_argument(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def _choose_backend(backend: BackendName) -> Literal["cpu", "blackhole"]:
    if backend != "auto":
        return backend
    from sam3_ray import chips

    return "blackhole" if chips.look().visible() else "cpu"


def _configure_console(verbose: bool) -> None:
    """Keep tt-metal and ttnn quiet unless asked otherwise; they read these once, at import."""
    import logging

    if verbose:
        logger = logging.getLogger("sam3_ray")
        if not logger.handlers:
            logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    elif "ttnn" not in sys.modules:
        os.environ.setdefault("TT_LOGGER_LEVEL", "error")
        os.environ.setdefault("LOGURU_LEVEL", "WARNING")


__all__ = ["DEFAULT_WARMUP_VARIANTS", "Sam3"]
