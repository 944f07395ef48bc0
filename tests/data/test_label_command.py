"""``sam3-ray label`` and ``preview`` as commands: exit codes, SIGKILL at random points, resume."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from tests.demo_scenes import scenes

SAM3_RAY = [sys.executable, "-c", "import sys; from sam3_ray.cli import main; sys.exit(main())"]
PROMPTS = ["--prompt", "red circle", "--prompt", "blue square", "--prompt", "star"]
TIMEOUT = 240
PICTURES = 80
LEFT = 24
"""Pictures that a run has still to do when it is killed: on a busy machine it must not end before."""


def command(source: Path, out: Path, *more: str) -> list[str]:
    # Shards of 25 and batches of 4: some batches are at the end of a shard.
    return [
        *(*SAM3_RAY, "label", str(source), *PROMPTS, "--out", str(out)),
        *("--checkpoint", "demo", "--chips", "cpu", "--shard-size", "25", *more),
    ]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=TIMEOUT, check=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with shapes, one of them broken."""
    folder = tmp_path_factory.mktemp("source")
    drawn = list(scenes(PICTURES // 4, seed=3))
    for number in range(PICTURES):
        picture = drawn[number // 4].image.rotate(90 * (number % 4), expand=True)
        picture.save(folder / f"{number:03d}.png")
    (folder / "040.png").write_bytes((folder / "041.png").read_bytes()[:3000])
    return folder


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    done = run(command(source, out, "--preview"))
    assert done.returncode == 3, done.stderr
    assert f"{PICTURES - 1} images labelled, 1 errors" in done.stdout
    [told] = re.findall(r"^  (/.+?): .+$", done.stdout, re.MULTILINE)
    [failed] = pq.read_table(out / "errors").to_pylist()
    assert told == failed["path"]
    assert f"sam3-ray: {PICTURES} of {PICTURES} images" in done.stderr
    assert "Traceback" not in done.stderr
    return out


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [
        row
        for path in sorted((folder / kind).glob("part-*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def written(out: Path) -> int:
    """Images that are in any file of a folder, finished or not."""
    count = 0
    for path in [*out.glob("*/part-*.parquet"), *out.glob("unfinished/*/[0-9]*.parquet")]:
        try:
            count += pq.read_metadata(path).num_rows
        except OSError:
            continue  # its shard has just been finished
    return count


def victim(process: psutil.Process, target: str) -> psutil.Process | None:
    if target == "driver":
        return process
    for child in process.children(recursive=True):
        try:
            name, title = child.name(), " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if (target == "raylet" and name == "raylet") or (
            target == "actor" and title.startswith("ray::MapWorker")
        ):
            return child
    return None


def kill_at(arguments: list[str], out: Path, target: str, images: int, log: Path) -> int:
    """Start a run, kill a process of it once so many images are written, and wait until all have ended."""
    with log.open("a") as output:
        started = subprocess.Popen(arguments, stdout=output, stderr=output)
    process = psutil.Process(started.pid)
    deadline = time.monotonic() + TIMEOUT
    while written(out) < images and started.poll() is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.005)
    assert started.poll() is None, f"ended before it was killed: {log.read_text()}"
    # Ray's agents are told by a silent GCS that they may go, which takes them a minute.
    family = [p for p in process.children(recursive=True) if not p.name().endswith("Agent")]
    prey = victim(process, target)
    assert prey is not None, target
    prey.kill()
    code = started.wait(timeout=TIMEOUT)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    return code


def kill_and_resume(source: Path, out: Path, undisturbed: Path, targets: list[str]) -> None:
    """Kill a run at one random point after another, then let it end, and compare with the undisturbed one."""
    seed = random.randrange(10**6)
    print(f"seed {seed}, targets {targets}")
    points = sorted(random.Random(seed).sample(range(1, PICTURES - LEFT), len(targets)))
    log = out.with_suffix(".log")
    arguments = command(source, out)
    for target, images in zip(targets, points, strict=True):
        before = written(out)
        if before >= PICTURES - LEFT:
            break  # an actor's death does not end a run
        code = kill_at(arguments, out, target, max(images, before + 1), log)
        if target == "driver":
            assert code == -9
        elif target == "raylet":
            assert code != 0
        else:
            assert code == 3, log.read_text()
        assert written(out) >= before
    assert run(arguments).returncode == 3
    for kind in ("labels", "errors"):
        assert rows(out, kind) == rows(undisturbed, kind)
    for name in ("instances.json", "manifest.json"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes()
    assert not (out / "unfinished").exists()


@pytest.mark.timeout(600)
def test_killed_at_three_random_points_and_resumed(
    source: Path, undisturbed: Path, tmp_path: Path
) -> None:
    kill_and_resume(source, tmp_path / "out", undisturbed, ["driver", "raylet", "actor"])


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_killed_at_ten_random_points_and_resumed(
    source: Path, undisturbed: Path, tmp_path: Path
) -> None:
    targets = [*random.choices(("driver", "raylet"), k=9), "actor"]
    kill_and_resume(source, tmp_path / "out", undisturbed, targets)


def test_what_is_written_and_the_same_command_again(source: Path, undisturbed: Path) -> None:
    assert {path.name for path in undisturbed.iterdir()} == {
        ".lock", "errors", "instances.json", "labels", "manifest.json", "plan.parquet", "preview.html",
    }  # fmt: skip
    manifest = json.loads((undisturbed / "manifest.json").read_text())
    assert manifest["finished"]
    assert manifest["arguments"]["checkpoint"] == "demo"
    assert len(manifest["arguments"]["checkpoint_hash"]) == 32
    again = run(command(source, undisturbed))
    assert again.returncode == 3
    assert f"{PICTURES} images were done before, 0 are new" in again.stdout
    other = run(command(source, undisturbed, "--threshold", "0.4"))
    assert other.returncode == 2
    assert "threshold was 0.5, is 0.4" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone", "--out", "out"], "is not there"),
        (["--out", "out"], "the following arguments are required: SOURCE"),
        ([".", "--out", "out", "--format", "coco,voc"], "voc is no format"),
        ([".", "--out", "out", "--chips", "many"], "neither auto, cpu nor a number"),
        ([".", "--out", "out", "--shard-size", "0"], "at least 1"),
        ([".", "--out", "out", "--max-errors", "lots"], "a count or a share"),
        ([".", "--out", "out", "--masks", "png"], "invalid choice"),
        ([".", "--out", "out", "--threshold", "2"], "threshold must be in"),
        ([".", "--out", "out"], "nothing to label"),
    ],
)
def test_a_wrong_command_ends_with_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from sam3_ray.cli import main

    monkeypatch.chdir(tmp_path)
    given = ["label", *arguments, "--prompt", "car", "--checkpoint", "demo"]
    try:
        code = main([*given, "--chips", "cpu"] if "--chips" not in given else given)
    except SystemExit as ended:  # argparse's
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(12):
        (tmp_path / "in" / f"{number}.jpg").write_text("no picture")
    failed = run(command(tmp_path / "in", tmp_path / "out", "--max-errors", "3"))
    assert failed.returncode == 1
    assert "max_errors is 3" in failed.stderr
    told = re.findall(
        rf"^  {re.escape(str(tmp_path))}/in/\d+\.jpg: .+", failed.stderr, re.MULTILINE
    )
    assert len(told) == 3  # of the four or more
    assert all("not an image" in line for line in told)
    assert "Traceback" not in failed.stderr


def test_labels_into_a_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sam3_ray.cli import main

    (tmp_path / "in").mkdir()
    (tmp_path / "out").write_text("notes")
    given = ["label", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--prompt", "car"]
    assert main([*given, "--checkpoint", "demo", "--chips", "cpu"]) == 2
    assert "out is a file: give a folder" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "notes"


def test_preview_of_a_folder_without_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sam3_ray.cli import main

    assert main(["preview", str(tmp_path)]) == 2
    assert "has no labels" in capsys.readouterr().err


def test_the_contact_sheet_has_the_pictures(undisturbed: Path) -> None:
    from sam3_ray.cli import main

    (undisturbed / "preview.html").unlink()
    assert main(["preview", str(undisturbed), "--n", "7"]) == 0
    page = (undisturbed / "preview.html").read_text()
    assert page.count("<figure") == 7
    assert page.count("data:image/jpeg;base64,") == 7
    assert "040.png" in page  # the error
    assert os.path.getsize(undisturbed / "preview.html") < 2_000_000
