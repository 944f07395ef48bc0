"""How many actors a machine or cluster has room for, and what each reserves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from sam3_ray import chips
from sam3_ray.checkpoint import local_checkpoint
from sam3_ray.settings import REPO_ID

CPU_ACTOR_BYTES = 1 << 30
"""Memory of an actor on the CPU beside its weights: torch, Ray's worker, images at work."""

WEIGHTS_FACTOR = 2.5
"""Memory of weights and activations on the CPU, as a multiple of the checkpoint's size."""

FULL_CHECKPOINT_BYTES = 3_450_000_000
"""facebook/sam3's ``sam3.pt``, for a machine that has not fetched it yet."""

BATCH_SIZE = 16
"""Images of a batch."""

LARGE_MODEL_CPU_BATCH = 4
"""On the CPU, where the full model takes half a minute for each."""

LARGE_CHECKPOINT_BYTES = 100_000_000
"""The demo checkpoint has 12 MB and takes 20 ms an image."""


class NoSuchChipsError(ValueError):
    """More chips are asked for than there are."""


@dataclass(frozen=True)
class Actors:
    """The pool of actors.

    Attributes:
        backend: ``cpu`` or ``blackhole``.
        size: how many.
        num_cpus: that Ray reserves for each; together less than there are, so that reading tasks find some.
        num_threads: torch's host threads of each.
        batch_size: images of a batch at most: a result shall come now and then.
    """

    backend: Literal["cpu", "blackhole"]
    size: int
    num_cpus: float
    num_threads: int
    batch_size: int

    @property
    def resources(self) -> dict[str, float]:
        """Ray's resources of each beside CPUs: its chip."""
        return {chips.RAY_RESOURCE: 1.0} if self.backend == "blackhole" else {}


def plan_actors(
    backend: Literal["auto", "cpu", "blackhole"] = "auto",
    *,
    size: int | None = None,
    repo_id: str = REPO_ID,
    checkpoint_path: str | os.PathLike[str] | None = None,
) -> Actors:
    """The actors that fit: one a chip, or on the CPU as many as CPUs and memory allow.

    Looks at the Ray that this process is connected to, else at this machine.

    Args:
        backend: ``auto`` is chips where there are any.
        size: so many instead of all that fit.
        repo_id, checkpoint_path: of the model, whose size decides how many the memory holds.

    Raises:
        NoSuchChipsError: chips are asked for that are not there.
    """
    cpus, chip_count = _resources()
    if backend == "auto":
        backend = "blackhole" if chip_count else "cpu"
    if size is not None and (isinstance(size, bool) or size < 1):
        raise ValueError(f"the number of actors must be at least 1, got {size!r}")
    if backend == "blackhole":
        if chip_count < (size or 1):
            raise NoSuchChipsError(
                f"{size or 1} chips are asked for, and {chip_count} are here ({chips.RAY_RESOURCE}); "
                "`sam3-ray doctor` tells what is missing, and --chips cpu does without"
            )
        size = size or chip_count
    model_bytes = 0 if backend == "blackhole" else _checkpoint_bytes(repo_id, checkpoint_path)
    if size is None:
        needed = CPU_ACTOR_BYTES + WEIGHTS_FACTOR * model_bytes
        size = max(1, min(int(cpus), int(psutil.virtual_memory().available // needed)))
    share = (cpus - 1) / size
    num_cpus = min(1.0, share) if backend == "blackhole" else share
    threads = max(1, int(cpus // size)) if backend == "cpu" else 1
    is_slow = model_bytes > LARGE_CHECKPOINT_BYTES  # never on a chip
    return Actors(
        backend,
        size,
        num_cpus=max(0.0, int(num_cpus * 100) / 100),
        num_threads=threads,
        batch_size=LARGE_MODEL_CPU_BATCH if is_slow else BATCH_SIZE,
    )


def _resources() -> tuple[float, int]:
    """CPUs and chips."""
    import ray

    if ray.is_initialized():
        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return total.get("CPU", 0.0), int(total.get(chips.RAY_RESOURCE, 0))
    return float(len(os.sched_getaffinity(0))), len(chips.look().visible())


def _checkpoint_bytes(repo_id: str, checkpoint_path: str | os.PathLike[str] | None) -> int:
    given = None if checkpoint_path is None else Path(checkpoint_path)
    found = local_checkpoint(repo_id, checkpoint_path=given)
    return FULL_CHECKPOINT_BYTES if found is None else found.path.stat().st_size
