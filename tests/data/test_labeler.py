"""``Sam3Labeler`` called with batches, without Ray and with it; its schema; errors; duplicates."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from sam3_ray import Sam3
from sam3_ray.data import Sam3Labeler, label_schema
from sam3_ray.data.attempts import Attempts
from sam3_ray.data.columns import rows_of
from sam3_ray.data.labeler import DECODE_BYTES, FAILURES_IN_A_ROW, BrokenModelError
from sam3_ray.images import file_digest
from sam3_ray.masks import polygon_to_mask
from tests.data.conftest import draw
from tests.data.simulated import BROKEN, open_simulated

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROMPTS = ["red circle", "blue star"]


@pytest.fixture(scope="module")
def labeler() -> Iterator[Sam3Labeler]:
    labeler = Sam3Labeler(PROMPTS, repo_id="demo", backend="cpu", num_threads=1)
    yield labeler
    labeler.close()


@pytest.fixture
def simulated() -> Iterator[Sam3Labeler]:
    labeler = Sam3Labeler(PROMPTS, open_engine=open_simulated())
    yield labeler
    labeler.close()


def test_labels_are_what_the_model_finds(labeler: Sam3Labeler) -> None:
    path = EXAMPLES / "playground.png"
    [row] = labeler(pa.table({"path": [str(path)]})).to_pylist()
    with Sam3.from_pretrained("demo", backend="cpu", num_threads=1) as model:
        results = model(path, PROMPTS)
    assert (row["width"], row["height"]) == (960, 640)
    assert row["digest"] == file_digest(path.read_bytes())
    assert row["error"] is None
    assert [one["prompt"] for one in row["presence"]] == PROMPTS
    assert [one["presence"] for one in row["presence"]] == pytest.approx(
        [result.presence for result in results], abs=1e-4
    )
    expected = [
        (result.prompt, result.scores[i], result.boxes[i], result.masks[i])
        for result in results
        for i in range(len(result))
    ]
    assert len(row["instances"]) == len(expected) == 3
    for instance, (prompt, score, box, mask) in zip(row["instances"], expected, strict=True):
        assert instance["prompt"] == prompt
        assert instance["score"] == pytest.approx(float(score), abs=1e-4)
        assert instance["box"] == pytest.approx(box.tolist(), abs=0.1)
        decoded = coco_mask.decode(instance["mask"]).astype(bool)
        assert np.count_nonzero(decoded ^ mask) <= 2
        assert instance["area"] == np.count_nonzero(decoded)


@pytest.mark.parametrize("masks", ["rle", "polygon", "none"])
def test_the_schema_is_the_written_one(masks: str, tmp_path: Path) -> None:
    labeler = Sam3Labeler("car", masks=masks, keep=["n", "path"], open_engine=open_simulated())
    path = str(draw(tmp_path / "a.png", 1))
    batch = pa.table({"path": [path, "gone.png"], "n": pa.array([1, 2], pa.int8()), "x": ["", ""]})
    found = labeler(batch)
    kept = [pa.field("n", pa.int8()), pa.field("path", pa.string())]
    assert found.schema == label_schema(masks, kept)
    assert found.schema.names[2:] == [
        "digest", "width", "height", "error", "presence", "instances",
    ]  # fmt: skip
    instance = found.to_pylist()[0]["instances"][0]
    assert set(instance) == {"prompt", "score", "box", "area"} | (
        set() if masks == "none" else {"mask"}
    )
    if masks == "polygon":
        mask = polygon_to_mask(instance["mask"], 48, 64)
        assert abs(np.count_nonzero(mask) - instance["area"]) < 30
    if masks == "none":
        x0, y0, x1, y1 = instance["box"]
        assert instance["area"] == pytest.approx((x1 - x0) * (y1 - y0))
    labeler.close()


def test_bytes_paths_and_arrays_give_the_same(simulated: Sam3Labeler, tmp_path: Path) -> None:
    path = draw(tmp_path / "a.png", 3)
    pixels = np.asarray(Image.open(path))
    answers = [
        simulated(pa.table({"path": [str(path)]})),
        simulated(pa.table({"bytes": [path.read_bytes()]})),
        simulated({"bytes": np.array([path.read_bytes()], dtype=object)}),
        simulated({"image": pixels[None]}),
        simulated(pa.table({"image": [pixels.tolist()]})),
    ]
    rows = [answer.to_pylist()[0] for answer in answers]
    assert all(row["instances"] == rows[0]["instances"] for row in rows)
    assert rows[0]["digest"] == rows[1]["digest"] == rows[2]["digest"]
    assert "path" in rows[0]
    assert "path" not in rows[1]


def test_a_column_of_prompts(tmp_path: Path) -> None:
    labeler = Sam3Labeler(open_engine=open_simulated(instances=1))
    path = str(draw(tmp_path / "a.png", 1))
    asked = [["car"], ["dog", "cat"], None, [" "]]
    rows = labeler(pa.table({"path": [path] * 4, "prompts": asked})).to_pylist()
    assert [[i["prompt"] for i in row["instances"] or []] for row in rows] == [
        ["car"], ["dog", "cat"], [], [],
    ]  # fmt: skip
    assert [row["error"] and row["error"]["kind"] for row in rows] == [
        None, None, "bad-prompts", "bad-prompts",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no prompts"):
        labeler(pa.table({"path": [path]}))
    labeler.close()


def test_each_bad_image_is_an_error_row_and_costs_the_others_nothing(
    simulated: Sam3Labeler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = draw(tmp_path / "a.png", 1)
    whole = good.read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[:2000])
    (tmp_path / "text.jpg").write_text("no picture")
    draw(tmp_path / "large.png", 2, (100, 100))
    monkeypatch.setenv("SAM3_MAX_IMAGE_PIXELS", "5000")
    device = Image.new("RGB", (30, 30), BROKEN)
    device.save(tmp_path / "device.png")
    names = ["a.png", "cut.png", "text.jpg", "gone.png", "large.png", "device.png", ".", "a.png"]
    paths = [*(str(tmp_path / name) for name in names), None, "s4://nowhere/a.png"]
    rows = simulated(pa.table({"path": paths})).to_pylist()
    assert [row["error"]["kind"] if row["error"] else None for row in rows] == [
        None, "not-an-image", "not-an-image", "not-found", "too-large", "failed", "unreadable", None,
        "no-image", "unreadable",
    ]  # fmt: skip
    for row, path in zip(rows, paths, strict=True):
        if row["error"]:
            assert row["instances"] is None
            assert row["path"] == path
    assert "the device says no" in rows[5]["error"]["message"]
    assert str(tmp_path / "cut.png") in rows[1]["error"]["message"]


def test_a_broken_model_ends_the_job_and_not_every_image(
    simulated: Sam3Labeler, tmp_path: Path
) -> None:
    paths = []
    for number in range(FAILURES_IN_A_ROW + 4):
        picture = Image.new("RGB", (30 + number, 30), BROKEN)
        picture.save(tmp_path / f"{number}.png")
        paths.append(str(tmp_path / f"{number}.png"))
    with pytest.raises(BrokenModelError, match=r"8 images in a row .* the device says no"):
        simulated(pa.table({"path": paths}))


def test_a_picture_that_comes_twice_is_labelled_once(tmp_path: Path) -> None:
    labeler = Sam3Labeler("car", open_engine=open_simulated(report=tmp_path, image_s=0.05))
    one = draw(tmp_path / "one.png", 1)
    (tmp_path / "two.png").write_bytes(one.read_bytes())
    paths = [str(tmp_path / name) for name in ("one.png", "two.png", "one.png")]
    rows = labeler(pa.table({"path": paths})).to_pylist()
    rows += labeler(pa.table({"path": paths})).to_pylist()
    [report] = tmp_path.glob("*.json")
    assert json.loads(report.read_text())["images"] == 1
    assert [row["path"] for row in rows] == paths * 2
    assert all(row["instances"] == rows[0]["instances"] for row in rows)
    labeler.close()


def test_a_batch_is_bounded_in_bytes_whatever_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures larger than the budget are decoded one by one, and none waits decoded for the device."""
    monkeypatch.setattr("sam3_ray.data.labeler.WORK_BYTES", DECODE_BYTES * 64 * 48)
    labeler = Sam3Labeler("car", open_engine=open_simulated(image_s=0.01))
    backend = labeler._engine.backend
    prepare = backend.prepare
    decoded: list[weakref.ref[np.ndarray]] = []
    held: list[int] = []

    def watched(pixels: np.ndarray) -> np.ndarray:
        decoded.append(weakref.ref(pixels))
        held.append(sum(one() is not None for one in decoded))
        return prepare(pixels)

    monkeypatch.setattr(backend, "prepare", watched)
    paths = [str(draw(tmp_path / f"{number}.png", number)) for number in range(16)]
    rows = labeler(pa.table({"path": paths})).to_pylist()
    assert [row["error"] for row in rows] == [None] * 16
    assert held == [1] * 16
    labeler.close()


def test_phrases_are_encoded_once(tmp_path: Path) -> None:
    labeler = Sam3Labeler(PROMPTS, open_engine=open_simulated(report=tmp_path))
    for number in range(3):
        labeler(pa.table({"path": [str(draw(tmp_path / f"{number}.png", number))]}))
    [report] = tmp_path.glob("*.json")
    assert json.loads(report.read_text())["phrases"] == 2
    labeler.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": [f"thing {n}" for n in range(257)]}, "257 prompts"),
        ({"prompts": "car", "threshold": 2.0}, "threshold"),
        ({"prompts": "car", "max_instances": 0}, "max_instances"),
        ({"prompts": "car", "masks": "png"}, "masks must be one of rle, polygon, none"),
        ({"prompts": "car", "keep": ["error"]}, "the label itself has"),
    ],
)
def test_wrong_arguments_fail_at_once(options: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Sam3Labeler(**options, open_engine=open_simulated())  # type: ignore[arg-type]


def test_wrong_batches(simulated: Sam3Labeler) -> None:
    with pytest.raises(ValueError, match="needs a column bytes, path or image"):
        simulated(pa.table({"file": ["a.png"]}))
    with pytest.raises(TypeError, match='batch_format="pyarrow"'):
        simulated(["a.png"])  # type: ignore[arg-type]
    labeler = Sam3Labeler("car", keep=["name"], open_engine=open_simulated())
    with pytest.raises(ValueError, match="keep names name; the columns are path"):
        labeler(pa.table({"path": ["a.png"]}))
    labeler.close()


def test_an_image_at_work_at_two_deaths_is_not_tried_again(tmp_path: Path) -> None:
    """The files say so: nobody has to die for it here (tests/data/test_run.py has the deaths)."""
    folder = tmp_path / "attempts" / "run"
    folder.mkdir(parents=True)
    path = draw(tmp_path / "a.png", 1)
    labeler = Sam3Labeler("car", attempts=folder, open_engine=open_simulated())
    batch = pa.table({"path": [str(path)]})
    assert labeler(batch)["error"][0].as_py() is None
    assert list(folder.iterdir()) == []
    attempts = Attempts(folder)
    [key] = {row.key() for row in rows_of(batch, ())}
    assert key is not None
    stuck = [attempts.at_work(key), attempts.at_work(key)]
    for deaths, work in enumerate(stuck, 1):
        work.__enter__()  # and the process dies
        assert attempts.deaths(key) == deaths
    assert labeler(batch)["error"][0].as_py()["kind"] == "kills-process"
    later = tmp_path / "attempts" / "later"
    later.mkdir()
    assert Attempts(later).deaths(key) == 2
    labeler.close()


def test_map_batches_with_ray(local_ray: None, pictures: Path) -> None:
    import ray.data

    dataset = ray.data.read_binary_files(
        str(pictures), include_paths=True, file_extensions=["png", "jpg"]
    )
    options = Sam3Labeler.options("cpu", size=1, repo_id="demo", batch_size=3)
    assert options["max_restarts"] > 0
    assert options["max_task_retries"] > 0
    assert 0 < options["num_cpus"] < 2  # something is left for who reads
    labelled = dataset.map_batches(
        Sam3Labeler,
        fn_constructor_kwargs={"prompts": PROMPTS, "repo_id": "demo", "backend": "cpu"},
        **options,
    )
    rows = labelled.take_all()
    assert {Path(row["path"]).name for row in rows} == {
        "a0.png", "a1.png", "a2.png", "a3.png", "b4.jpg", "b5.jpg", "b6.jpg", "broken.png", "empty.jpg",
    }  # fmt: skip
    kinds = {Path(row["path"]).name: row["error"] and row["error"]["kind"] for row in rows}
    assert kinds.pop("broken.png") == "not-an-image"
    assert kinds.pop("empty.jpg") == "not-an-image"
    assert set(kinds.values()) == {None}
