"""Environment knobs: read when asked, checked, named in errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from sam3_ray.settings import default_num_threads, settings


def test_values_are_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3_WEIGHTS_DIR", "/a/b")
    monkeypatch.setenv("SAM3_EXIF", "0")
    monkeypatch.setenv("SAM3_MAX_PROMPTS", "16")
    assert settings().weights_dir == Path("/a/b")
    assert settings().exif is False
    monkeypatch.setenv("SAM3_MAX_MASK_PIXELS", "1000")
    assert settings().max_prompts == 16
    assert settings().max_mask_pixels == 1000
    monkeypatch.setenv("SAM3_EXIF", "yes")
    assert settings().exif is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SAM3_NUM_THREADS", "0"),
        ("SAM3_NUM_THREADS", "many"),
        ("SAM3_MAX_PROMPTS", "65"),
        ("SAM3_MAX_MASK_PIXELS", "0"),
        ("SAM3_EXIF", "maybe"),
        ("SAM3_IMAGE_CACHE_BYTES", "-1"),
    ],
)
def test_a_bad_value_names_the_variable_and_the_value(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name}=.*{value}"):
        settings()


def test_threads_are_capped_at_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3_NUM_THREADS", "4096")
    assert 1 <= default_num_threads() < 4096
