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
    """

    backend: Literal["cpu", "blackhole"]
    size: int
    num_cpus: float
    num_threads: int

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
    elif size is None:
        needed = CPU_ACTOR_BYTES + WEIGHTS_FACTOR * _checkpoint_bytes(repo_id, checkpoint_path)
        size = max(1, min(int(cpus), int(psutil.virtual_memory().available // needed)))
    share = (cpus - 1) / size
    num_cpus = min(1.0, share) if backend == "blackhole" else share
    threads = max(1, int(cpus // size)) if backend == "cpu" else 1
    return Actors(backend, size, max(0.0, int(num_cpus * 100) / 100), threads)


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
