"""What counts as hot, how wide it spreads, and that it cools."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam3_ray.serve.hot import MAX_TRACKED, MIN_REQUESTS, SHARE_OF_A_CHIP, HotSet


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def filled(shares: dict[str, int], in_flight: int, rounds: int = 20) -> HotSet:
    """A hot set that has seen each digest so many times a round, all at one moment."""
    hot = HotSet(clock=Clock())
    for _ in range(rounds):
        for digest, count in shares.items():
            for _ in range(count):
                hot.arrived(digest, in_flight)
    return hot


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    in_flight=st.integers(0, 40),
    replicas=st.integers(1, 16),
)
def test_the_width_is_what_the_load_needs_and_never_more_than_there_are(
    counts, in_flight, replicas
):
    shares = {f"d{i}": count for i, count in enumerate(counts)}
    hot = filled(shares, in_flight)
    for digest, count in shares.items():
        load = count / sum(counts) * min(in_flight, replicas)
        width = hot.width(digest, replicas)
        assert 1 <= width <= replicas
        # Each replica's part is at most the share, unless there are no more replicas.
        assert load / width <= SHARE_OF_A_CHIP + 1e-6 or width == replicas
        # And one replica fewer would have been too few.
        assert width == 1 or load / (width - 1) >= SHARE_OF_A_CHIP - 1e-6


@settings(deadline=None, max_examples=30)
@given(seconds=st.floats(0, 1e6), half_life=st.floats(0.1, 100))
def test_a_count_halves_in_its_half_life_however_long_the_process_runs(seconds, half_life):
    clock = Clock()
    hot = HotSet(half_life, clock=clock)
    for _ in range(int(MIN_REQUESTS)):
        hot.arrived("before", 8)
    clock.now = seconds
    for _ in range(4 * int(MIN_REQUESTS)):
        hot.arrived("hot", 8)
    assert hot.width("hot", 8) > 1
    clock.now += half_life
    assert hot.width("hot", 8) > 1, "a half of four times the least is still enough"
    clock.now += 3 * half_life
    assert hot.width("hot", 8) == 1, "forgotten when it cools"


def test_few_requests_are_no_measurement():
    hot = HotSet(clock=Clock())
    for _ in range(int(MIN_REQUESTS) - 1):
        hot.arrived("a", 8)
    assert hot.width("a", 8) == 1
    hot.arrived("a", 8)
    assert hot.width("a", 8) == 8


def test_images_asked_for_alike_are_never_hot():
    assert {filled({f"d{i}": 1 for i in range(100)}, 16).width(f"d{i}", 8) for i in range(100)} == {
        1
    }


def test_an_idle_service_copies_nothing():
    assert filled({"a": 10}, in_flight=0).width("a", 8) == 1


def test_what_is_kept_is_bounded():
    clock = Clock()
    hot = HotSet(1.0, clock=clock)
    for i in range(5 * MAX_TRACKED):
        clock.now += 0.01
        hot.arrived(f"d{i}", 3)
    assert len(hot) <= MAX_TRACKED + 1


def test_places_that_were_sent_an_image_are_forgotten_with_it():
    clock = Clock()
    hot = HotSet(1.0, clock=clock)
    hot.arrived("a", 1)
    hot.sent("a", "host/chip1")
    assert hot.seen("a") == {"host/chip1"}
    clock.now = 50.0
    hot.arrived("b", 1)
    assert hot.seen("a") == frozenset()


@pytest.mark.parametrize("half_life", [0.0, -1.0, math.nan])
def test_a_half_life_is_positive(half_life):
    with pytest.raises(ValueError, match="half_life_s must be more than 0"):
        HotSet(half_life)
