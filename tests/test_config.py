"""The model's dimensions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sam3_ray.config import DEMO, FULL, Sam3Config


@pytest.mark.parametrize("config", [FULL, DEMO])
def test_round_trip_through_json(config: Sam3Config) -> None:
    assert Sam3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_full_size_is_facebook_sam3() -> None:
    assert (FULL.grid, FULL.mask_size, FULL.level_sizes, FULL.vit_mlp_width) == (
        72,
        288,
        (288, 144, 72),
        4736,
    )


def test_demo_fits_tiles_of_32() -> None:
    widths = (DEMO.vit_width, DEMO.model_width, DEMO.text_width, DEMO.window_size**2)
    assert [width % 32 for width in widths] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"window_size": 7},
        {"vit_heads": 3},
        {"global_blocks": (2,)},
        {"global_blocks": ()},
        {"heads": 0},
    ],
)
def test_dimensions_that_do_not_fit(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Sam3Config"):
        replace(DEMO, **change)  # type: ignore[arg-type]


def test_unknown_keys_are_named() -> None:
    with pytest.raises(ValueError, match="colour"):
        Sam3Config.from_dict({"colour": 3})
