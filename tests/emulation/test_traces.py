"""Traces replay what was captured, and nothing that a chip would get wrong passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.emulation import DeviceMemoryError, TraceError
from tests.emulation.samples import down, random, up

SHAPE = (1, 1, 64, 96)


def host(value: torch.Tensor) -> Any:
    import ttnn

    return ttnn.from_torch(value, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT)


def write(value: torch.Tensor, tensor: Any) -> None:
    import ttnn

    ttnn.copy_host_to_device_tensor(host(value), tensor)


def capture(chip: Any, graph: Callable[[], Any]) -> tuple[int, Any]:
    """Compile a graph, then capture it: the trace and its outputs."""
    import ttnn

    graph()
    trace = ttnn.begin_trace_capture(chip, cq_id=0)
    outputs = graph()
    ttnn.end_trace_capture(chip, trace, cq_id=0)
    return trace, outputs


def replay(chip: Any, trace: int) -> None:
    import ttnn

    ttnn.execute_trace(chip, trace, cq_id=0, blocking=False)


@contextmanager
def capturing(chip: Any) -> Iterator[int]:
    """An open capture, closed again whatever happens in it."""
    import ttnn

    trace = ttnn.begin_trace_capture(chip, cq_id=0)
    try:
        yield trace
    finally:
        ttnn.end_trace_capture(chip, trace, cq_id=0)


def convolution(chip: Any, x: Any) -> dict[str, Any]:
    """A 3x3 convolution of a 16x16 picture with 32 channels."""
    return {
        "input_tensor": x,
        "device": chip,
        "in_channels": 32,
        "out_channels": 32,
        "batch_size": 1,
        "input_height": 16,
        "input_width": 16,
        "kernel_size": (3, 3),
        "stride": (1, 1),
        "padding": (1, 1),
    }


def test_a_replay_computes_from_what_the_input_holds(chip: Any) -> None:
    import ttnn

    x = up(chip, torch.zeros(SHAPE))
    trace, out = capture(chip, lambda: ttnn.multiply(ttnn.add(x, 1.0), 2.0))
    for seed in range(3):
        value = random(*SHAPE, seed=seed)
        write(value, x)
        replay(chip, trace)
        step = (value + 1).to(torch.bfloat16).float()
        assert torch.equal(down(out), (step * 2).to(torch.bfloat16).float())


def test_a_capture_computes_nothing(chip: Any) -> None:
    import ttnn

    x, kept = up(chip, torch.ones(SHAPE)), up(chip, torch.zeros(SHAPE))
    graph = lambda: ttnn.copy(ttnn.add(x, 1.0), kept)  # noqa: E731
    ttnn.add(x, 1.0, output_tensor=kept)
    graph()
    write(torch.zeros(SHAPE), kept)
    with capturing(chip) as trace:
        graph()
    assert bool((down(kept) == 0).all())
    replay(chip, trace)
    assert bool((down(kept) == 2).all())


def test_an_output_is_not_readable_before_the_first_replay(chip: Any) -> None:
    import ttnn

    x = up(chip, torch.ones(SHAPE))
    trace, out = capture(chip, lambda: ttnn.exp(x))
    with pytest.raises(
        DeviceMemoryError, match=r"no data before trace \d+ is executed \(ttnn\.exp\)"
    ):
        down(out)
    replay(chip, trace)
    assert down(out).allclose(torch.tensor(torch.e), rtol=2**-8)


def test_given_outputs_and_views_alias(chip: Any) -> None:
    import ttnn

    x, kept = up(chip, torch.ones(SHAPE)), up(chip, torch.zeros(SHAPE))
    view = ttnn.reshape(kept, (1, 2, 32, 96))
    trace, _ = capture(chip, lambda: ttnn.add(x, 4.0, output_tensor=kept))
    replay(chip, trace)
    assert bool((down(view) == 5).all())


def test_two_traces_meet_in_a_buffer(chip: Any) -> None:
    import ttnn

    image, features = up(chip, torch.zeros(SHAPE)), up(chip, torch.zeros(SHAPE))
    encode, _ = capture(chip, lambda: ttnn.copy(ttnn.multiply(image, 2.0), features))
    ground, out = capture(chip, lambda: ttnn.add(features, 1.0))
    slots = {}
    for number in (1.0, 5.0):
        write(torch.full(SHAPE, number), image)
        replay(chip, encode)
        replay(chip, ground)
        assert bool((down(out) == 2 * number + 1).all())
        slots[number] = ttnn.clone(features)
    ttnn.copy(slots[1.0], features)  # a cache hit
    replay(chip, ground)
    assert bool((down(out) == 3).all())


def test_a_tensor_that_a_replay_overwrote_cannot_be_read(chip: Any) -> None:
    import ttnn

    x = up(chip, torch.ones(SHAPE))

    def graph() -> Any:
        middle = ttnn.exp(x)
        result = ttnn.multiply(middle, 2.0)
        ttnn.deallocate(middle)
        return result

    trace, out = capture(chip, graph)
    late = up(chip, torch.full(SHAPE, 7.0))  # where the intermediate was
    assert bool((down(late) == 7).all())
    replay(chip, trace)
    assert down(out).allclose(torch.tensor(2 * torch.e), rtol=2**-7)
    with pytest.raises(DeviceMemoryError, match=r"was overwritten: trace \d+'s ttnn\.exp"):
        down(late)
    with pytest.raises(DeviceMemoryError, match=r"ttnn\.add: .* was overwritten"):
        ttnn.add(late, 1.0)


def test_compiling_inside_a_capture(chip: Any) -> None:
    import ttnn

    x = up(chip, random(*SHAPE))
    with (
        capturing(chip) as trace,
        pytest.raises(TraceError, match=r"ttnn\.erf: 1 programs were compiled"),
    ):
        ttnn.erf(x)
    with pytest.raises(TraceError, match="compiled a program"):
        replay(chip, trace)


def test_host_transfers_inside_a_capture(chip: Any) -> None:
    import ttnn

    x, waiting = up(chip, random(*SHAPE)), host(random(*SHAPE))
    attempts: dict[str, Callable[[], Any]] = {
        r"ttnn\.from_torch": lambda: up(chip, random(*SHAPE)),
        r"ttnn\.to_torch": lambda: down(x),
        r"ttnn\.from_device": lambda: ttnn.from_device(x),
        r"ttnn\.Tensor\.cpu": lambda: x.cpu(),
        r"ttnn\.Tensor\.to_torch": lambda: x.to_torch(),
        r"ttnn\.to_device": lambda: ttnn.to_device(waiting, chip),
        r"ttnn\.Tensor\.to ": lambda: waiting.to(chip),
        r"ttnn\.copy_host_to_device_tensor": lambda: write(random(*SHAPE), x),
        r"ttnn\.add \(it uploads": lambda: ttnn.add(x, waiting),
    }
    for name, attempt in attempts.items():
        with capturing(chip), pytest.raises(TraceError, match=name):
            attempt()


@pytest.mark.parametrize("name", ["zeros", "ones", "full", "arange", "zeros_like", "full_like"])
def test_tensors_built_on_the_host_inside_a_capture(chip: Any, name: str) -> None:
    import ttnn

    options = {"dtype": ttnn.bfloat16, "layout": ttnn.TILE_LAYOUT, "device": chip}
    x = up(chip, random(*SHAPE))
    attempts: dict[str, Callable[[], Any]] = {
        "zeros": lambda: ttnn.zeros(SHAPE, **options),
        "ones": lambda: ttnn.ones(SHAPE, **options),
        "full": lambda: ttnn.full(SHAPE, 3.0, **options),
        "arange": lambda: ttnn.arange(0, 32, 1, dtype=ttnn.bfloat16, device=chip),
        "zeros_like": lambda: ttnn.zeros_like(x),
        "full_like": lambda: ttnn.full_like(x, 2.0),
    }
    with capturing(chip), pytest.raises(TraceError, match=rf"ttnn\.{name} \(it uploads"):
        attempts[name]()


def test_allocations_inside_a_capture(chip: Any) -> None:
    import ttnn

    shape = ttnn.Shape(list(SHAPE))
    attempts: dict[str, Callable[[], Any]] = {
        "allocate_tensor_on_device": lambda: ttnn.allocate_tensor_on_device(
            shape, ttnn.bfloat16, ttnn.TILE_LAYOUT, chip
        ),
        "empty": lambda: ttnn.empty(SHAPE, ttnn.bfloat16, ttnn.TILE_LAYOUT, chip),
    }
    for name, attempt in attempts.items():
        with (
            capturing(chip),
            pytest.raises(TraceError, match=rf"ttnn\.{name} .*no captured operation"),
        ):
            attempt()


def test_a_buffer_that_outlives_the_capture_and_is_no_output(emulator: Any, chip: Any) -> None:
    import ttnn

    x = up(chip, random(*SHAPE))
    ttnn.exp(x)
    trace = ttnn.begin_trace_capture(chip, cq_id=0)
    with emulator.within_ttnn():  # as an operation of ttnn's own would allocate it
        stray = ttnn.empty(SHAPE, ttnn.bfloat16, ttnn.TILE_LAYOUT, chip)
    out = ttnn.exp(x)
    with pytest.raises(
        TraceError, match=r"ttnn\.exp: allocated a buffer at DRAM .* outlives the capture"
    ):
        ttnn.end_trace_capture(chip, trace, cq_id=0)
    with pytest.raises(TraceError, match="left a buffer behind"):
        replay(chip, trace)
    del stray, out


def test_convolution_weights_that_are_uploaded_on_each_call(chip: Any) -> None:
    import ttnn

    x = up(chip, random(1, 1, 256, 32))
    weight = ttnn.from_torch(random(32, 32, 3, 3), dtype=ttnn.float32)
    options = convolution(chip, x)
    ttnn.conv2d(weight_tensor=weight, **options)
    with capturing(chip), pytest.raises(TraceError, match=r"ttnn\.conv2d \(it uploads"):
        ttnn.conv2d(weight_tensor=weight, **options)


def test_prepared_convolution_weights_replay(chip: Any) -> None:
    import ttnn

    value, kernel = random(1, 1, 256, 32), random(32, 32, 3, 3, seed=1, scale=0.1)
    x = up(chip, value)
    options = convolution(chip, x)
    weight = ttnn.from_torch(kernel, dtype=ttnn.float32)
    config = ttnn.Conv2dConfig(weights_dtype=ttnn.bfloat16)
    _, (prepared, _bias) = ttnn.conv2d(
        weight_tensor=weight, conv_config=config, return_weights_and_bias=True, **options
    )
    trace, out = capture(
        chip, lambda: ttnn.conv2d(weight_tensor=prepared, conv_config=config, **options)
    )
    replay(chip, trace)
    image = value.reshape(1, 16, 16, 32).permute(0, 3, 1, 2)
    expected = torch.nn.functional.conv2d(image, kernel, padding=1).permute(0, 2, 3, 1)
    assert down(out).allclose(expected.reshape(1, 1, 256, 32), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("which", ["input", "weight", "output"])
def test_a_buffer_freed_before_the_replay(chip: Any, which: str) -> None:
    import ttnn

    x, weight = up(chip, random(*SHAPE)), up(chip, random(96, 64, seed=1))
    trace, out = capture(chip, lambda: ttnn.linear(x, weight))
    replay(chip, trace)
    ttnn.deallocate({"input": x, "weight": weight, "output": out}[which])
    role = "output" if which == "output" else "input"
    with pytest.raises(
        TraceError, match=rf"ttnn\.linear: its {role} .* was freed before the replay"
    ):
        replay(chip, trace)


def test_a_weight_that_python_let_go(chip: Any) -> None:
    import ttnn

    weights = [up(chip, random(*SHAPE, seed=1))]
    x = up(chip, random(*SHAPE))
    trace, _out = capture(chip, lambda: ttnn.add(x, weights[0]))
    weights.clear()
    with pytest.raises(TraceError, match=r"ttnn\.add: its input .* was freed"):
        replay(chip, trace)


def test_an_input_that_was_replaced_instead_of_written(chip: Any) -> None:
    import ttnn

    x = up(chip, random(*SHAPE))
    trace, _out = capture(chip, lambda: ttnn.exp(x))
    address = x.buffer_address()
    ttnn.deallocate(x)
    x = up(chip, random(*SHAPE, seed=1))
    assert x.buffer_address() == address  # the allocator gives the place again
    with pytest.raises(TraceError, match=r"ttnn\.exp: its input .* was replaced"):
        replay(chip, trace)


def test_an_input_never_written(chip: Any) -> None:
    import ttnn

    x = ttnn.allocate_tensor_on_device(
        ttnn.Shape(list(SHAPE)), ttnn.bfloat16, ttnn.TILE_LAYOUT, chip
    )
    ttnn.exp(up(chip, random(*SHAPE)))  # compiled
    with capturing(chip) as trace:
        out = ttnn.exp(x)
    with pytest.raises(DeviceMemoryError, match=r"ttnn\.exp: .* never written"):
        replay(chip, trace)
    write(torch.zeros(SHAPE), x)
    replay(chip, trace)
    assert bool((down(out) == 1).all())


def test_numbers_of_traces(chip: Any) -> None:
    import ttnn

    x = up(chip, random(*SHAPE))
    trace, _out = capture(chip, lambda: ttnn.exp(x))
    ttnn.release_trace(chip, trace)
    with pytest.raises(TraceError, match="was released"):
        replay(chip, trace)
    with pytest.raises(TraceError, match="trace 12345 does not exist"):
        replay(chip, 12345)
    with capturing(chip), pytest.raises(TraceError, match="still open"):
        ttnn.begin_trace_capture(chip, cq_id=0)
    with pytest.raises(TraceError, match="no capture"):
        ttnn.end_trace_capture(chip, trace, cq_id=0)


def test_a_closed_device_takes_its_traces_along(emulator: Any) -> None:
    import ttnn

    chip = ttnn.open_device(device_id=0)
    x = up(chip, random(*SHAPE))
    trace, _out = capture(chip, lambda: ttnn.exp(x))
    ttnn.close_device(chip)
    chip = ttnn.open_device(device_id=0)
    try:
        with pytest.raises(TraceError, match="was released"):
            replay(chip, trace)
    finally:
        ttnn.close_device(chip)
