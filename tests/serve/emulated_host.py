"""The real application on emulated chips, in a Ray of its own: a process that a test starts.

``python -m tests.serve.emulated_host FOLDER --nodes 2 --chips 2`` prints one JSON line (url, address) when it
is ready, and ends when its stdin is closed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from sam3_ray.local_ray import StartedProcesses, adopt_orphans, keep_ray_on_loopback

REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--chips", type=int, required=True, help="of each node")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    keep_ray_on_loopback()
    adopt_orphans()
    from tests.emulation.mock import prepare

    variables = prepare(folder / "mock", chips=arguments.chips)
    del variables["TT_METAL_CACHE"]  # a folder a chip is the service's own business
    os.environ.update(variables)
    os.environ["TT_VISIBLE_DEVICES"] = ",".join(map(str, range(arguments.chips)))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    processes = StartedProcesses()
    nodes: list[Any] = []
    try:
        print(json.dumps(start(folder, arguments.nodes, arguments.chips, nodes)), flush=True)
        sys.stdin.read()
    finally:
        processes.end(stop)


def start(folder: Path, nodes: int, chips: int, started: list[Any]) -> dict[str, str]:
    import ray
    from ray import cloudpickle, serve
    from ray.cluster_utils import Cluster

    from tests.serve.conftest import free_port

    cluster = Cluster()
    for number in range(nodes):
        started.append(
            cluster.add_node(
                node_name=f"host{number}",
                num_cpus=4,
                resources={"TTNPU": chips},
                object_store_memory=200 * 1024 * 1024,
                include_dashboard=False,
                temp_dir=str(folder / "ray") if number == 0 else None,
            )
        )
    ray.init(
        address=cluster.address,
        namespace="serve",
        log_to_driver=False,
        runtime_env={
            "worker_process_setup_hook": "tests.emulation.worker_setup",
            "env_vars": {"PYTHONPATH": str(REPOSITORY)},
        },
    )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    from sam3_ray.serve import app
    from sam3_ray.serve.config import ServeConfig
    from sam3_ray.serve.replica import Sam3Replica

    written = folder / "written"

    class WatchedReplica(Sam3Replica):
        """Notes which converted weights it writes, and says what it sees."""

        def __init__(self, config: Any, plan: Any) -> None:
            real = os.replace

            def replace(source: str, target: str) -> None:
                real(source, target)
                if str(target).endswith(".tensorbin"):
                    with written.open("a") as file:
                        file.write(f"{Path(target).name}\n")

            os.replace = replace
            super().__init__(config, plan)

        async def info(self) -> dict[str, Any]:
            import ttnn

            return await super().info() | {
                "pid": os.getpid(),
                "variable": os.environ["TT_VISIBLE_DEVICES"],
                "chips_seen": ttnn.GetNumAvailableDevices(),
                "kernels": os.environ["TT_METAL_CACHE"],
            }

    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    app.Sam3Replica = WatchedReplica
    config = ServeConfig(checkpoint="demo", image_cache_bytes=64 * 1024 * 1024)
    serve.run(app.build_app(config), name="sam3", route_prefix="/")
    return {"url": f"http://127.0.0.1:{port}", "address": cluster.address}


def stop() -> None:
    import ray
    from ray import serve

    if ray.is_initialized():
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
