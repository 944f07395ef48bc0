"""The fidelity that the emulation assumes is the one in the kernel that ttnn generates.

ttnn writes each kernel's fidelity into a header before it calls the compiler. The mock keeps those files, so
the defaults need not be believed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.processes import clean_environment, finish, launch

SCRIPT = '''
import json, os, re
from pathlib import Path
from tests import emulation
emulator = emulation.start()
import torch, ttnn

FIDELITIES = {0: "LoFi", 2: "HiFi2", 3: "HiFi3", 4: "HiFi4", 255: "Invalid"}
cache = Path(os.environ["TT_METAL_CACHE"])
device = ttnn.open_device(device_id=0, l1_small_size=65536)
seen, found = set(), {}


def up(*shape, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT):
    return ttnn.from_torch(torch.ones(*shape), dtype=dtype, layout=layout, device=device)


def headers():
    return set(cache.rglob("chlkc_descriptors.h"))


def note(label, kernel, call):
    """What the newest kernel of that name was generated with, next to what was recorded."""
    before = headers()
    try:
        call()
        record = emulator.records.operations[-1]
        recorded = [record.fidelity, record.fp32_accumulate]
    except emulation.EmulationError as error:
        recorded = str(error)
    for path in sorted(headers() - before):
        text = path.read_text()
        fidelity = int(re.search(r"MATH_FIDELITY = static_cast<ckernel::MathFidelity>[(](\\d+)[)]", text)[1])
        if path.parent.parent.name.startswith(kernel):
            wide = re.search(r"DST_ACCUM_MODE = (\\w+)", text)[1] == "true"
            found[label] = [[FIDELITIES[fidelity], wide], recorded]


x, x8, x32 = up(1, 1, 64, 128), up(1, 1, 64, 128, dtype=ttnn.bfloat8_b), up(1, 1, 64, 128, dtype=ttnn.float32)
w, w8, w32 = up(128, 96), up(128, 96, dtype=ttnn.bfloat8_b), up(128, 96, dtype=ttnn.float32)
grid = ttnn.CoreGrid(y=2, x=2)
note("linear", "bmm", lambda: ttnn.linear(x, w))
note("linear of blocks", "bmm", lambda: ttnn.linear(x, w8))
note("linear of two blocks", "bmm", lambda: ttnn.linear(x8, w8))
note("linear on a core grid", "bmm", lambda: ttnn.linear(x, w, core_grid=grid))
note("linear of float32", "bmm", lambda: ttnn.linear(x32, w32))
note("linear to float32", "bmm", lambda: ttnn.linear(x, w, dtype=ttnn.float32, bias=up(1, 96)))
note("matmul", "bmm", lambda: ttnn.matmul(up(1, 2, 64, 64), up(1, 2, 64, 64)))
unset = ttnn.WormholeComputeKernelConfig(fp32_dest_acc_en=True)
note("config without fidelity", "bmm", lambda: ttnn.linear(x, w, compute_kernel_config=unset))
lofi = ttnn.WormholeComputeKernelConfig(math_fidelity=ttnn.MathFidelity.LoFi)
note("config with fidelity", "bmm", lambda: ttnn.linear(x8, w, compute_kernel_config=lofi))
note("minimal_matmul", "compute", lambda: ttnn.experimental.minimal_matmul(x, w))
note("layer_norm", "layernorm", lambda: ttnn.layer_norm(x))
note("rms_norm", "layernorm", lambda: ttnn.rms_norm(x))
note("softmax", "softmax", lambda: ttnn.softmax(x, dim=-1))
note("sum", "reduce", lambda: ttnn.sum(x, dim=-1))
q, table, turn = up(1, 2, 64, 64), up(1, 1, 64, 64), up(1, 1, 32, 32)
attention = ttnn.transformer.scaled_dot_product_attention
note("attention", "sdpa", lambda: attention(q, q, q, is_causal=False))
rotary = ttnn.experimental.rotary_embedding_llama
note("rotary", "rotary", lambda: rotary(q, table, table, turn, is_decode_mode=False))
image = up(1, 1, 256, 32, layout=ttnn.ROW_MAJOR_LAYOUT)
common = dict(input_tensor=image, device=device, in_channels=32, out_channels=32, batch_size=1,
              input_height=16, input_width=16, conv_config=ttnn.Conv2dConfig(weights_dtype=ttnn.bfloat16))
weight = lambda side: ttnn.from_torch(torch.ones(32, 32, side, side), dtype=ttnn.float32)
note("conv2d", "conv", lambda: ttnn.conv2d(
    weight_tensor=weight(3), kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), **common))
note("conv_transpose2d", "conv", lambda: ttnn.conv_transpose2d(
    weight_tensor=weight(2), kernel_size=(2, 2), stride=(2, 2), padding=(0, 0), **common))
core = ttnn.CoreGrid(y=1, x=1)
mask = ttnn.to_device(ttnn.create_group_norm_input_mask(64, 8, 1, ttnn.DataType.BFLOAT8_B), device)
row = ttnn.create_group_norm_weight_bias_rm(torch.ones(64), 64, 1)
row = ttnn.from_torch(row, dtype=ttnn.bfloat16, device=device)
note("group_norm", "groupnorm", lambda: ttnn.group_norm(
    up(1, 1, 256, 64), num_groups=8, input_mask=mask, weight=row, bias=row, core_grid=core, inplace=False,
    memory_config=ttnn.DRAM_MEMORY_CONFIG, num_out_blocks=1))
print(json.dumps(found))
ttnn.close_device(device)
'''

OPERATIONS = (
    "linear",
    "linear of blocks",
    "linear of two blocks",
    "linear on a core grid",
    "linear of float32",
    "linear to float32",
    "matmul",
    "config with fidelity",
    "minimal_matmul",
    "layer_norm",
    "rms_norm",
    "softmax",
    "sum",
    "attention",
    "rotary",
    "conv2d",
    "conv_transpose2d",
    "group_norm",
)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder: Path = tmp_path_factory.mktemp("defaults")
    output = finish(launch(SCRIPT, clean_environment(TMPDIR=str(folder)), folder))
    found: dict[str, list[Any]] = json.loads(output)
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_recorded_arithmetic_is_the_generated_kernels(
    generated: dict[str, list[Any]], operation: str
) -> None:
    kernel, recorded = generated[operation]
    assert recorded == kernel


def test_a_config_without_fidelity_reaches_the_kernel_as_it_is(
    generated: dict[str, list[Any]],
) -> None:
    kernel, refusal = generated["config without fidelity"]
    assert kernel == ["Invalid", True]
    assert "no math_fidelity" in refusal
