"""The files under deploy/ against what they are about."""

import json
import re
from pathlib import Path

import httpx
import yaml

from sam3_ray.serve.config import load_config
from tests.serve.fakes import wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def test_the_ray_service_serves_the_application_of_the_configuration_file():
    from ray.serve.schema import ServeDeploySchema

    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    deployed = yaml.safe_load(service["spec"]["serveConfigV2"])
    ours = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    assert deployed["applications"] == ours["applications"]
    assert deployed["proxy_location"] == ours["proxy_location"]
    ServeDeploySchema.model_validate(deployed)
    load_config(deployed["applications"][0]["args"])
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    given = json.loads(json.loads(worker["rayStartParams"]["resources"]))
    visible = worker["template"]["spec"]["containers"][0]["env"][0]
    assert visible["name"] == "TT_VISIBLE_DEVICES"
    assert given == {"TTNPU": len(visible["value"].split(","))}


def test_ray_s_version_in_the_ray_service_is_the_pinned_one():
    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    pinned = re.search(r"^ray(?:\[.*\])?==([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M)
    assert pinned is not None
    assert version == pinned.group(1)


def test_the_image_copies_what_is_there():
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists(), name


def test_every_query_of_the_dashboard_names_what_is_exported(service, pictures):
    import ray

    request = {"content": pictures[0].data, "headers": {"content-type": "image/png"}}
    assert service.post("/predict", **request).status_code == 200
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    wanted = {name for query in queries for name in re.findall(r"\bray_\w+", query)}
    labels = {
        name
        for query in queries
        for by in re.findall(r"by \(([^)]*)\)", query)
        for name in re.split(r",\s*", by)
    }
    assert len(wanted) > 5
    port = ray.nodes()[0]["MetricsExportPort"]
    text = ""

    def missing() -> set[str]:
        nonlocal text
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
        return wanted - set(re.findall(r"^(ray_\w+?)(?:\{| )", text, re.M))

    wait_until(lambda: not missing(), 90)
    ours = "\n".join(line for line in text.splitlines() if line.startswith("ray_sam3"))
    for label in labels | {"chip", "replica"}:
        assert f'{label}="' in ours, label
