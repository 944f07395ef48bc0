"""What a source has, and the bytes of each input."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sam3_ray.data.plan import Plan, PlanError, read_plan
from sam3_ray.data.reading import read_input
from sam3_ray.data.sources import SourceError, common_root, list_inputs, short_name
from sam3_ray.data.stamps import GONE, UNKNOWN, Stamp
from tests.data.conftest import draw


def test_a_folder_has_its_pictures_and_nothing_hidden(pictures: Path) -> None:
    draw(pictures / "out" / "images" / "own.png", 60)
    draw(pictures / "UPPER.JPG", 61)
    found = list_inputs(pictures, exclude=pictures / "out")
    names = [os.path.relpath(path, pictures) for path in found.stamps]
    assert names == [
        "UPPER.JPG", "a0.png", "a1.png", "a2.png", "a3.png", "broken.png", "empty.jpg",
        "more/b4.jpg", "more/b5.jpg", "more/b6.jpg",
    ]  # fmt: skip
    assert found.other_files == 1
    assert all(os.path.isabs(path) for path in found.stamps)


def test_lists_globs_uris_and_one_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [draw(tmp_path / "in" / f"{number}.png", number) for number in range(3)]
    lines = ["in/1.png", "", str(paths[1]), f"file://{paths[2]}", "gone.png"]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    expected = {
        "list.txt": [f"{tmp_path}/gone.png", str(paths[1]), f"file://{paths[2]}"],
        "in/[12].png": [str(paths[1]), str(paths[2])],
        f"file://{tmp_path}/in": [f"file://{path}" for path in paths],
        f"file://{tmp_path}/in/*[01].png": [f"file://{path}" for path in paths[:2]],
        f"local://{tmp_path}/in": [f"local://{path}" for path in paths],  # fsspec's
        "in/0.png": [str(paths[0])],
    }
    for source, found in expected.items():
        assert list(list_inputs(source).stamps) == found
        for path in found:
            if "gone" not in path:
                assert read_input(path) == (tmp_path / "in" / Path(path).name).read_bytes()


@pytest.mark.parametrize("source", ["in/**/*.png", "in", "file://{}/in", "file://{}/in/*.png"])
def test_the_output_of_a_run_is_never_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    picture = draw(tmp_path / "in" / "0.png", 0)
    out = tmp_path / "in" / "out"
    draw(out / "sheet.png", 1)
    (out / "yolo").mkdir()
    (out / "yolo" / "link.png").symlink_to(picture)
    monkeypatch.chdir(tmp_path)
    found = list_inputs(source.format(tmp_path), exclude=Path("in/out")).stamps
    assert [path.removeprefix("file://") for path in found] == [str(picture)]


@pytest.mark.parametrize("source", ["in", "in/*.png", "file://{}/in", "file://{}/in/*.png"])
@pytest.mark.parametrize("out", ["in", "."])
def test_a_source_may_lie_in_the_folder_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, out: str
) -> None:
    picture = draw(tmp_path / "in" / "0.png", 0)
    monkeypatch.chdir(tmp_path)
    found = list_inputs(source.format(tmp_path), exclude=Path(out)).stamps
    assert [path.removeprefix("file://") for path in found] == [str(picture)]


def test_lists_as_other_programs_write_them(tmp_path: Path) -> None:
    """With Windows' line ends and its mark at the beginning, and with names that Unicode would break."""
    names = ["a b.png", "line\u2028end.png", "next\x85line.png", "\xa0blank.png"]
    text = "\r\n".join(f"{tmp_path}/{name}" for name in names)
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n\r\n")
    found = list_inputs(tmp_path / "list.txt").stamps
    assert set(found) == {f"{tmp_path}/{name}" for name in names}


def test_a_table_that_changes_is_read_anew_every_time(tmp_path: Path) -> None:
    table = tmp_path / "t.parquet"
    for round_number in range(3):
        values = [b"%d of %d" % (row, round_number) for row in range(3 + round_number)]
        pq.write_table(pa.table({"bytes": values}), table, row_group_size=2)
        os.utime(table, ns=(round_number, round_number))  # though the clock may be too coarse
        rows = list_inputs(table).stamps
        assert [read_input(row) for row in rows] == values


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_tables(tmp_path: Path, prefix: str) -> None:
    paths = [draw(tmp_path / f"{number}.png", number) for number in range(5)]
    table = pa.table({"bytes": [path.read_bytes() for path in paths], "n": range(5)})
    pq.write_table(table, tmp_path / "bytes.parquet", row_group_size=2)
    pq.write_table(pa.table({"path": [str(p) for p in paths]}), tmp_path / "path.parquet")
    rows = list(list_inputs(f"{prefix}{tmp_path}/bytes.parquet").stamps)
    assert len(rows) == 5
    for order in (rows, reversed(rows)):
        assert {read_input(row) for row in order} == {path.read_bytes() for path in paths}
    assert [read_input(row) for row in rows] == [path.read_bytes() for path in paths]
    assert list(list_inputs(f"{prefix}{tmp_path}/path.parquet").stamps) == [str(p) for p in paths]
    with pytest.raises(FileNotFoundError, match="has 5 rows, no row 7"):
        read_input(rows[0][:-1] + "7")


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("gone", "is not there"),
        ("empty", r"nothing to label \(1 other files\)"),
        ("t.parquet", "neither a column `path` nor `bytes`, but n"),
        ("null.parquet", "a path is None"),
        ("broken.parquet", "cannot be read"),
        ("*.jpg", "nothing to label"),
        ("s4://bucket/a", "no file system is known for s4://"),
        ("file:///nowhere/at/all", "is not there"),
        ("", "the source is empty"),
    ],
)
def test_sources_that_cannot_be_used(tmp_path: Path, source: str, match: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    pq.write_table(pa.table({"n": [1]}), tmp_path / "t.parquet")
    pq.write_table(pa.table({"path": ["a.png", None]}), tmp_path / "null.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    given = source if "://" in source or not source else str(tmp_path / source)
    with pytest.raises(SourceError, match=match):
        list_inputs(given)


def test_names_of_images_are_told_from_the_root(tmp_path: Path) -> None:
    paths = ["/data/a/1.png", "/data/a/b/2.png", "/data/ab/3.png"]
    assert common_root("list.txt", paths) == "/data"
    assert common_root(str(tmp_path), paths) == str(tmp_path)
    assert common_root("s3://b", ["s3://b/a/1.png", "s3://b/a/c/2.png"]) == "s3://b/a"
    assert common_root("list.txt", ["s3://a/1.png", "s3://b/2.png"]) == ""
    assert common_root("list.txt", ["s3://a/1.png", "/data/2.png"]) == ""
    assert short_name("/data/a/b/2.png", "/data") == "a/b/2.png"
    assert short_name("/data2/2.png", "/data") == "/data2/2.png"


def stamped(names: str) -> list[tuple[str, Stamp]]:
    return [(name, Stamp(ord(name), None)) for name in names]


def test_a_plan_only_grows(tmp_path: Path) -> None:
    plan = Plan().grown(stamped("bdf"), 2)
    assert [list(shard.images()) for shard in plan.shards] == [[(1, "b"), (2, "d")], [(3, "f")]]
    plan.save(tmp_path)
    assert read_plan(tmp_path) == plan
    grown = read_plan(tmp_path).grown(stamped("abcd"), 2)
    assert grown.shards[:2] == plan.shards
    assert [list(shard.images()) for shard in grown.shards[2:]] == [[(4, "a"), (5, "c")]]
    assert grown.grown(stamped("af"), 2) == grown
    assert read_plan(tmp_path / "nowhere") == Plan()


def test_a_plan_learns_of_files_and_forgets_none(tmp_path: Path) -> None:
    plan = Plan().grown(stamped("bdf"), 2)
    now = plan.stamped({"b": Stamp(5, 6), "d": Stamp(GONE, None), "z": Stamp(1, 1)})
    assert [stamp for shard in now.shards for stamp in shard.stamps] == [
        Stamp(5, 6), Stamp(ord("d"), None), Stamp(ord("f"), None),
    ]  # fmt: skip


def test_plans_of_other_versions(tmp_path: Path) -> None:
    """The first ones had no stamps, and are read; what is no plan is refused by name."""
    Plan().grown(stamped("bdf"), 2).save(tmp_path)
    whole = pq.read_table(tmp_path / "plan.parquet")
    pq.write_table(whole.drop_columns(["size", "mtime_ns"]), tmp_path / "plan.parquet")
    old = read_plan(tmp_path)
    assert list(old.paths()) == ["b", "d", "f"]
    assert {stamp for shard in old.shards for stamp in shard.stamps} == {UNKNOWN}
    pq.write_table(whole.drop_columns(["shard"]), tmp_path / "plan.parquet")
    with pytest.raises(
        PlanError, match=r"plan\.parquet is no plan of this version .* image_id: int64"
    ):
        read_plan(tmp_path)
    (tmp_path / "plan.parquet").write_bytes(b"PAR1")
    with pytest.raises(PlanError, match=r"plan\.parquet is no plan of"):
        read_plan(tmp_path)
