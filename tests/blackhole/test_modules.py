"""The module system: strict keys, named failures, converted tensors kept on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sam3_ray.errors import CheckpointError

CHECKPOINT = Path("some.pt")


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {
        "a.first.weight": torch.rand(64, 32) * 2
        - 1,  # below 1: bfloat8_b's steps are 1/128 at most
        "a.first.bias": torch.randn(64),
        "a.skipped.table": torch.zeros(3),
        "elsewhere.x": torch.zeros(1),
    }


def declared(store: Any) -> tuple[Any, Any]:
    import ttnn

    from sam3_ray.backends.blackhole.modules import as_row, transposed

    scope = store.root / "a" / "first"
    return (
        scope.parameter({"weight": (64, 32)}, transposed, dtype=ttnn.bfloat8_b),
        scope.parameter({"bias": (64,)}, as_row, dtype=ttnn.bfloat16),
    )


@pytest.fixture
def store(emulator: Any) -> Iterator[Any]:
    from sam3_ray.backends.blackhole.modules import WeightStore

    store = WeightStore(("a.",), (".table",))
    yield store
    store.release()


def test_what_is_declared_arrives(chip: Any, store: Any, weights: dict[str, torch.Tensor]) -> None:
    import ttnn

    weight, bias = declared(store)
    with pytest.raises(RuntimeError, match=r"a\.first\.weight is used before"):
        _ = weight.value
    store.load(weights, chip, path=CHECKPOINT)
    assert weight.value.dtype == ttnn.bfloat8_b
    torch.testing.assert_close(
        ttnn.to_torch(weight.value), weights["a.first.weight"].t(), atol=1 / 128, rtol=0
    )
    expected = weights["a.first.bias"].bfloat16().reshape(1, 1, 1, 64)
    assert torch.equal(ttnn.to_torch(bias.value), expected)


def test_everything_that_does_not_fit_is_named_at_once(
    chip: Any, store: Any, weights: dict[str, torch.Tensor]
) -> None:
    declared(store)
    del weights["a.first.weight"]
    weights["a.first.bias"] = torch.zeros(63)
    weights["a.second.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        store.load(weights, chip, path=CHECKPOINT)
    for part in (
        "some.pt",
        "missing ['a.first.weight']",
        "a.first.bias: (63,), expected (64,)",
        "unexpected ['a.second.weight']",
    ):
        assert part in str(caught.value)


def test_a_conversion_that_fails_names_its_key(
    chip: Any, store: Any, weights: dict[str, torch.Tensor]
) -> None:
    import ttnn

    (store.root / "a").parameter(
        {"first.bias": (64,)}, lambda bias: bias.reshape(3, 3), dtype=ttnn.bfloat16
    )
    del weights["a.first.weight"]
    with pytest.raises(CheckpointError, match=r"a\.first\.bias cannot be put on the device"):
        store.load(weights, chip, path=CHECKPOINT)


def test_two_parameters_of_one_name(store: Any) -> None:
    declared(store)
    with pytest.raises(ValueError, match=r"a\.first\.weight"):
        declared(store)


def test_a_second_start_converts_nothing(
    chip: Any, weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ttnn

    from sam3_ray.backends.blackhole import modules

    cache = modules.ConvertedWeights(tmp_path / "converted")
    values = []
    for start in range(2):
        if start == 1:
            monkeypatch.setattr(modules, "_converted", lambda *_: pytest.fail("converted again"))
        store = modules.WeightStore(("a.",), (".table",))
        parameters = declared(store)
        store.load(weights, chip, path=CHECKPOINT, cache=cache)
        values.append([ttnn.to_torch(parameter.value) for parameter in parameters])
        store.release()
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    assert sorted(path.name for path in cache.folder.iterdir()) == [
        ".lock",  # of the process that converts
        "a.first.bias.tensorbin",
        "a.first.weight.tensorbin",
    ]


def test_a_folder_that_cannot_be_written_costs_only_a_warning(
    chip: Any,
    store: Any,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from sam3_ray.backends.blackhole.modules import ConvertedWeights

    (tmp_path / "file").write_text("in the way")
    declared(store)
    store.load(weights, chip, path=CHECKPOINT, cache=ConvertedWeights(tmp_path / "file"))
    assert "cannot be kept" in caplog.text


def test_a_broken_file_is_converted_again(
    chip: Any, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """A disk that was full, a power cut: the start must not fail for it."""
    import ttnn

    from sam3_ray.backends.blackhole.modules import ConvertedWeights, WeightStore

    cache = ConvertedWeights(tmp_path)
    for content in (None, b"", b"rubbish" * 100):
        if content is not None:
            (tmp_path / "a.first.weight.tensorbin").write_bytes(content)
        store = WeightStore(("a.",), (".table",))
        weight, _ = declared(store)
        store.load(weights, chip, path=CHECKPOINT, cache=cache)
        torch.testing.assert_close(
            ttnn.to_torch(weight.value), weights["a.first.weight"].t(), atol=1 / 128, rtol=0
        )
        store.release()
