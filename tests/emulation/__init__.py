"""An emulated Blackhole: the stock ttnn on a mock p150, with values from torch.

    from tests import emulation
    emulator = emulation.start()          # before anything imports ttnn
    import ttnn
    device = ttnn.open_device(device_id=0, ...)

It shows that ttnn accepts a graph (validation, placement, memory, program building) and that the graph
computes the right function with the rounding of its data types and fidelities. It shows nothing about
kernels, timing or the numerics of silicon.
"""

from tests.emulation.errors import (
    DeviceMemoryError,
    EmulationError,
    TraceError,
    UnknownOperationError,
)
from tests.emulation.setup import current, emulate_on_import, start, uninstall, worker_setup

__all__ = [
    "DeviceMemoryError",
    "EmulationError",
    "TraceError",
    "UnknownOperationError",
    "current",
    "emulate_on_import",
    "start",
    "uninstall",
    "worker_setup",
]
