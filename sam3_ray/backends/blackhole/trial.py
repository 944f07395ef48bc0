"""The trial of ETH dispatch: open a chip with it, run a traced matmul, compare, close.

``python -m sam3_ray.backends.blackhole.trial`` does it and prints one JSON line; :func:`run_trial` starts
that in a process of its own, since what does not work may hang or die.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

TRIAL_COMMAND = (sys.executable, "-m", "sam3_ray.backends.blackhole.trial")

TIMEOUT_S = 300.0
"""The first opening builds the dispatch kernels; a hang has no other end than this."""

DEPTH = 128
"""Inner dimension of the matmul. Operands are -1, 0 and 1, so sums are integers up to 128, which bfloat16
holds exactly and every math fidelity computes exactly: the comparison is for equality."""

_TILE = 32
_KEPT_OUTPUT = 20_000


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended.

    Attributes:
        passed: whether ETH dispatch may be used.
        reason: what was seen, in a sentence.
        grid: compute grid (columns, rows) with it; None where the device did not open.
        log: the end of what ttnn and Python printed.
    """

    passed: bool
    reason: str
    grid: tuple[int, int] | None = None
    log: str = field(default="", compare=False)


def run_trial(
    environment: Mapping[str, str],
    *,
    timeout_s: float = TIMEOUT_S,
    command: Sequence[str] = TRIAL_COMMAND,
) -> TrialResult:
    """Run the trial in a process group of its own, and end that group where it takes too long.

    Args:
        environment: of the process, with TT_METAL_RUNTIME_ROOT and TT_VISIBLE_DEVICES as they shall be.
        timeout_s: seconds until it is killed.
        command: what to run; it prints one JSON object as :func:`main` does.

    Returns:
        ``passed`` only where the process ended by itself with exit code 0 and said so.

    Raises:
        OSError: the command cannot be started.
    """
    # Files, not pipes: a grandchild that keeps a pipe open must not keep us.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.returncode is None:  # too long, or Ctrl-C here
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log = _tail(errors)
        if code is None:
            return TrialResult(False, f"no answer within {timeout_s:g} s; it was killed", log=log)
        return replace(_judge(code, _tail(output), log), log=log)


def _judge(code: int, output: str, errors: str) -> TrialResult:
    """What an exit code and the last output say."""
    if code < 0:
        return TrialResult(False, f"it died by {_signal_name(-code)}")
    if code > 0:
        said = (errors.strip().splitlines() or ["it printed nothing"])[-1].strip()[:300]
        return TrialResult(False, f"it ended with exit code {code}: {said}")
    try:
        report = json.loads(output)
        passed, reason, grid = report["passed"], str(report["reason"]), report["grid"]
        size = None if grid is None else (int(grid[0]), int(grid[1]))
    except (ValueError, KeyError, TypeError, IndexError):
        return TrialResult(False, f"its report is not one JSON object: {output.strip()[:200]!r}")
    if passed is True and size is None:
        return TrialResult(False, f"its report has no grid: {output.strip()[:200]!r}")
    return TrialResult(passed is True, reason, size)


def _signal_name(number: int) -> str:
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _KEPT_OUTPUT))
    return file.read().decode(errors="replace")


# -- in the process of its own ---------------------------------------------------------------------


def main() -> int:
    """Try, and print ``{"passed": ..., "reason": ..., "grid": ...}`` on stdout, alone there: what ttnn
    prints goes to stderr.

    Returns:
        Exit code 0, whatever the outcome: the report says it.
    """
    report_to = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    report: dict[str, Any] = {"passed": False, "reason": "", "grid": None}
    try:
        _try_it(report)
    except RuntimeError as error:  # what ttnn raises; a backtrace follows its first line
        report["reason"] = (str(error).strip().splitlines() or [repr(error)])[0]
    with os.fdopen(report_to, "w") as file:
        print(json.dumps(report), file=file)
    return 0


def _try_it(report: dict[str, Any]) -> None:
    """Fill ``report``, as far as it gets."""
    from sam3_ray.backends.blackhole.device import open_arguments

    arguments = open_arguments(0, "eth")
    import ttnn

    device = ttnn.open_device(**arguments)
    try:
        size = device.compute_with_storage_grid_size()
        columns, rows = int(size.x), int(size.y)
        report["grid"] = [columns, rows]
        problem = _traced_matmul(ttnn, device, columns, rows)
    finally:
        ttnn.close_device(device)
    report["passed"] = problem is None
    report["reason"] = (
        problem or f"a traced matmul on {columns}x{rows} cores gave the host's values"
    )


def _traced_matmul(ttnn: Any, device: Any, columns: int, rows: int) -> str | None:
    """Replay a matmul with two different inputs, a tile of output for every core. What was wrong, or None."""
    import torch

    generator = torch.Generator().manual_seed(3)

    def ternary(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(torch.bfloat16)

    def on_host(values: torch.Tensor) -> Any:
        return ttnn.from_torch(values, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT)

    inputs = [ternary(1, 1, rows * _TILE, DEPTH) for _ in range(2)]
    weight = ternary(DEPTH, columns * _TILE)
    left = ttnn.to_device(on_host(inputs[0]), device)
    right = ttnn.to_device(on_host(weight), device)
    grid = ttnn.CoreGrid(x=columns, y=rows)
    product = ttnn.matmul(left, right, core_grid=grid)

    def multiply() -> None:  # into a buffer that is there before the trace is
        ttnn.matmul(left, right, core_grid=grid, optional_output_tensor=product)

    multiply()  # compiles, which a capture must not
    trace = ttnn.begin_trace_capture(device, cq_id=0)
    multiply()
    ttnn.end_trace_capture(device, trace, cq_id=0)
    problem = None
    for number, values in enumerate(inputs, 1):
        ttnn.copy_host_to_device_tensor(on_host(values), left)
        ttnn.execute_trace(device, trace, cq_id=0, blocking=True)
        wrong = int((ttnn.to_torch(product).float() != values.float() @ weight.float()).sum())
        if wrong and problem is None:
            problem = (
                f"replay {number}: {wrong} of {product.volume()} values differ from the host's"
            )
    ttnn.release_trace(device, trace)
    return problem


if __name__ == "__main__":
    sys.exit(main())
