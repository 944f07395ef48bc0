"""The mesh of one chip, named where tt-metal cannot tell it from the board."""

from __future__ import annotations

import os

from sam3_ray import chips
from sam3_ray.backends.blackhole.overlay import runtime_root

MESH_GRAPH = "TT_MESH_GRAPH_DESC_PATH"
"""tt-metal's variable for the file that says how chips are connected; read when ttnn opens a chip."""

ONE_CHIP = "tt_metal/fabric/mesh_graph_descriptors/p150_mesh_graph_descriptor.textproto"
"""Of the descriptors in the wheel the one of a Blackhole chip by itself."""

_SINGLE_CHIP_BOARDS = ("p100", "p150")


def describe_mesh(device_id: int) -> None:
    """Set TT_MESH_GRAPH_DESC_PATH for a process that sees one chip of a board with several, as a p300.

    tt-metal calls that cluster custom and refuses it without a descriptor; the board's own, of two chips,
    does not fit one (tenstorrent/tt-inference-server, pull requests 2587 and 3697). A value that is set
    already stays. Call it before ttnn is imported.

    Raises:
        ValueError: TT_VISIBLE_DEVICES names a chip that is not here.
    """
    if os.environ.get(MESH_GRAPH) or os.environ.get(chips.MOCK_CLUSTER):
        return
    visible = chips.look().visible()
    if len(visible) != 1 or device_id != 0:
        return
    board = visible[0].card
    if board is None or board.lower().startswith(_SINGLE_CHIP_BOARDS):
        return
    descriptor = runtime_root() / ONE_CHIP
    if descriptor.is_file():
        os.environ[MESH_GRAPH] = str(descriptor)
