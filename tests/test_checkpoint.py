"""Finding a checkpoint, and the errors of a wrong one. No test asks the Hub."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from sam3_ray.backends.cpu.backend import CpuBackend
from sam3_ray.checkpoint import (
    DEMO_CHECKPOINT,
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    local_checkpoint,
)
from sam3_ray.config import DEMO, FULL
from sam3_ray.errors import CheckpointError, WeightsAccessError, WeightsNotFoundError
from sam3_ray.settings import PINNED_REVISION


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SAM3_WEIGHTS_DIR", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_demo_ships_in_the_package() -> None:
    assert find_checkpoint("demo") == Checkpoint(DEMO_CHECKPOINT, "demo")
    config, weights = load_checkpoint(DEMO_CHECKPOINT)
    assert config == DEMO
    assert DEMO_CHECKPOINT.stat().st_size <= 12_000_000
    assert all(isinstance(value, torch.Tensor) for value in weights.values())


def test_a_folder_and_its_file_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "sam3.pt").write_bytes(DEMO_CHECKPOINT.read_bytes())
    by_folder = find_checkpoint(checkpoint_path=tmp_path)
    assert by_folder == find_checkpoint(checkpoint_path=tmp_path / "sam3.pt")
    assert by_folder.label == "sam3.pt"


def test_weights_dir_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sam3.pt").write_bytes(b"x")
    monkeypatch.setenv("SAM3_WEIGHTS_DIR", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", _refuse(AssertionError("asked the Hub")))
    assert find_checkpoint().path == tmp_path / "sam3.pt"


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsNotFoundError, match="nothing-here"):
        find_checkpoint(checkpoint_path=tmp_path / "nothing-here")
    with pytest.raises(FileNotFoundError, match=r"without sam3\.pt"):
        find_checkpoint(checkpoint_path=tmp_path)


def test_weights_of_the_hubs_cache_are_found_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--facebook--sam3" / "snapshots" / PINNED_REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "sam3.pt").write_bytes(b"x")
    found = local_checkpoint()
    assert found == Checkpoint(snapshot / "sam3.pt", "facebook/sam3@3c879f39", PINNED_REVISION)


def test_no_weights_on_disk() -> None:
    assert local_checkpoint() is None


def _refuse(error: BaseException):
    def download(*_: object, **__: object) -> str:
        raise error

    return download


def _http_error(kind: type, status: int) -> Exception:
    import httpx

    request = httpx.Request("GET", "https://huggingface.co/facebook/sam3")
    return kind("refused", response=httpx.Response(status, request=request))


def test_a_gated_repository_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    monkeypatch.setattr("sam3_ray.checkpoint.hub_problem", lambda: None)
    for kind, status in ((GatedRepoError, 403), (RepositoryNotFoundError, 401)):
        monkeypatch.setattr("huggingface_hub.hf_hub_download", _refuse(_http_error(kind, status)))
        with pytest.raises(WeightsAccessError, match=r"Request access.*hf auth login"):
            find_checkpoint()


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_ray.checkpoint.hub_problem", lambda: "it does not answer")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", _refuse(AssertionError("tried anyway")))
    with pytest.raises(WeightsNotFoundError, match=r"it does not answer.*SAM3_WEIGHTS_DIR"):
        find_checkpoint()


def test_a_hub_lost_while_downloading_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.setattr("sam3_ray.checkpoint.hub_problem", lambda: None)
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download", _refuse(LocalEntryNotFoundError("offline"))
    )
    with pytest.raises(WeightsNotFoundError, match="SAM3_WEIGHTS_DIR"):
        find_checkpoint()


class _Dangerous:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("run by unpickling",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "broken"),
        (b"not a checkpoint at all", "broken"),
        (DEMO_CHECKPOINT.read_bytes()[:100_000], "broken"),
        (pickle.dumps({"model": 1}), "broken|no tensor"),
    ],
)
def test_a_file_that_is_no_checkpoint(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "sam3.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def test_code_in_a_checkpoint_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sam3.pt"
    torch.save({"model": _Dangerous()}, path)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert "run by unpickling" not in capsys.readouterr().out


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    torch.save({"model": {"encoder.weight": torch.zeros(2)}}, tmp_path / "sam3.pt")
    with pytest.raises(CheckpointError, match="no SAM3 checkpoint"):
        load_checkpoint(tmp_path / "sam3.pt")


def test_missing_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    content = torch.load(DEMO_CHECKPOINT, weights_only=True)
    del content["model"]["detector.geometry_encoder.cls_embed.weight"]
    del content["model"]["detector.transformer.decoder.norm.bias"]
    content["model"]["detector.transformer.decoder.norm.weight"] = torch.zeros(7)
    torch.save(content, tmp_path / "sam3.pt")
    with pytest.raises(CheckpointError) as caught:
        CpuBackend(tmp_path / "sam3.pt")
    for name in ("geometry_encoder.cls_embed.weight", "decoder.norm.bias", "decoder.norm.weight"):
        assert name in str(caught.value)


def test_no_config_means_the_full_model(tmp_path: Path) -> None:
    torch.save({"model": {"detector.x": torch.zeros(1)}}, tmp_path / "sam3.pt")
    config, _ = load_checkpoint(tmp_path / "sam3.pt")
    assert config == FULL


def test_an_unknown_config_key_is_named(tmp_path: Path) -> None:
    content = {"model": {"detector.x": torch.zeros(1)}, "sam3_ray_config": {"hats": 3}}
    torch.save(content, tmp_path / "sam3.pt")
    with pytest.raises(CheckpointError, match="hats"):
        load_checkpoint(tmp_path / "sam3.pt")


def test_a_fingerprint_is_of_the_content_and_not_of_the_place(tmp_path: Path) -> None:
    import shutil

    import torch

    from sam3_ray.checkpoint import checkpoint_fingerprint

    def saved(name: str, value: float) -> str:
        (tmp_path / name).mkdir()
        torch.save({"model": {"detector.x": torch.full((64,), value)}}, tmp_path / name / "sam3.pt")
        return checkpoint_fingerprint(tmp_path / name / "sam3.pt")

    first = saved("a", 1.0)
    assert saved("b", 1.0) == first
    assert saved("c", 1.0 + 1e-7) != first
    shutil.copy(tmp_path / "a" / "sam3.pt", tmp_path / "renamed.pt")
    assert checkpoint_fingerprint(tmp_path / "renamed.pt") == first
    (tmp_path / "rubbish.pt").write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match=r"rubbish\.pt cannot be read"):
        checkpoint_fingerprint(tmp_path / "rubbish.pt")
