"""One process after another, four at once, Ray's workers: each gets its own emulated chips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import emulation
from tests.emulation.mock import prepare
from tests.emulation.processes import REPOSITORY, clean_environment, finish, launch

USE_A_CHIP = """
import ttnn, torch
device = ttnn.open_device(device_id=0)
grid = device.compute_with_storage_grid_size()
x = ttnn.from_torch(torch.full((64, 64), 3.0), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=device)
y = ttnn.to_torch(ttnn.add(x, x))
print(grid.x, grid.y, ttnn.GetNumAvailableDevices(), float(y.min()), float(y.max()))
ttnn.close_device(device)
"""


def test_many_opens_in_one_process(emulator: Any) -> None:
    import ttnn

    from tests.emulation.samples import down, random, up

    for number in range(12):
        device = ttnn.open_device(device_id=0)
        value = random(1, 1, 32, 64, seed=number)
        tensor = up(device, value)
        assert (down(ttnn.neg(tensor)) == -value).all()
        ttnn.close_device(device)
    assert emulator.memory.host_bytes() == 0


def test_nothing_is_left_outside_the_folder(tmp_path: Path) -> None:
    home, here, temporary = (tmp_path / name for name in ("home", "here", "temporary"))
    for folder in (home, here, temporary):
        folder.mkdir()
    code = f"""
import os
from pathlib import Path
from tests import emulation
emulator = emulation.start()
root = Path(os.environ["TT_METAL_CACHE"]).parent
{USE_A_CHIP}
assert list(root.glob("kernel-cache/*")), "no kernels were made"
print(root)
"""
    environment = clean_environment(
        HOME=str(home), TMPDIR=str(temporary), XDG_CACHE_HOME=str(home / ".cache")
    )
    output = finish(launch(code, environment, here))
    first, root = output.strip().splitlines()
    assert first == "11 10 1 6.0 6.0"
    assert Path(root).parent == temporary
    assert [path for folder in (home, here, temporary) for path in folder.rglob("*")] == []


def test_twelve_columns_with_the_ethernet_overlay(tmp_path: Path) -> None:
    code = """
from tests import emulation
emulator = emulation.start(dispatch="eth")
import ttnn, torch
device = ttnn.open_device(
    device_id=0, num_command_queues=1,
    dispatch_core_config=ttnn.DispatchCoreConfig(ttnn.DispatchCoreType.ETH),
)
x = ttnn.from_torch(
    torch.ones(1, 1, 10 * 32, 64), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=device
)
w = ttnn.from_torch(torch.ones(64, 12 * 32), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=device)
y = ttnn.linear(x, w, core_grid=ttnn.CoreGrid(x=12, y=10))
grid = device.compute_with_storage_grid_size()
print(grid.x, grid.y, float(ttnn.to_torch(y).max()))
ttnn.close_device(device)
"""
    environment = clean_environment(TMPDIR=str(tmp_path))
    assert finish(launch(code, environment, tmp_path)) == "12 10 64.0\n"


def test_four_processes_at_once_on_a_machine_of_four(tmp_path: Path) -> None:
    root = tmp_path / "mock"
    variables = prepare(root, chips=4)
    code = f"""
from tests.emulation import emulate_on_import
emulate_on_import()
{USE_A_CHIP}
"""
    processes = [
        launch(
            code,
            clean_environment(
                **{
                    **variables,
                    "TT_VISIBLE_DEVICES": str(number),
                    "TT_METAL_CACHE": f"{variables['TT_METAL_CACHE']}-{number}",
                }
            ),
            tmp_path,
        )
        for number in range(4)
    ]
    assert [finish(process) for process in processes] == ["11 10 1 6.0 6.0\n"] * 4


def test_each_chip_of_four_in_one_process(tmp_path: Path) -> None:
    # One after another: ttnn 0.81.1 cannot close one of several devices that were opened one by one.
    code = f"""
from tests import emulation
emulation.start(chips=4)
for number in (0, 3, 1, 2, 0):
    exec({USE_A_CHIP.replace("device_id=0", "device_id=number")!r})
"""
    output = finish(launch(code, clean_environment(TMPDIR=str(tmp_path)), tmp_path))
    assert output == "11 10 4 6.0 6.0\n" * 5


def test_ray_actors_with_the_setup_hook(tmp_path: Path) -> None:
    variables = prepare(tmp_path / "mock", chips=2)
    code = f"""
import sys
import ray

class Chip:
    def modules(self):
        return sorted({{"ttnn", "torch", "numpy"}} & set(sys.modules))

    def use(self):
        import contextlib, io
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec({USE_A_CHIP!r}, {{}})
        return printed.getvalue()

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={{
    "worker_process_setup_hook": "tests.emulation.worker_setup",
    "env_vars": {{**{variables!r}, "PYTHONPATH": {str(REPOSITORY)!r}}},
}})
actors = []
for number in range(2):
    environment = {{
        "TT_VISIBLE_DEVICES": str(number),
        "TT_METAL_CACHE": {variables["TT_METAL_CACHE"]!r} + f"-{{number}}",
    }}
    actors.append(ray.remote(Chip).options(runtime_env={{"env_vars": environment}}).remote())
print(ray.get([actor.modules.remote() for actor in actors]))
print(ray.get([actor.use.remote() for actor in actors]))
ray.shutdown()
"""
    output = finish(launch(code, clean_environment(RAY_DISABLE_MEMORY_MONITOR="1"), tmp_path))
    modules, results = output.strip().splitlines()[-2:]
    assert "ttnn" not in modules
    assert "torch" not in modules
    assert results == str(["11 10 1 6.0 6.0\n"] * 2)


def test_the_hook_imports_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys
from tests.emulation import worker_setup
worker_setup()
print(sorted({"ttnn", "torch", "numpy", "ray", "sam3_ray"} & set(sys.modules)))
"""
    assert finish(launch(code, clean_environment(), tmp_path)) == "[]\n"


def test_ttnn_imported_too_early_is_told(tmp_path: Path) -> None:
    code = """
import ttnn
from tests import emulation
for call in (emulation.start, emulation.emulate_on_import, emulation.current):
    try:
        call()
    except emulation.EmulationError as error:
        print(error)
"""
    output = finish(launch(code, clean_environment(HOME=str(tmp_path)), tmp_path)).splitlines()
    assert "emulation.start(): ttnn was imported without the mock's environment" in output[0]
    assert "emulate_on_import(): ttnn was imported without the mock's" in output[1]
    assert "call tests.emulation.start() before ttnn is imported" in output[2]


def test_ttnn_without_the_environment_is_told(tmp_path: Path) -> None:
    code = """
from tests.emulation import EmulationError, emulate_on_import
emulate_on_import()
try:
    import ttnn
except EmulationError as error:
    print(error)
"""
    output = finish(launch(code, clean_environment(HOME=str(tmp_path)), tmp_path))
    assert "without TT_METAL_MOCK_CLUSTER_DESC_PATH" in output


def test_starting_twice_is_told(emulator: Any) -> None:
    assert emulation.current() is emulator
    with pytest.raises(emulation.EmulationError, match="runs in this process already"):
        emulation.start()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"chips": 0}, "1 to 4, got 0"), ({"chips": 5}, "got 5"), ({"dispatch": "noc"}, "'noc'")],
)
def test_machines_that_there_are_not(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path, **options)
