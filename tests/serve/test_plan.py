"""Configuration, and what is decided from it before anything is deployed."""

import inspect
import warnings
from pathlib import Path

import pytest
import yaml

from sam3_ray.checkpoint import DEMO_CHECKPOINT
from sam3_ray.errors import WeightsAccessError, WeightsNotFoundError
from sam3_ray.serve import plan as plan_module
from sam3_ray.serve.config import ServeConfig, ServeConfigError, load_config
from sam3_ray.serve.plan import Cluster, resolve

CONFIG_FILE = Path(__file__).parents[2] / "serve_config.yaml"
TWO_CORES = Cluster(chips=0, cpus=2, node_cpus=2)
FOUR_CHIPS = Cluster(chips=4, cpus=32, node_cpus=32)


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    monkeypatch.delenv("SAM3_WEIGHTS_DIR", raising=False)


@pytest.fixture
def offline(monkeypatch):
    real = plan_module.find_checkpoint

    def find(repo_id, *, revision=None, checkpoint_path=None):
        if checkpoint_path is None and repo_id != "demo":
            raise WeightsNotFoundError(f"no {repo_id} here")
        return real(repo_id, revision=revision, checkpoint_path=checkpoint_path)

    monkeypatch.setattr(plan_module, "find_checkpoint", find)


def test_the_shipped_file_is_valid_and_listens_on_the_loopback_only():
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(yaml.safe_load(CONFIG_FILE.read_text()))
    (app,) = schema.applications
    config = load_config(app.args)
    assert (schema.http_options.host, schema.http_options.port) == ("127.0.0.1", 8000)
    assert schema.http_options.request_timeout_s > config.deadline_s
    assert (app.name, app.import_path) == ("sam3", "sam3_ray.serve.app:build_app")


def test_every_key_is_documented():
    for name, field in ServeConfig.model_fields.items():
        assert field.description, name


def test_ray_validates_the_builder_s_argument():
    """With postponed annotations it would hand the builder a plain dict."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    from sam3_ray.serve.app import build_app

    (parameter,) = inspect.signature(build_app).parameters.values()
    assert parameter.annotation is ServeConfig
    with pytest.raises(ValueError, match="unknown key 'replica'; did you mean 'replicas'"):
        call_user_app_builder_with_args_if_necessary(build_app, {"replica": 2})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"colour": 1}, r"^unknown key 'colour' \(known: backend, .*\)$"),
        ({"treshold": 1}, "unknown key 'treshold'; did you mean 'threshold'"),
        ({"max_promps": 1}, "unknown key 'max_promps'; did you mean 'max_prompts'"),
        ({"backend": "gpu"}, "backend: .*'auto', 'cpu' or 'blackhole', got 'gpu'"),
        ({"max_prompts": 65}, "max_prompts: .*64, got 65"),
        ({"replicas": 0}, "replicas: .*got 0"),
        ({"deadline_s": float("inf")}, "deadline_s: .*finite"),
        (
            {"max_batch_size": 20, "max_ongoing_requests": 30},
            "max_ongoing_requests is 30, but max_batch_size 20 needs at least 40",
        ),
    ],
)
def test_a_wrong_configuration_is_one_clear_line(values, message):
    with pytest.raises(ServeConfigError, match=message) as caught:
        load_config(values)
    assert "\n" not in str(caught.value)


def test_no_chip_means_one_cpu_replica_with_all_cores_but_one(offline):
    with pytest.warns(RuntimeWarning, match="DEMO checkpoint.*no facebook/sam3"):
        plan = resolve(ServeConfig(), Cluster(0, 8, 8))
    assert (plan.backend, plan.replicas, plan.num_cpus, plan.num_threads) == ("cpu", 1, 7, 7)
    assert (plan.checkpoint.label, plan.repo_id, plan.checkpoint_path) == ("demo", "demo", None)
    assert plan.chips_per_replica == 0


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1)])
def test_it_fits_on_one_and_on_two_cores(cores, expected):
    plan = resolve(ServeConfig(checkpoint="demo"), Cluster(0, cores, cores))
    assert (plan.num_cpus, plan.num_threads) == (expected, expected)


@pytest.mark.parametrize("error", [WeightsNotFoundError, WeightsAccessError])
def test_chips_never_get_the_demo_checkpoint_by_themselves(monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error("no weights")

    monkeypatch.setattr(plan_module, "find_checkpoint", refuse)
    with pytest.raises(error, match="no weights"):
        resolve(ServeConfig(), FOUR_CHIPS)


def test_chips_get_one_replica_each(offline):
    plan = resolve(ServeConfig(checkpoint="demo"), FOUR_CHIPS)
    assert (plan.backend, plan.replicas, plan.chips_per_replica) == ("blackhole", 4, 1)
    assert plan.checkpoint.is_demo


@pytest.mark.parametrize(
    ("values", "replicas"), [({"chips": "auto"}, 4), ({"chips": 2}, 2), ({"replicas": 3}, 3)]
)
def test_some_of_the_chips(offline, values, replicas):
    plan = resolve(ServeConfig(checkpoint="demo", **values), FOUR_CHIPS)
    assert (plan.backend, plan.replicas) == ("blackhole", replicas)


@pytest.mark.parametrize("checkpoint", ["facebook/sam3", "owner/other"])
def test_a_named_repository_is_required(offline, checkpoint):
    with pytest.raises(WeightsNotFoundError, match=checkpoint):
        resolve(ServeConfig(checkpoint=checkpoint), TWO_CORES)


def test_a_wrong_weights_folder_is_an_error_not_the_demo(monkeypatch, tmp_path):
    monkeypatch.setenv("SAM3_WEIGHTS_DIR", str(tmp_path))
    with pytest.raises(WeightsNotFoundError, match="SAM3_WEIGHTS_DIR"):
        resolve(ServeConfig(), TWO_CORES)


def test_a_path_is_used_without_the_hub(tmp_path):
    file = tmp_path / "mine.pt"
    file.write_bytes(DEMO_CHECKPOINT.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = resolve(ServeConfig(checkpoint=str(file)), TWO_CORES)
    assert (plan.checkpoint.path, plan.checkpoint_path) == (file, str(file))
    assert plan.checkpoint.label == "mine.pt"
    with pytest.raises(WeightsNotFoundError, match="not there"):
        resolve(ServeConfig(checkpoint=str(tmp_path / "none.pt")), TWO_CORES)


@pytest.mark.parametrize(
    ("values", "cluster", "message"),
    [
        ({"backend": "blackhole"}, TWO_CORES, "no chip.*TTNPU"),
        ({"replicas": 5}, FOUR_CHIPS, "replicas is 5, but the Ray cluster has 4 chips"),
        ({"chips": 5}, FOUR_CHIPS, "chips is 5, but the Ray cluster has 4"),
        ({"chips": 1}, TWO_CORES, "chips is 1, but the Ray cluster has 0"),
        ({"chips": 1, "backend": "cpu"}, FOUR_CHIPS, "chips is 1, but backend is cpu"),
        ({"chips": 2, "replicas": 3}, FOUR_CHIPS, "replicas is 3, but chips is 2"),
        ({"replicas": 4}, TWO_CORES, "4 replicas with 1 CPUs each need 4 CPUs.*has 2"),
        ({"cpus_per_replica": 3}, TWO_CORES, "1 replicas with 3 CPUs each need 3 CPUs.*has 2"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(values, cluster, message):
    with pytest.raises(ServeConfigError, match=message):
        resolve(ServeConfig(checkpoint="demo", **values), cluster)
