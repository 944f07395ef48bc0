"""When a device is given up."""

import pytest

from sam3_ray.serve.health import LIMIT_FACTOR, DeviceWatch


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock) -> DeviceWatch:
    return DeviceWatch(10.0, clock=clock)


def run(watch: DeviceWatch, clock: Clock, seconds: float, requests: int = 1) -> None:
    with watch.call(requests):
        clock.now += seconds


def test_the_first_call_may_compile_for_as_long_as_it_takes(watch, clock):
    with watch.call(1):
        clock.now += 3600
        watch.check()
        assert watch.running_s == 3600
    assert watch.running_s == 0


def test_a_call_that_hangs_is_found(watch, clock):
    run(watch, clock, 3600)
    with watch.call(1):
        clock.now += 10
        watch.check()
        clock.now += 1
        with pytest.raises(RuntimeError, match="running for 11 s"):
            watch.check()


def test_the_limit_grows_with_the_batch_and_with_what_was_measured(watch, clock):
    run(watch, clock, 1)
    with watch.call(4):
        clock.now += 40
        watch.check()
    run(watch, clock, 5)
    with watch.call(1):
        clock.now += 10.0 * LIMIT_FACTOR / 10 * 5
        watch.check()


def test_an_idle_device_is_well_however_long(watch, clock):
    run(watch, clock, 1)
    clock.now += 1e6
    watch.check()


def test_three_images_that_fail_in_a_row_are_too_many(watch):
    watch.failed("a")
    watch.failed("b")
    watch.check()
    watch.failed("c")
    with pytest.raises(RuntimeError, match="3 images in a row"):
        watch.check()


def test_one_image_that_always_fails_is_not_the_device_s_fault(watch):
    for _ in range(50):
        watch.failed("a")
    watch.check()


def test_a_success_between_forgives(watch):
    for digest in "abcdefgh":
        watch.failed(digest)
        watch.succeeded()
    watch.check()
