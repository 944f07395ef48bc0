"""What the model would cost on a chip, predicted from the operations that an emulated one recorded.

A PREDICTION under the model below, not a measurement: no operation has run on silicon.

    python perf/roofline.py [--out perf/results/roofline.json] [--precision fast]

At full size, both grids (110 cores with the stock dispatch, 120 with ETH dispatch), both precisions, for
each kind of work: an image, a new phrase, one prompt of an image (grounding, its pixels and one mask), four
prompts (one grounding, the pixels and a mask of each).
The model, an operation:

- matrix multiplication and convolution: 75 % of its own fidelity's ceiling on the cores that its program
  config or its shards use, the busiest core's whole tiles counted; or the time to read its operands from and
  write its result to DRAM, where that is longer;
- attention: 60 % of the ceiling, whole chunks of queries for each core; or the DRAM time;
- everything else: its bytes, at 60 % of 512 GB/s for DRAM plus 40 GB/s a core for L1; a slice reads what it
  gives;
- and never less than 16 us, the launch of an operation inside a trace;
- some calls of ttnn are several programs (a convolution also spreads its input and its edges over the cores):
  each program that ttnn's own graph capture counts beyond the calls is a launch more.

The ceilings, 5.4, 2.7 and 1.35 TFLOPS a core for LoFi, HiFi2 and HiFi4 (HiFi3 between: 1.8), the shares and
the launch are what others measured on a p150 (docs/blackhole.md, "What others measured").
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

TILE = 32
TFLOPS_A_CORE = {"LoFi": 5.4, "HiFi2": 2.7, "HiFi3": 1.8, "HiFi4": 1.35}
MATMUL_SHARE, ATTENTION_SHARE, DRAM_SHARE = 0.75, 0.60, 0.60
DRAM_BYTES_A_SECOND = 512e9
L1_BYTES_A_SECOND_A_CORE = 40e9
LAUNCH_S = 16e-6
TARGETS_MS = {"image": 45.0, "phrase": 6.0, "prompt": 12.0, "four prompts": 30.0}
"""Of ``fast`` on 120 cores."""

DISPATCHES = ("worker", "eth")
PRECISIONS = ("accurate", "fast")

MATMULS = ("ttnn.linear", "ttnn.matmul")
CONVOLUTION = "ttnn.conv2d"
SLICE = "ttnn.slice"
ATTENTION = "ttnn.transformer.scaled_dot_product_attention"

DONE = {
    "small linear": "few rows go by columns over all cores, few columns by rows; q, k and v in one",
    "token attention": "one additive bias a layer; the scale in the queries' weights; chunks for busy cores",
    "strips": "rows of an image with their neighbours, for convolutions that fit in L1",
    "fc1": "exact GELU fused into the product; output stays in L1; blocks chosen for the grid",
    "fc2": "input and output in L1; inner blocks of up to 8 tiles",
    "qkv": "one product for q, k and v of all windows: a window is a reshape, nothing is copied",
    "proj": "reads the joined heads from L1; the residual is added in place",
    "windowed attention": "tokens in window order, chunks that divide a window",
    "global attention": "the same order as the windows: no un-windowing, chunks that divide the image",
    "convolution": "four phases of 2x2, the doubled image is never made; the levels' share comes with it",
    "upsampling": "the 1x1 convolution after it is multiplied into it",
    "rotation": "one kernel for all heads, queries and keys; tables made once",
    "layer norm": "in L1, interleaved over all cores",
    "residual": "in place in L1; after a norm's input, inside the norm",
    "split heads": "one operation for q, k and v, in L1",
    "join heads": "in L1",
    "shuffle": "row-major, the rows of an image as they lie",
    "copy": "features go to buffers that the prompt part reads; level 0 is 42 MB",
}
"""What was done about a kind of operation; the table names the five costliest."""


@dataclass
class Cost:
    """One operation's prediction.

    Attributes:
        kind: what it is in the model's words; stage: backbone, neck, geometry or cache.
        flops: of the matrix engine; dram_bytes, l1_bytes: read and written.
        cores: that it uses; seconds: predicted, with the launch floor.
    """

    kind: str
    stage: str
    fidelity: str | None
    flops: float
    dram_bytes: int
    l1_bytes: int
    cores: int
    seconds: float


def cost_of(record: Any, cores: int) -> Cost:
    """Predict one recorded operation on a grid of ``cores``."""
    tensors = (*(record.outputs if record.name == SLICE else record.inputs), *record.outputs)
    dram = sum(t.nbytes for t in tensors if t.buffer == "DRAM")
    l1 = sum(t.nbytes for t in tensors if t.buffer == "L1")
    dram_s = dram / (DRAM_BYTES_A_SECOND * DRAM_SHARE)
    flops, used = 0.0, cores
    if record.name in MATMULS:
        flops, busiest, used = _matmul(record, cores)
        seconds = max(busiest / (_rate(record) * MATMUL_SHARE), dram_s)
    elif record.name == CONVOLUTION:
        flops, busiest, used = _convolution(record)
        seconds = max(busiest / (_rate(record) * MATMUL_SHARE), dram_s)
    elif record.name == ATTENTION:
        flops, busiest, used = _attention(record, cores)
        seconds = max(busiest / (_rate(record) * ATTENTION_SHARE), dram_s)
    else:
        seconds = dram_s + l1 / (L1_BYTES_A_SECOND_A_CORE * cores)
    return Cost(
        kind_of(record),
        record.stage,
        record.fidelity if flops else None,
        flops,
        dram,
        l1,
        used,
        max(seconds, LAUNCH_S),
    )


def kind_of(record: Any) -> str:
    """What an operation is called in the table."""
    name = (
        record.name.removeprefix("ttnn.").removeprefix("experimental.").removeprefix("transformer.")
    )
    if record.name in MATMULS and record.stage == "backbone":
        inner, columns = record.inputs[1].shape[-2:]
        ratio = columns / inner
        names = {3.0: "qkv", 1.0: "proj"}
        return names.get(ratio, "patches" if inner == 608 else "fc1" if ratio > 1 else "fc2")
    if record.name in MATMULS and record.stage == "neck":
        return "upsampling" if record.outputs[0].shape[-1] > 256 else "projection"
    if record.name == ATTENTION:
        if record.stage != "backbone":
            return "token attention"
        return "windowed attention" if record.inputs[0].shape[0] > 1 else "global attention"
    return {
        "linear": "small linear",
        "conv2d": "convolution",
        "rotary_embedding_llama": "rotation",
        "layer_norm": "layer norm",
        "add": "residual",
        "nlp_create_qkv_heads": "split heads",
        "nlp_concat_heads": "join heads",
        "permute": "shuffle",
        "reshape": "shuffle",
        "to_layout": "shuffle",
        "slice": "strips",
        "concat": "strips",
        "to_memory_config": "strips",
        "typecast": "pixels",
    }.get(name, name)


def _rate(record: Any) -> float:
    return TFLOPS_A_CORE[record.fidelity] * 1e12


def _tiles(elements: int) -> int:
    return math.ceil(elements / TILE)


def _matmul(record: Any, cores: int) -> tuple[float, float, int]:
    """FLOPs, those of the busiest core in whole tiles, and the cores that have any."""
    x = record.inputs[0]
    batch, inner = math.prod(x.shape[:-2]), x.shape[-1]
    columns = record.outputs[0].shape[-1]
    rows = math.prod(x.shape[:-1])
    config = record.program_config
    if config is None:  # ttnn chooses: tiles of the output over all cores
        tiles = batch * _tiles(x.shape[-2]) * _tiles(columns)
        busiest = 2.0 * math.ceil(tiles / cores) * _tiles(inner) * TILE**3
        return 2.0 * rows * inner * columns, busiest, min(tiles, cores)
    core_rows, core_columns = config["per_core_M"], config["per_core_N"]
    used = math.ceil(_tiles(rows) / core_rows) * math.ceil(_tiles(columns) / core_columns)
    busiest = 2.0 * core_rows * core_columns * _tiles(inner) * TILE**3
    return 2.0 * rows * inner * columns, busiest, min(used, cores)


def _convolution(record: Any) -> tuple[float, float, int]:
    """A 3x3 convolution as the product it is, on the cores that its output is sharded over."""
    output = record.outputs[0]
    pixels, channels = output.shape[-2], output.shape[-1]
    inner = 9 * record.attributes["in_channels"]
    used = output.banks
    tiles = math.ceil(_tiles(pixels) * _tiles(channels) / used)
    return 2.0 * pixels * channels * inner, 2.0 * tiles * _tiles(inner) * TILE**3, used


def _attention(record: Any, cores: int) -> tuple[float, float, int]:
    """Both products; a core takes whole chunks of queries of one head."""
    batch, heads, queries, width = record.inputs[0].shape
    keys = record.inputs[1].shape[2]
    chunk = record.program_config["q_chunk_size"]
    units = batch * heads * math.ceil(queries / chunk)
    unit = 4.0 * chunk * TILE * _tiles(keys) * TILE * _tiles(width)
    busiest = math.ceil(units / cores) * unit
    return 4.0 * batch * heads * queries * keys * width, busiest, min(units, cores)


@dataclass(frozen=True)
class Work:
    """One kind of work as it was recorded.

    Attributes:
        operations: calls of ttnn that are no views.
        programs: what they launch, by ttnn's graph capture.
    """

    operations: list[Any]
    programs: int


def record_work(
    dispatch: str, precision: str
) -> tuple[dict[str, Work], tuple[int, int], dict[str, int]]:
    """Run the full-size model on an emulated chip of this process, without values.

    Returns:
        Each kind of work, the grid, and bytes of DRAM in use.
    """
    from tests import emulation
    from tests.emulation.records import launched_programs

    emulator = emulation.start(dispatch=dispatch)
    emulator.computes = False
    import ttnn

    from sam3_ray.backends.blackhole.device import open_arguments
    from tests.blackhole.placed_model import CACHED_IMAGES, place_model

    device = ttnn.open_device(**open_arguments(0, dispatch))
    model = place_model(device, precision)
    part, prompts = model.image, model.prompts

    def image() -> None:
        with emulator.stage("backbone"):
            x = part.backbone(model.pixels)
        with emulator.stage("neck"):
            levels = part.neck(x)
        with emulator.stage("geometry"):
            token = part.geometry(levels[-1])
        with emulator.stage("terms"):
            features = model.prompt.features([*levels, token])
        with emulator.stage("cache"):
            for output, buffer in zip(features, model.images.buffers, strict=True):
                ttnn.copy(output, buffer)
            model.images.store()

    def phrase() -> None:
        with emulator.stage("text"):
            prompts._encode_work(1)

    def answer(count: int) -> None:
        with emulator.stage("grounding"):
            prompts._ground_work(count)
        with emulator.stage("masks"):
            for i in range(count):
                prompts._choose_phrase(i)
                prompts._pixels_work()
                prompts._masks_work(1)

    work = {
        "image": image,
        "phrase": phrase,
        "prompt": lambda: answer(1),
        "four prompts": lambda: answer(4),
    }
    found = {}
    for name, run in work.items():
        run()  # convolutions prepare their weights
        emulator.records.clear()
        programs = launched_programs(run)
        operations = [op for op in emulator.records.operations if not op.is_view]
        found[name] = Work(operations, programs)
    for count in prompts.buckets:  # every other trace is placed too
        prompts._masks_work(count)
    for count in prompts._ids:
        prompts._encode_work(count)
        prompts._ground_work(count)
    dram = ttnn.get_memory_view(device, ttnn.BufferType.DRAM)
    used = {
        "dram_bytes": dram.total_bytes_allocated_per_bank * dram.num_banks,
        "cached_images": CACHED_IMAGES,
        "programs": device.num_program_cache_entries(),
    }
    ttnn.close_device(device)
    return found, model.grid, used


def predict(dispatch: str, precision: str) -> dict[str, Any]:
    """The predictions for one grid and precision, JSON-friendly."""
    work, grid, used = record_work(dispatch, precision)
    cores = grid[0] * grid[1]
    result: dict[str, Any] = {
        "precision": precision,
        "dispatch": dispatch,
        "grid": list(grid),
        **used,
        "work": {},
    }
    for name, recorded in work.items():
        costs = [cost_of(operation, cores) for operation in recorded.operations]
        more_launches = max(0, recorded.programs - len(costs))
        total = sum(cost.seconds for cost in costs) + LAUNCH_S * more_launches
        result["work"][name] = {
            "predicted_ms": _ms(total),
            "predicted_ms_if_launches_add": _ms(
                total + LAUNCH_S * sum(c.seconds > LAUNCH_S for c in costs)
            ),
            "operations": len(costs),
            "programs": recorded.programs,
            "at_the_launch_floor": sum(cost.seconds <= LAUNCH_S for cost in costs),
            "tflop": round(sum(cost.flops for cost in costs) / 1e12, 3),
            "dram_gb": round(sum(cost.dram_bytes for cost in costs) / 1e9, 3),
            "stages": _grouped(costs, "stage"),
            "kinds": _grouped(costs, "kind"),
        }
    return result


def _grouped(costs: list[Cost], by: str) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        groups[asdict(cost)[by]].append(cost)
    rows = {
        name: {
            "ms": _ms(sum(c.seconds for c in group)),
            "operations": len(group),
            "tflop": round(sum(c.flops for c in group) / 1e12, 3),
            "dram_mb": round(sum(c.dram_bytes for c in group) / 1e6, 1),
            "l1_mb": round(sum(c.l1_bytes for c in group) / 1e6, 1),
            "cores": min(c.cores for c in group),
            "fidelity": sorted({c.fidelity for c in group if c.fidelity}),
        }
        for name, group in groups.items()
    }
    return dict(sorted(rows.items(), key=lambda row: -row[1]["ms"]))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def show(prediction: dict[str, Any]) -> None:
    """The tables for a person."""
    grid = "{}x{}".format(*prediction["grid"])
    for name, work in prediction["work"].items():
        print(
            f"\nPREDICTED, {prediction['precision']}, {grid} cores, {name}: {work['predicted_ms']:.1f} ms "
            f"({work['predicted_ms_if_launches_add']:.1f} if launches add to the work), "
            f"{work['operations']} operations, {work['at_the_launch_floor']} at the launch floor, "
            f"{work['programs']} programs"
        )
        for kind, row in list(work["kinds"].items())[:5]:
            print(
                f"    {kind:22} {row['ms']:7.2f} ms  {row['operations']:4} x  {row['tflop']:6.3f} TFLOP  "
                f"{row['cores']:3} cores  {DONE.get(kind, '')}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "perf/results/roofline.json")
    parser.add_argument("--dispatch", choices=DISPATCHES, help="one grid only, to standard output")
    parser.add_argument("--precision", choices=PRECISIONS, help="one precision only")
    arguments = parser.parse_args()
    if arguments.dispatch and arguments.precision:
        print(json.dumps(predict(arguments.dispatch, arguments.precision)))
        return 0
    predictions = []
    for dispatch in DISPATCHES:
        for precision in [arguments.precision] if arguments.precision else PRECISIONS:
            # ttnn reads its environment once: a process for each.
            command = [sys.executable, __file__, "--dispatch", dispatch, "--precision", precision]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            predictions.append(json.loads(done.stdout.splitlines()[-1]))
            show(predictions[-1])
    result = {
        "what": "PREDICTED milliseconds at full size; nothing here was measured on a chip",
        "model": " ".join((__doc__ or "").split("The model, an operation:")[1].split()),
        "targets_ms": {"precision": "fast", "cores": 120, "at_most": TARGETS_MS},
        "done_about_it": DONE,
        "predictions": predictions,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    fast = [p for p in predictions if p["precision"] == "fast" and p["dispatch"] == "eth"]
    missed = [
        f"{name}: {p['work'][name]['predicted_ms']} ms > {target}"
        for p in fast
        for name, target in TARGETS_MS.items()
        if p["work"][name]["predicted_ms"] > target
    ]
    for line in missed:
        print("above the target:", line)
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
