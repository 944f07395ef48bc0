"""``label_images`` in this process, on a real Ray with simulated chips: files, resume, deaths, bounds."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sam3_ray.cli.label import _told
from sam3_ray.data import LabelSummary, Progress, Sam3Labeler, label_images
from sam3_ray.data.changes import take_out_changed
from sam3_ray.data.files import FolderInUseError, only_run_in
from sam3_ray.data.manifest import ArgumentsDifferError, ManifestError
from sam3_ray.data.output import RunFolder
from sam3_ray.data.plan import Plan, read_plan
from sam3_ray.data.pool import LabellingError
from sam3_ray.data.progress import TooManyErrorsError
from sam3_ray.data.schema import ERRORS_FILE_SCHEMA, labels_file_schema
from sam3_ray.data.sources import SourceError, list_inputs
from sam3_ray.images import file_digest
from tests.data.conftest import draw, draw_pictures
from tests.data.simulated import BROKEN, DEADLY, open_simulated, open_some

pytestmark = pytest.mark.usefixtures("local_ray")


def label(source: Path, out: Path, **options: Any) -> LabelSummary:
    given = {"chips": "cpu", "open_engine": open_simulated(), "max_errors": None, **options}
    return label_images(source, given.pop("prompts", ["car", "dog"]), out, **given)


def rows(folder: Path, kind: str = "labels") -> list[dict[str, Any]]:
    return [
        row for path in sorted((folder / kind).iterdir()) for row in pq.read_table(path).to_pylist()
    ]


@dataclass(frozen=True)
class Job:
    pictures: Path
    out: Path
    summary: LabelSummary
    told: list[Progress]


@pytest.fixture(scope="module")
def job(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A finished job, for tests that leave it as it is: to start an actor takes seconds."""
    folder = tmp_path_factory.mktemp("job")
    told: list[Progress] = []
    pictures = draw_pictures(folder / "pictures")
    summary = label(pictures, folder / "out", shard_size=4, on_progress=told.append)
    return Job(pictures, folder / "out", summary, told)


def test_every_image_ends_in_exactly_one_of_labels_and_errors(job: Job) -> None:
    pictures, out, summary, told = job.pictures, job.out, job.summary, job.told
    labels, errors = rows(out), rows(out, "errors")
    expected = sorted(
        path for path in pictures.rglob("*.*") if path.suffix != ".txt" and "/." not in str(path)
    )
    assert sorted([*(r["image_id"] for r in labels), *(r["image_id"] for r in errors)]) == [
        *range(1, 10)
    ]
    assert sorted([*(r["path"] for r in labels), *(r["path"] for r in errors)]) == [
        *map(str, expected)
    ]
    assert {Path(row["path"]).name: row["kind"] for row in errors} == {
        "broken.png": "not-an-image", "empty.jpg": "not-an-image",
    }  # fmt: skip
    assert len(list((out / "labels").iterdir())) == 3  # of 4, 4 and 1
    for path in out.rglob("labels/*.parquet"):
        assert pq.read_schema(path).equals(labels_file_schema("rle"))
    for path in out.rglob("errors/*.parquet"):
        assert pq.read_schema(path).equals(ERRORS_FILE_SCHEMA)
    assert (summary.images, summary.labelled, summary.errors) == (9, 7, 2)
    assert summary.instances == 7 * 4
    assert summary.phrases["dog"].images == 7
    assert summary.phrases["dog"].instances == 14
    assert summary.new_images == 9
    assert summary.other_files == 1
    assert told[-1].done == told[-1].total == 9
    assert told[-1].instances == 28
    assert told[-1].errors == 2
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["finished"] is True
    assert manifest["counts"] == {"images": 9, "labelled": 7, "errors": 2, "instances": 28}
    assert {path.name for path in out.iterdir()} == {
        ".lock", "errors", "instances.json", "labels", "manifest.json", "plan.parquet",
    }  # fmt: skip


def test_a_source_that_grew_and_changed(pictures: Path) -> None:
    out = pictures / "labels"  # inside of the source
    first = label(pictures, out, shard_size=4)
    assert first.changed == 0
    before = {row["path"]: row for row in rows(out)}
    untouched = out / "labels" / "part-00002.parquet"
    written = untouched.stat().st_mtime_ns
    new = draw(pictures / "a0-and-a-half.png", 50)  # sorts between what is there
    os.utime(pictures / "a0.png", (1, 1))  # touched only
    a1, broken = draw(pictures / "a1.png", 77, (80, 90)), draw(pictures / "broken.png", 78)
    (pictures / "a2.png").write_text("no picture any more")
    (pictures / "a3.png").unlink()  # what is gone keeps its label

    summary = label(pictures, out, shard_size=4, formats=["coco", "yolo"])
    assert (summary.images, summary.new_images, summary.changed) == (10, 4, 3)
    assert (summary.labelled, summary.errors) == (8, 2)
    assert {Path(row["path"]).name for row in rows(out, "errors")} == {"a2.png", "empty.jpg"}
    labels = rows(out)
    assert [row["image_id"] for row in labels] == sorted(row["image_id"] for row in labels)
    assert (labels[-1]["path"], labels[-1]["image_id"]) == (str(new), 10)
    after = {row["path"]: row for row in labels}
    assert set(after) == {*before, str(broken), str(new)} - {str(pictures / "a2.png")}
    assert (after[str(a1)]["width"], after[str(a1)]["height"]) == (80, 90)
    assert after[str(a1)]["digest"] == file_digest(a1.read_bytes())
    assert after[str(a1)]["image_id"] == before[str(a1)]["image_id"]
    kept = set(before) - {str(a1), str(pictures / "a2.png")}
    assert {path: after[path] for path in kept} == {path: before[path] for path in kept}
    assert untouched.stat().st_mtime_ns == written
    assert not (out / "unfinished").exists()
    again = label(pictures, out, shard_size=4)
    assert (again.images, again.new_images, again.changed) == (10, 0, 0)


def test_a_file_that_changed_in_a_shard_that_is_not_finished(tmp_path: Path) -> None:
    """Taken out of a file of its batch, and a run that is killed at that point finds the same."""
    folder, out = tmp_path / "pictures", tmp_path / "out"
    paths = [str(draw(folder / f"{number}.png", number)) for number in range(4)]
    inputs = list_inputs(folder)
    plan = Plan().grown(list(inputs.stamps.items()), 4)
    run = RunFolder(out, "rle")
    [shard] = plan.shards
    assert len(run.remaining(shard)) == 4
    alone = Sam3Labeler(["car", "dog"], keep=["image_id", "path"], open_engine=open_simulated())
    run.add(shard, alone(pa.table({"image_id": [1, 2, 3], "path": paths[:3]})))
    draw(folder / "0.png", 90)
    for _ in range(2):
        take_out_changed(run, plan, list_inputs(folder).stamps)
        assert run.remaining(shard) == [(1, paths[0]), (4, paths[3])]
    run.add(shard, alone(pa.table({"image_id": [1, 4], "path": [paths[0], paths[3]]})))
    alone.close()
    assert [row["image_id"] for row in rows(out)] == [1, 2, 3, 4]
    assert rows(out)[0]["digest"] == file_digest((folder / "0.png").read_bytes())


def test_other_arguments_in_the_same_folder(job: Job, tmp_path: Path) -> None:
    pictures = job.pictures
    shutil.copytree(job.out, tmp_path / "out")
    with pytest.raises(ArgumentsDifferError) as raised:
        label(pictures, tmp_path / "out", shard_size=4, prompts=["car"], threshold=0.25)
    assert 'prompts was ["car", "dog"], is ["car"]' in str(raised.value)
    assert "threshold was 0.5, is 0.25" in str(raised.value)
    assert "masks" not in str(raised.value)
    with only_run_in(tmp_path / "out"), pytest.raises(FolderInUseError, match="another run"):
        label(pictures, tmp_path / "out", shard_size=4)
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(ManifestError, match="no manifest of"):
        label(pictures, tmp_path / "out", shard_size=4)
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(SourceError, match="labels and no manifest"):
        label(pictures, tmp_path / "out", shard_size=4)


def test_images_that_kill_their_process_are_errors(tmp_path: Path) -> None:
    """Two deadly ones among others, one right after the other."""
    folder = tmp_path / "pictures"
    for number in range(9):
        draw(folder / f"{number}.png", number)
    for number in (3, 4):
        Image.new("RGB", (30 + number, 30), DEADLY).save(folder / f"{number}.png")
    summary = label(folder, tmp_path / "out", open_engine=open_simulated(image_s=0.02))
    assert {Path(row["path"]).name: row["kind"] for row in rows(tmp_path / "out", "errors")} == {
        "3.png": "kills-process", "4.png": "kills-process",
    }  # fmt: skip
    assert summary.labelled == 7
    assert not (tmp_path / "out" / ".attempts").exists()


def test_an_actor_that_is_killed_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    for number in range(40):
        draw(folder / f"{number:02d}.png", number)
    label(folder, tmp_path / "undisturbed", shard_size=16)
    reports = tmp_path / "reports"
    reports.mkdir()
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if not killed and progress.done >= 4:
            [pid, *_] = [int(path.stem) for path in reports.iterdir()]
            assert psutil.Process(pid).is_running()
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            (tmp_path / "go on").touch()

    # It has work when it is killed, however late this process comes to that: after 12 images it waits.
    engine = open_simulated(report=reports, hold=(12, tmp_path / "go on"))
    label(folder, tmp_path / "killed", shard_size=16, open_engine=engine, on_progress=kill)
    assert killed
    assert len(list(reports.iterdir())) >= 2
    assert rows(tmp_path / "killed") == rows(tmp_path / "undisturbed")
    assert rows(tmp_path / "killed", "errors") == []
    assert (tmp_path / "killed/instances.json").read_bytes() == (
        tmp_path / "undisturbed/instances.json"
    ).read_bytes()


def test_what_is_left_between_batches_and_files_is_used(tmp_path: Path) -> None:
    """A folder as SIGKILL leaves it: a shard with one of its two files, one with a batch and half of one."""
    folder, out = tmp_path / "pictures", tmp_path / "out"
    paths = [str(draw(folder / f"{number:02d}.png", number)) for number in range(12)]

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        label(folder, out, shard_size=5, on_progress=stop)
    assert json.loads((out / "manifest.json").read_text())["finished"] is False
    # Which batches came before the interrupt is Ray's to choose: what is left is laid out by hand.
    for kind in ("labels", "errors", "unfinished"):
        shutil.rmtree(out / kind, ignore_errors=True)
    alone = Sam3Labeler(["car", "dog"], keep=["image_id", "path"], open_engine=open_simulated())
    expected = alone(pa.table({"image_id": range(1, 13), "path": paths}))
    alone.close()
    first, second, _ = read_plan(out).shards
    left = RunFolder(out, "rle")
    for shard, rows_there in ((first, 5), (second, 2)):
        assert len(left.remaining(shard)) == 5
        left.add(shard, expected.slice(shard.first_id - 1, rows_there))
    left.part("labels", first.number).unlink()  # its errors are in place
    [batch] = (out / "unfinished" / "part-00001").iterdir()
    batch.with_name(".0000000008.parquet.unfinished").write_bytes(b"half")

    assert label(folder, out, shard_size=5).new_images == 10  # but for the second's batch
    assert rows(out) == expected.drop_columns(["error"]).to_pylist()


def test_max_errors_stops_a_run_that_is_mostly_errors(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    for number in range(3):
        draw(folder / f"z{number}.png", number)
    for number in range(20):
        (folder / f"a{number:02d}.png").write_text("no picture")
    with pytest.raises(TooManyErrorsError, match=r"max_errors is 5\b"):
        label(folder, tmp_path / "out", max_errors=5)
    assert json.loads((tmp_path / "out/manifest.json").read_text())["finished"] is False
    summary = label(folder, tmp_path / "out", max_errors=0.9)
    assert (summary.labelled, summary.errors) == (3, 20)


def test_a_broken_device_ends_the_job_with_its_message(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(20):
        Image.new("RGB", (30 + number, 30), BROKEN).save(folder / f"{number}.png")
    with pytest.raises(LabellingError, match=r"8 images in a row failed .* the device says no"):
        label(folder, tmp_path / "out", chips="cpu")


def test_a_chip_that_does_not_open_leaves_the_work_to_the_others(tmp_path: Path) -> None:
    folder, out = tmp_path / "pictures", tmp_path / "out"
    for number in range(40):
        draw(folder / f"{number:02d}.png", number)
    told: list[Progress] = []
    engine = open_some(["1"], out / ".attempts")
    summary = label(folder, out, chips=2, open_engine=engine, on_progress=told.append)
    assert (summary.labelled, summary.errors) == (40, 0)
    [reason] = summary.out_of_order
    assert reason.startswith("chip 1 of ")
    assert reason.endswith(": ChipUnavailableError: chip 1 hangs")
    assert {progress.out for progress in told} == {(reason,)}
    assert f"out of order, the others did its share: {reason}" in _told(summary)
    draw(folder / "more.png", 90)
    draw(folder / "more2.png", 91)
    with pytest.raises(LabellingError, match=r"chip 0 hangs; chip 1 of \S+: .*chip 1 hangs"):
        label(folder, out, chips=2, open_engine=open_some(["0", "1"], out / ".attempts"))
    draw(folder / "more3.png", 92)
    assert label(folder, out, chips=2).labelled == 43  # nothing holds the chips any more
