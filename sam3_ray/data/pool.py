"""Ray Data's part of a job: the images that remain as blocks, through a pool of actors, as they come."""

from __future__ import annotations

import math
import shutil
import threading
import uuid
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import batched
from pathlib import Path
from typing import Any

import pyarrow as pa

from sam3_ray.data.attempts import CONDEMNED
from sam3_ray.data.labeler import Sam3Labeler
from sam3_ray.data.machine import Actors
from sam3_ray.data.schema import PLANNED
from sam3_ray.ray_messages import cause_of

_ATTEMPTS = ".attempts"
THREADS_END_S = 3.0
"""How long each of Ray Data's threads may take to end, where a run is stopped half-way."""

_OURS = ("sam3_ray.data.labeler.", "sam3_ray.data.openings.")


class LabellingError(RuntimeError):
    """A job that ended before all was labelled. What was labelled is kept, and the same call goes on."""


def batch_rows(actors: Actors, images: int) -> int:
    """Rows of a batch: small enough that each actor gets some, and that a result comes now and then."""
    return max(1, min(actors.batch_size, math.ceil(images / (2 * actors.size))))


def blocks_of(remaining: dict[int, list[tuple[int, str]]], rows: int) -> Iterator[pa.Table]:
    """A table for each batch; none holds images of two shards."""
    for pairs in remaining.values():
        for some in batched(pairs, rows):
            ids, paths = zip(*some, strict=True)
            yield pa.table([ids, paths], schema=pa.schema(PLANNED))


def results_of(
    blocks: list[pa.Table], actors: Actors, constructor: dict[str, Any]
) -> Generator[pa.Table]:
    """Ray Data's part: the actors' answers to each block, as they come."""
    import ray
    import ray.data

    options = Sam3Labeler.options(actors.backend, size=actors.size, batch_size=None)
    options |= {"num_cpus": actors.num_cpus, "resources": actors.resources}
    # Not from_arrow: that asks a task for each block's size, 4 ms each.
    dataset = ray.data.from_blocks(blocks)
    context = dataset.context
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    if actors.backend == "cpu":
        context.execution_no_progress_timeout_s = -1  # a batch of many phrases may take its time
    with warnings.catch_warnings():
        # Ray 2.60 has no other way to say max_restarts and max_task_retries.
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        labelled = dataset.map_batches(Sam3Labeler, fn_constructor_kwargs=constructor, **options)
    threads = set(threading.enumerate())
    try:
        yield from labelled.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=0
        )
        threads = set(threading.enumerate())  # all is done: nobody has to be waited for
    except (ray.exceptions.RayError, ray.data.exceptions.RayDataUserCodeException) as error:
        cause = cause_of(str(error))
        for module in _OURS:
            cause = cause.removeprefix(module)
        raise LabellingError(cause) from error
    finally:
        # Stopped half-way, Ray Data's threads would go on, and ask for blocks of a Ray that is shut down by
        # then, which ends this process without a word. Nothing public ends them.
        if labelled._current_executor is not None:
            labelled._current_executor.shutdown(force=True)
        for thread in set(threading.enumerate()) - threads:
            thread.join(timeout=THREADS_END_S)


@contextmanager
def attempts_folder(folder: Path) -> Iterator[Path]:
    """A folder for this run's attempts. Those of earlier runs go; the condemned stay until all is done."""
    everything = folder / _ATTEMPTS
    everything.mkdir(exist_ok=True)
    for old in everything.iterdir():
        if old.name != CONDEMNED:
            shutil.rmtree(old, ignore_errors=True)
    mine = everything / uuid.uuid4().hex[:12]
    mine.mkdir()
    yield mine
    shutil.rmtree(everything, ignore_errors=True)
