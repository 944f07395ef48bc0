"""What is counted afterwards: operations with their configs, and the memory in use."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulation.samples import random, up


def test_an_operation_is_recorded_with_its_configuration(emulator: Any, chip: Any) -> None:
    import ttnn

    x = up(chip, random(1, 1, 640, 128))
    weight = up(chip, random(128, 70, seed=1), ttnn.bfloat8_b)
    config = ttnn.MatmulMultiCoreReuseMultiCastProgramConfig(
        compute_with_storage_grid_size=(3, 5),
        in0_block_w=2,
        out_subblock_h=1,
        out_subblock_w=1,
        per_core_M=4,
        per_core_N=1,
        transpose_mcast=False,
        fused_activation=None,
    )
    kernel = ttnn.WormholeComputeKernelConfig(
        math_fidelity=ttnn.MathFidelity.HiFi3, fp32_dest_acc_en=True
    )
    with emulator.stage("outer"), emulator.stage("backbone"):
        ttnn.linear(
            x,
            weight,
            program_config=config,
            compute_kernel_config=kernel,
            memory_config=ttnn.L1_MEMORY_CONFIG,
        )
    (record,) = emulator.records.operations
    assert record.name == "ttnn.linear"
    assert (record.fidelity, record.fp32_accumulate) == ("HiFi3", True)
    assert (record.stage, record.in_trace) == ("backbone", False)
    assert record.program_config["kind"] == "MatmulMultiCoreReuseMultiCastProgramConfig"
    assert record.program_config["compute_with_storage_grid_size"] == (3, 5)
    assert record.program_config["per_core_M"] == 4
    first, second = record.inputs
    assert (first.shape, first.dtype, first.layout, first.buffer) == (
        (1, 1, 640, 128),
        "bfloat16",
        "TILE",
        "DRAM",
    )
    assert (second.shape, second.padded_shape) == ((128, 70), (128, 96))
    assert second.nbytes == 4 * 3 * 1088  # tiles of 1024 values and 64 exponents
    (output,) = record.outputs
    assert (output.buffer, output.padded_shape, output.nbytes) == (
        "L1",
        (1, 1, 640, 96),
        640 * 96 * 2,
    )


def test_other_arguments_and_the_core_grid(emulator: Any, chip: Any) -> None:
    import ttnn

    x = up(chip, random(1, 1, 64, 64))
    ttnn.linear(x, up(chip, random(64, 64)), core_grid=ttnn.CoreGrid(y=1, x=2), activation="relu")
    linear = emulator.records.operations[-1]
    assert linear.core_grid == (2, 1)
    assert linear.attributes["activation"] == "relu"
    ttnn.reshape(x, (1, 2, 32, 64))
    assert emulator.records.operations[-1].attributes["argument_1"] == (1, 2, 32, 64)
    ttnn.softmax(x, dim=-1)
    assert emulator.records.operations[-1].attributes == {"dim": -1}


def test_captured_operations_are_marked_and_replays_counted(emulator: Any, chip: Any) -> None:
    import ttnn

    x = up(chip, random(1, 1, 64, 64))
    ttnn.exp(x)
    trace = ttnn.begin_trace_capture(chip, cq_id=0)
    kept = ttnn.exp(x)
    ttnn.end_trace_capture(chip, trace, cq_id=0)
    for _ in range(3):
        ttnn.execute_trace(chip, trace, cq_id=0)
    assert [record.in_trace for record in emulator.records.operations] == [False, True]
    assert emulator.records.replays == {trace: 3}
    assert emulator.traces.steps_of(trace) == 1
    del kept


def test_memory_use_follows_the_allocator(emulator: Any, chip: Any) -> None:
    import ttnn

    before = emulator.memory_use(chip, "DRAM")
    assert before.now == 0
    assert before.total == pytest.approx(34e9, rel=0.02)
    megabyte = up(chip, random(1, 1, 512, 1024))
    assert emulator.memory_use(chip, "DRAM").now == 2**20
    ttnn.deallocate(megabyte)
    after = emulator.memory_use(chip, "DRAM")
    assert (after.now, after.peak) == (0, 2**20)
    resident = ttnn.to_memory_config(up(chip, random(1, 1, 64, 64)), ttnn.L1_MEMORY_CONFIG)
    assert emulator.memory_use(chip, "L1").now >= 64 * 64 * 2
    del resident


def test_clear(emulator: Any, chip: Any) -> None:
    import ttnn

    ttnn.exp(up(chip, random(1, 1, 32, 32)))
    emulator.records.clear()
    assert emulator.records.operations == []
    assert emulator.records.bytes_up() == 0


def test_programs_are_those_that_ttnn_launches(chip: Any) -> None:
    """A product and its activation are two where they are not fused, a view is none."""
    import ttnn

    from tests.emulation.records import launched_programs

    x = ttnn.ones((1, 1, 64, 64), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=chip)

    def run() -> None:
        ttnn.add(ttnn.reshape(x, (1, 2, 32, 64)), 1.0)
        ttnn.relu(ttnn.matmul(x, x))

    assert launched_programs(run) == 3
