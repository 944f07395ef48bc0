"""The same assertions as on the emulated chip. Nothing here has run on silicon yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sam3_ray.checkpoint import DEMO_CHECKPOINT
from tests.blackhole.test_backend import (
    test_a_given_device_stays_open,
    test_answers_are_the_cpu_backends,
    test_forty_frozen_pictures_are_as_near_to_the_cpu_as_they_must,
    test_images_leave_the_cache_when_it_is_full,
)
from tests.blackhole.test_encode_image import (
    SMALL_CACHE,
    test_a_hundred_pictures_through_one_trace_equal_untraced_runs,
)
from tests.blackhole.test_full_size import test_every_part_meets_its_bar_at_full_size
from tests.blackhole.test_image_cache import slots, test_a_hit_has_the_bits_of_its_miss
from tests.blackhole.test_parts import (
    loaded,
    reference,
    references,
    square,
    test_a_dropped_bias_is_seen,
    test_every_part_meets_its_bar,
    test_swapped_heads_are_seen,
)

__all__ = [
    "loaded",
    "reference",
    "references",
    "slots",
    "square",
    "test_a_dropped_bias_is_seen",
    "test_a_given_device_stays_open",
    "test_a_hit_has_the_bits_of_its_miss",
    "test_a_hundred_pictures_through_one_trace_equal_untraced_runs",
    "test_answers_are_the_cpu_backends",
    "test_every_part_meets_its_bar",
    "test_every_part_meets_its_bar_at_full_size",
    "test_forty_frozen_pictures_are_as_near_to_the_cpu_as_they_must",
    "test_images_leave_the_cache_when_it_is_full",
    "test_swapped_heads_are_seen",
]

pytestmark = [pytest.mark.device, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def backend(emulator: Any) -> Iterator[Any]:
    from sam3_ray.backends.blackhole import open_backend

    backend = open_backend(DEMO_CHECKPOINT, image_cache_bytes=SMALL_CACHE)
    yield backend
    backend.close()
