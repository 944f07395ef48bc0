"""Whether the chips that Ray counts are really in its hosts, and which one a replica was given.

Ray 2.60 counts the entries of ``/dev/tenstorrent``, the driver's folder ``by-id`` among them: one chip too
many. A replica for a chip that is not there would be started again for ever.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from sam3_ray import chips
from sam3_ray.serve.config import ServeConfigError

CHECK_TIMEOUT_S = 60.0


class ChipPinningError(RuntimeError):
    """A replica that does not see exactly one chip."""


def check_hosts() -> None:
    """Ask every node that has chips whether it has as many as Ray counts there.

    Raises:
        ServeConfigError: for the first node that has not, with what to do there.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0)(fault_here)
    asked = {}
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        counted = int(node["Resources"].get(chips.RAY_RESOURCE, 0))
        if node["Alive"] and counted:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[node["NodeID"]] = look.options(scheduling_strategy=where).remote(counted)
    for fault in ray.get(list(asked.values()), timeout=CHECK_TIMEOUT_S):
        if fault is not None:
            raise ServeConfigError(fault)


def fault_here(counted: int) -> str | None:
    """On a node: what is wrong with the number of chips that Ray counts there; None where nothing is."""
    return fault_of(counted, chips.look(), _raylet_environment(), socket.gethostname())


def fault_of(
    counted: int, machine: chips.Machine, environment: Mapping[str, str], host: str
) -> str | None:
    """What is wrong with a node's count of chips; None where nothing is.

    Args:
        counted: its TTNPU resources.
        machine: what the kernel shows there.
        environment: that its Ray was started with; of an emulated cluster the kernel shows nothing.
        host: its name.
    """
    value = environment.get(chips.VISIBLE_DEVICES)
    names = [] if value is None else [name.strip() for name in value.split(",") if name.strip()]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        return (
            f"Ray on {host} was started with {chips.VISIBLE_DEVICES}={value!r}, which names chip "
            f"{twice[0]!r} twice: two replicas would open it"
        )
    if environment.get(chips.MOCK_CLUSTER):
        return None
    try:
        visible = machine.visible(environment)
    except ValueError as error:
        return f"Ray on {host}: {error}; start it again with the chips that are there"
    if counted <= len(visible):
        return None
    told = chips.visible_devices_value(visible or machine.chips)
    start = f"start Ray there with {chips.VISIBLE_DEVICES}={told}"
    if not machine.chips:
        start = "`sam3-ray doctor` there tells what is missing"
    return (
        f"Ray counts {counted} chips ({chips.RAY_RESOURCE}) on {host}, which has {len(visible)} "
        f"(Ray 2.60 takes the driver's folder by-id for one): {start}"
    )


def pinned_chip(value: str | None, machine: chips.Machine | None = None) -> int:
    """The chip that Ray gave this process.

    Args:
        value: TT_VISIBLE_DEVICES.
        machine: to look a PCI address up in; default this one.

    Raises:
        ChipPinningError: no chip, or more than one.
    """
    names = [name.strip() for name in (value or "").split(",") if name.strip()]
    if len(names) != 1 or value == chips.NO_CHIPS:
        raise ChipPinningError(
            f"a replica sees exactly one chip, but {chips.VISIBLE_DEVICES}={value!r} here. Ray sets it from "
            f"resources={{'{chips.RAY_RESOURCE}': 1}}: unset "
            "RAY_EXPERIMENTAL_NOSET_TENSTORRENT_VISIBLE_DEVICES, and leave the variable out of a runtime_env"
        )
    if names[0].isdigit():
        return int(names[0])
    try:
        (chip,) = (machine or chips.look()).visible({chips.VISIBLE_DEVICES: names[0]})
    except ValueError as error:
        raise ChipPinningError(str(error)) from error
    return chip.index


def node_name() -> str:
    """The name of this Ray node: its address, or what ``ray start --node-name`` says."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return str(next(node["NodeName"] for node in nodes if node["NodeID"] == here))


def session_folder() -> Path:
    """The folder of this Ray session on this host; another start has another one."""
    from ray._private.worker import _global_node

    assert _global_node is not None, "Ray is not initialized"
    return Path(_global_node.get_session_dir_path())


def _raylet_environment() -> dict[str, str]:
    """What the raylet, this worker's parent, was started with: Ray changes a worker's own."""
    import psutil

    try:
        environment: dict[str, str] = psutil.Process(os.getppid()).environ()
        return environment
    except psutil.Error:
        return dict(os.environ)
