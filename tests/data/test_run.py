"""``label_images`` in this process, on a real Ray with simulated chips: files, resume, deaths, bounds."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sam3_ray.data import LabelSummary, Progress, Sam3Labeler, label_images
from sam3_ray.data.files import FolderInUseError, only_run_in
from sam3_ray.data.manifest import ArgumentsDifferError, ManifestError
from sam3_ray.data.output import RunFolder
from sam3_ray.data.plan import read_plan
from sam3_ray.data.progress import TooManyErrorsError
from sam3_ray.data.run import LabellingError
from sam3_ray.data.schema import ERRORS_FILE_SCHEMA, labels_file_schema
from sam3_ray.data.sources import SourceError
from tests.data.conftest import draw
from tests.data.simulated import BROKEN, DEADLY, open_simulated

pytestmark = pytest.mark.usefixtures("local_ray")


def label(source: Path, out: Path, **options: Any) -> LabelSummary:
    given = {"chips": "cpu", "open_engine": open_simulated(), "max_errors": None, **options}
    return label_images(source, given.pop("prompts", ["car", "dog"]), out, **given)


def rows(folder: Path, kind: str = "labels") -> list[dict[str, Any]]:
    return [
        row for path in sorted((folder / kind).iterdir()) for row in pq.read_table(path).to_pylist()
    ]


def test_every_image_ends_in_exactly_one_of_labels_and_errors(
    pictures: Path, tmp_path: Path
) -> None:
    told: list[Progress] = []
    summary = label(pictures, tmp_path / "out", shard_size=4, on_progress=told.append)
    labels, errors = rows(tmp_path / "out"), rows(tmp_path / "out", "errors")
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
    assert len(list((tmp_path / "out" / "labels").iterdir())) == 3  # of 4, 4 and 1
    for path in (tmp_path / "out").rglob("labels/*.parquet"):
        assert pq.read_schema(path).equals(labels_file_schema("rle"))
    for path in (tmp_path / "out").rglob("errors/*.parquet"):
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
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["finished"] is True
    assert manifest["counts"] == {"images": 9, "labelled": 7, "errors": 2, "instances": 28}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".lock", "errors", "instances.json", "labels", "manifest.json", "plan.parquet",
    }  # fmt: skip


def test_a_source_that_grew_and_the_same_again(pictures: Path, tmp_path: Path) -> None:
    out = pictures / "labels"  # inside of the source
    label(pictures, out, shard_size=4)
    before = {path: path.stat().st_mtime_ns for path in (out / "labels").iterdir()}
    new = draw(pictures / "a0-and-a-half.png", 50)  # sorts between what is there
    summary = label(pictures, out, shard_size=4, formats=["coco", "yolo"])
    assert (summary.images, summary.new_images) == (10, 1)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert rows(out)[-1]["path"] == str(new)
    assert rows(out)[-1]["image_id"] == 10
    again = label(pictures, out, shard_size=4)
    assert (again.images, again.new_images) == (10, 0)


def test_other_arguments_in_the_same_folder(pictures: Path, tmp_path: Path) -> None:
    label(pictures, tmp_path / "out", shard_size=4)  # the only one of these that starts actors
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

    # Slow, so that it has work when it is killed, however late this process comes to that.
    engine = open_simulated(image_s=0.4, report=reports)
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
