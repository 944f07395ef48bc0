"""Which backend, which checkpoint, how many replicas: decided once, before anything is deployed.

The builder calls ``resolve`` inside Ray; ``sam3-ray serve`` calls it in its own process first, so that
what is wrong ends there with one message. A replica that found it out in its constructor would be retried.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sam3_ray.checkpoint import Checkpoint, find_checkpoint
from sam3_ray.chips import RAY_RESOURCE
from sam3_ray.errors import DemoCheckpointWarning, WeightsAccessError, WeightsNotFoundError
from sam3_ray.serve.config import ServeConfig, ServeConfigError
from sam3_ray.settings import DEMO_REPO_ID, REPO_ID

REPLICA_DEPLOYMENT = "Sam3Replica"
"""Name of the replicas' deployment, by which a configuration file can set Serve's own options for it."""


@dataclass(frozen=True)
class Cluster:
    """What there is to serve on.

    Attributes:
        chips: TTNPU resources in the whole cluster.
        cpus: CPUs in the whole cluster.
        node_cpus: CPUs of its largest node.
    """

    chips: int
    cpus: float
    node_cpus: float

    @classmethod
    def of_ray(cls) -> Cluster:
        """The Ray cluster that this process is connected to."""
        import ray

        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        nodes: list[float] = [node["Resources"].get("CPU", 0.0) for node in alive]
        return cls(int(total.get(RAY_RESOURCE, 0)), total.get("CPU", 0.0), max(nodes, default=0.0))

    @classmethod
    def of_this_machine(cls, chips: int) -> Cluster:
        """A Ray that is to be started here, with so many chips."""
        cpus = float(len(os.sched_getaffinity(0)))
        return cls(chips, cpus, cpus)


@dataclass(frozen=True)
class Plan:
    """What is going to be served.

    Attributes:
        backend: ``cpu`` or ``blackhole``.
        checkpoint: found on this machine.
        repo_id, revision, checkpoint_path: how a replica finds it (on another node it lies elsewhere).
        replicas: how many.
        num_cpus: CPUs that Ray reserves for each.
        chips_per_replica: TTNPU resources that Ray reserves for each.
        chips: that there are to serve on; 0 on a CPU.
    """

    backend: Literal["cpu", "blackhole"]
    checkpoint: Checkpoint
    repo_id: str
    revision: str | None
    checkpoint_path: str | None
    replicas: int
    num_cpus: float
    chips_per_replica: int
    chips: int = 0

    @property
    def num_threads(self) -> int:
        """Torch threads of a replica: they follow its CPUs."""
        return max(1, int(self.num_cpus))


def resolve(config: ServeConfig, cluster: Cluster) -> Plan:
    """Decide. May download SAM3's weights.

    Warns:
        DemoCheckpointWarning: ``checkpoint: auto`` had to take the demo checkpoint.

    Raises:
        ServeConfigError: what is asked does not fit the cluster.
        WeightsNotFoundError, WeightsAccessError: weights that are required are not to be had.
    """
    backend = _backend(config, cluster)
    chips_per_replica = 1 if backend == "blackhole" else 0
    chips = _chips(config, cluster) if backend == "blackhole" else 0
    if isinstance(config.replicas, int):
        replicas = config.replicas
    else:
        replicas = chips or 1
    if backend == "blackhole" and replicas > chips:
        has = f"chips is {chips}" if chips < cluster.chips else f"the Ray cluster has {chips} chips"
        raise ServeConfigError(
            f"replicas is {replicas}, but {has} ({RAY_RESOURCE}); one replica is one chip"
        )
    if isinstance(config.cpus_per_replica, float):
        num_cpus = config.cpus_per_replica
    else:
        num_cpus = 1.0 if backend == "blackhole" else max(1.0, cluster.node_cpus - 1)
    if replicas * num_cpus > cluster.cpus:
        raise ServeConfigError(
            f"{replicas} replicas with {num_cpus:g} CPUs each need {replicas * num_cpus:g} CPUs, but the Ray "
            f"cluster has {cluster.cpus:g}; lower replicas or cpus_per_replica"
        )
    repo_id, path = _where(config)
    checkpoint = _checkpoint(config, backend, repo_id, path)
    if checkpoint.is_demo:
        repo_id, path = DEMO_REPO_ID, None
    return Plan(
        backend=backend,
        checkpoint=checkpoint,
        repo_id=repo_id,
        revision=config.revision,
        checkpoint_path=path,
        replicas=replicas,
        num_cpus=num_cpus,
        chips_per_replica=chips_per_replica,
        chips=chips,
    )


def _backend(config: ServeConfig, cluster: Cluster) -> Literal["cpu", "blackhole"]:
    if config.backend == "cpu" and config.chips != "auto":
        raise ServeConfigError(
            f"chips is {config.chips}, but backend is cpu: leave one of them out"
        )
    if config.backend == "auto":
        return "blackhole" if cluster.chips or config.chips != "auto" else "cpu"
    if config.backend == "blackhole" and not cluster.chips:
        raise ServeConfigError(
            f"backend is blackhole, but the Ray cluster has no chip (no {RAY_RESOURCE} resource); "
            "`sam3-ray doctor` tells what is here"
        )
    return config.backend


def _chips(config: ServeConfig, cluster: Cluster) -> int:
    """How many of the cluster's chips are served on."""
    if config.chips == "auto":
        return cluster.chips
    if config.chips > cluster.chips:
        raise ServeConfigError(
            f"chips is {config.chips}, but the Ray cluster has {cluster.chips} ({RAY_RESOURCE}); "
            "`sam3-ray doctor` tells what is here"
        )
    return config.chips


def _where(config: ServeConfig) -> tuple[str, str | None]:
    """Repository and local path that ``checkpoint`` names."""
    name = config.checkpoint
    if name == "auto":
        return REPO_ID, None
    if name == DEMO_REPO_ID:
        return DEMO_REPO_ID, None
    path = Path(name).expanduser()
    # A Hub repository is "owner/name"; everything else, and what exists here, is a path.
    looks_like_path = (
        name.startswith((".", "/", "~")) or name.endswith(".pt") or name.count("/") != 1
    )
    if looks_like_path or path.exists():
        return REPO_ID, str(path.absolute())
    return name, None


def _checkpoint(config: ServeConfig, backend: str, repo_id: str, path: str | None) -> Checkpoint:
    try:
        return find_checkpoint(repo_id, revision=config.revision, checkpoint_path=path)
    except (WeightsNotFoundError, WeightsAccessError) as error:
        # A machine with chips never serves the demo checkpoint unless told to; nor does anyone whose
        # SAM3_WEIGHTS_DIR names a folder without weights.
        if config.checkpoint != "auto" or backend != "cpu" or os.environ.get("SAM3_WEIGHTS_DIR"):
            raise
        warnings.warn(DemoCheckpointWarning(error.reason), stacklevel=2)
        return find_checkpoint(DEMO_REPO_ID)
