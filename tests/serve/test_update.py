"""Settings that change while the service works, by the file that Serve is given again."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sam3_ray.serve.config import (
    IngressSettings,
    ReplicaSettings,
    ServeConfig,
    ServeConfigError,
    live_settings,
)
from sam3_ray.serve.preflight import BUILDER
from tests.emulation.processes import REPOSITORY, clean_environment
from tests.serve.conftest import Picture
from tests.serve.fakes import wait_until

RAW = {"content-type": "image/png"}


def deploy(application: dict[str, Any]) -> None:
    """What ``serve deploy`` has Serve's controller do, beside what runs already."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


@pytest.mark.parametrize("replicas", [1, 2])
def test_threshold_and_cache_change_under_load_without_a_dropped_request(
    ray_url: str, pictures: list[Picture], replicas: int
) -> None:
    from ray import serve

    name = f"update{replicas}"
    args = {"checkpoint": "demo", "backend": "cpu", "replicas": replicas, "cpus_per_replica": 0.01}
    application = {
        "name": name, "route_prefix": f"/{name}", "import_path": BUILDER, "args": args,
    }  # fmt: skip
    seen: Counter[int] = Counter()
    thresholds: set[float] = set()
    stop = threading.Event()
    with httpx.Client(base_url=f"{ray_url}/{name}", timeout=120) as client:

        def info() -> dict[str, Any]:
            response = client.get("/info")
            return response.json() if response.status_code == 200 else {}

        def load() -> None:
            while not stop.is_set() and sum(seen.values()) < 5000:
                for picture in pictures:
                    response = client.post(
                        "/predict", content=picture.data, headers=RAW, params={"prompts": "star"}
                    )
                    seen[response.status_code] += 1
                    if response.status_code == 200:
                        thresholds.add(response.json()["threshold"])

        deploy(application)
        wait_until(lambda: len(info().get("replicas", [])) == replicas, 180)
        wait_until(lambda: client.get("/health").status_code == 200, 180)
        before = [(replica["replica"], replica["place"]) for replica in info()["replicas"]]
        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: seen[200] > 5, 120)
            options = [
                {"name": "Ingress", "user_config": {"threshold": 0.25}},
                {"name": "Sam3Replica", "user_config": {"image_cache_bytes": 1_000_000}},
            ]
            deploy(application | {"deployments": options})

            def changed() -> bool:
                budgets = {r["image_cache"]["budget"] for r in info()["replicas"]}
                return 0.25 in thresholds and budgets == {1_000_000}

            wait_until(changed, 120)
            after = sum(seen.values())
            wait_until(lambda: sum(seen.values()) > after + 10, 120)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert set(seen) == {200}
        assert thresholds == {0.5, 0.25}
        assert [(r["replica"], r["place"]) for r in info()["replicas"]] == before
        serve.delete(name)


def test_what_serve_build_writes_is_deployed(
    ray_url: str, pictures: list[Picture], tmp_path: Path
) -> None:
    from ray import serve

    file = tmp_path / "built.yaml"
    code = "from ray.serve.scripts import cli; cli()"
    words = ["build", "sam3_ray.serve.app:application", "-o", str(file)]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=clean_environment(RAY_ADDRESS="local", HF_HUB_OFFLINE="1"),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = yaml.safe_load(file.read_text())
    (application,) = built["applications"]
    assert {one["name"] for one in application["deployments"]} == {"Ingress", "Sam3Replica"}
    application |= {"name": "built", "route_prefix": "/built"}
    deploy(application)
    with httpx.Client(base_url=f"{ray_url}/built", timeout=120) as client:
        wait_until(lambda: client.get("/health").status_code == 200, 180)
        response = client.post(
            "/predict", content=pictures[0].data, headers=RAW, params={"prompts": "star"}
        )
    assert response.status_code == 200, response.text
    serve.delete("built")


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (IngressSettings, {"treshold": 1}, "user_config: treshold: .*not permitted"),
        (IngressSettings, {"threshold": 2}, "threshold: .*less than or equal to 1, got 2"),
        (ReplicaSettings, {"max_batch_size": 0}, "max_batch_size: .*got 0"),
        (ReplicaSettings, {"image_cache_bytes": -1}, "image_cache_bytes: .*got -1"),
    ],
)
def test_wrong_settings_are_one_clear_line(kind: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ServeConfigError, match=message):
        live_settings(kind, ServeConfig(), given)


def test_settings_that_are_left_out_are_the_configuration_s() -> None:
    config = ServeConfig(threshold=0.3, max_batch_size=4)
    assert live_settings(IngressSettings, config, {}).threshold == 0.3
    assert live_settings(ReplicaSettings, config, {"batch_wait_s": 1}).max_batch_size == 4
