"""One local Ray for the whole session, and the real service on it."""

import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sam3_ray.local_ray import keep_ray_on_loopback
from tests.demo_scenes import Scene, scenes

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
keep_ray_on_loopback()  # before anything imports Ray


MAX_MASK_PIXELS = 400_000_000
"""More than any test asks of the example pictures: 4 phrases of 100 instances at 960 x 640."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Picture:
    """A drawn scene as a PNG file."""

    scene: Scene
    data: bytes
    phrase: str
    """Names at least one shape of it."""


@pytest.fixture(scope="session")
def pictures() -> list[Picture]:
    import io

    found = []
    for scene in scenes(8):
        present = next((phrase for phrase, named in scene.phrases if named), None)
        if present is None:
            continue
        file = io.BytesIO()
        scene.image.save(file, "PNG")
        found.append(Picture(scene, file.getvalue(), present))
    return found


@pytest.fixture(scope="session")
def ray_url() -> Iterator[str]:
    """A Ray of our own with Serve on a free port of the loopback; gives the URL. Joins no other Ray.

    ``SAM3_TEST_PROXY`` chooses the proxy in front: throughput (the default, and what ``--proxy auto`` takes),
    plain (what ``serve run`` has) or haproxy.
    """
    import ray
    from ray import serve

    from sam3_ray.serve import proxies

    folder = Path(tempfile.mkdtemp(prefix="s3r", dir="/tmp"))  # short: socket paths have a limit
    port = free_port()
    proxy_folder = proxies.make_folder()
    mode = proxies.choose(os.environ.get("SAM3_TEST_PROXY", "auto"), {"host": "127.0.0.1"})
    largest = proxies.largest_message(32 << 20)
    os.environ.update(proxies.environment(mode, proxy_folder, largest_bytes=largest))
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        namespace=f"test-{uuid.uuid4().hex[:8]}",
        log_to_driver=False,
        object_store_memory=400 * 1024 * 1024,
        _temp_dir=str(folder),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": 150})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(proxy_folder, ignore_errors=True)


@pytest.fixture(scope="session")
def service(ray_url: str) -> Iterator[httpx.Client]:
    """The real application, with two replicas of the demo checkpoint."""
    from ray import serve

    from sam3_ray.serve.app import build_app
    from sam3_ray.serve.config import ServeConfig

    config = ServeConfig(
        checkpoint="demo",
        backend="cpu",
        replicas=2,
        cpus_per_replica=0.5,
        max_mask_pixels=MAX_MASK_PIXELS,
    )
    serve.run(build_app(config), name="sam3", route_prefix="/")
    with httpx.Client(base_url=ray_url, timeout=120) as client:
        yield client
    serve.delete("sam3")
