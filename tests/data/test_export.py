"""COCO, YOLO and polygons, read by others: pycocotools, supervision, and a reader of YOLO lines by Pillow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageDraw
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from sam3_ray.data import Sam3Labeler, yolo
from sam3_ray.data.coco import write_coco
from sam3_ray.data.manifest import Arguments, Manifest
from sam3_ray.data.output import RunFolder, label_files
from sam3_ray.data.plan import Plan
from sam3_ray.data.polygons import in_one_piece, without_holes
from sam3_ray.data.preview import write_preview
from sam3_ray.data.schema import MaskFormat
from sam3_ray.data.stamps import UNKNOWN
from sam3_ray.data.statistics import count_phrases
from sam3_ray.data.yolo import write_yolo
from sam3_ray.masks import mask_to_polygon, mask_to_rle, rle_to_mask
from tests.data.conftest import draw
from tests.data.simulated import open_simulated

PROMPTS = ["car", "traffic light"]


def arguments(source: Path, masks: MaskFormat) -> Arguments:
    return Arguments(str(source), [*PROMPTS], 0.5, 50, masks, 3, "demo", "abc", "cpu", True, 10**8)


@pytest.fixture(scope="module", params=["rle", "polygon"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with labels of 5 pictures in 2 shards, written without Ray; one image is an error."""
    folder = tmp_path_factory.mktemp(request.param)
    for number in range(5):
        draw(
            folder / "in" / ("a" if number % 2 else "b") / f"{number // 2}.png", number, (320, 240)
        )
    (folder / "in" / "broken.png").write_text("no picture")
    paths = sorted(map(str, (folder / "in").rglob("*.png")))
    plan = Plan().grown([(path, UNKNOWN) for path in paths], 3)
    out = folder / "out"
    plan.save(out)
    run = RunFolder(out, request.param)
    labeler = Sam3Labeler(
        PROMPTS,
        masks=request.param,
        keep=["image_id", "path"],
        open_engine=open_simulated(instances=3),
    )
    for shard in plan.shards:
        ids, names = zip(*run.remaining(shard), strict=True)
        run.add(shard, labeler(pa.table({"image_id": ids, "path": names})))
    labeler.close()
    asked = arguments(folder / "in", request.param)
    Manifest(asked, finished=True).save(out)
    write_coco(out / "instances.json", label_files(out), asked, paths)
    write_yolo(out / "yolo", label_files(out), asked, paths)
    return out


def expected_masks(path: Path) -> list[np.ndarray]:
    labeler = Sam3Labeler(PROMPTS, open_engine=open_simulated(instances=3))
    [row] = labeler(pa.table({"path": [str(path)]})).to_pylist()
    labeler.close()
    return [rle_to_mask(instance["mask"]) for instance in row["instances"]]


def iou(one: np.ndarray, other: np.ndarray) -> float:
    return float((one & other).sum() / max((one | other).sum(), 1))


def test_pycocotools_reads_the_coco_file(finished: Path) -> None:
    coco = COCO(str(finished / "instances.json"))
    assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == PROMPTS
    assert coco.getCatIds() == [1, 2]
    assert len(coco.getImgIds()) == 5
    assert coco.dataset["info"]["checkpoint"] == "demo"
    assert coco.dataset["info"]["threshold"] == 0.5
    ids = [one["id"] for one in coco.dataset["annotations"]]
    assert ids == list(range(1, 5 * 6 + 1))
    for image in coco.loadImgs(coco.getImgIds()):
        path = finished.parent / "in" / image["file_name"]
        with Image.open(path) as picture:
            assert picture.size == (image["width"], image["height"])
        found = coco.loadAnns(coco.getAnnIds(imgIds=[image["id"]]))
        for annotation, mask in zip(found, expected_masks(path), strict=True):
            assert iou(coco.annToMask(annotation).astype(bool), mask) > 0.97
            assert annotation["area"] == mask.sum()
            x, y, width, height = annotation["bbox"]
            rows, columns = np.nonzero(mask)
            assert abs(x - columns.min()) < 3
            assert abs(y + height - rows.max()) < 3
            assert width > 0
            assert 0.5 < annotation["score"] <= 1


def test_supervision_reads_coco_and_yolo(finished: Path) -> None:
    import supervision

    images = finished.parent / "in"
    coco = supervision.DetectionDataset.from_coco(
        str(images), str(finished / "instances.json"), force_masks=True
    )
    yolo = supervision.DetectionDataset.from_yolo(
        str(finished / "yolo" / "images"),
        str(finished / "yolo" / "labels"),
        str(finished / "yolo" / "data.yaml"),
        force_masks=True,
    )
    for dataset in (coco, yolo):
        assert [name for name in dataset.classes if name in PROMPTS] == PROMPTS
        assert len(dataset) == 5
        for path, _, detections in dataset:
            assert len(detections) == 6
            for mask, expected in zip(detections.mask, expected_masks(Path(path)), strict=True):
                assert iou(mask, expected) > 0.95


def test_yolo_lines_drawn_by_pillow(finished: Path) -> None:
    names = {path.name for path in (finished / "yolo" / "images").iterdir()}
    assert names == {"0.png", "0-2.png", "1.png", "1-2.png", "2.png"}
    for path in (finished / "yolo" / "images").iterdir():
        lines = (finished / "yolo" / "labels" / f"{path.stem}.txt").read_text().splitlines()
        assert [line.split()[0] for line in lines] == ["0"] * 3 + ["1"] * 3
        for line, expected in zip(lines, expected_masks(path), strict=True):
            points = np.array(line.split()[1:], float).reshape(-1, 2)
            assert (points >= 0).all()
            assert (points <= 1).all()
            assert iou(filled([points * (320, 240)], 240, 320), expected) > 0.95


def test_yolo_names_are_short_and_no_two_are_alike() -> None:
    stem, many = "\N{CAT}" * 300, 200_000
    paths = [f"/folder{number}/0001.png" for number in range(many)]
    paths += [
        "/x/0001-2.png",
        f"s3://b/{stem}.jpg",
        f"s3://b/other/{stem}.jpg",
        "/y/a." + "b" * 250,
    ]
    paths += [f"/z/photo{version}.jpg?id=" + "c" * 60 for version in ("", ".v1", ".v2")]
    names = yolo._names(paths)  # in a blink: each name looks only at what is new
    stems = [Path(name).stem for name in names.values()]
    assert len(set(stems)) == len(paths) == len(names)
    assert all(len(f"{Path(name).stem}.txt".encode()) <= 255 for name in names.values())
    assert all(len(name.encode()) <= 255 for name in names.values())
    assert (names[1], names[2], names[many]) == ("0001.png", "0001-2.png", f"0001-{many}.png")


def filled(polygons: Sequence[np.ndarray], height: int, width: int) -> np.ndarray:
    """The union of polygons as Pillow fills them, four times as large so that its outline costs little."""
    union = np.zeros((height, width), bool)
    for polygon in polygons:
        picture = Image.new("1", (4 * width, 4 * height))
        ImageDraw.Draw(picture).polygon([tuple(point) for point in 4 * polygon - 0.5], fill=1)
        union |= np.asarray(picture.resize((width, height), Image.Resampling.NEAREST))
    return union


def rings_with_holes() -> np.ndarray:
    """Two parts; one has two holes, and an island with a hole in one of them."""
    mask = np.zeros((120, 160), bool)
    mask[10:100, 10:110] = True
    mask[20:80, 20:70] = False
    mask[30:60, 30:60] = True
    mask[40:50, 40:50] = False
    mask[85:95, 80:100] = False
    mask[30:60, 125:150] = True
    return mask


@pytest.mark.parametrize("tolerance", [0.0, 0.7])
def test_holes_survive_in_polygons_that_cannot_have_them(tolerance: float) -> None:
    mask = rings_with_holes()
    rings = mask_to_polygon(mask, tolerance)
    parts = without_holes(rings)
    assert len(rings) == 6
    assert len(parts) == 3  # the frame, the island in it, the other part
    encoded = coco_mask.merge(coco_mask.frPyObjects(parts, 120, 160))
    assert iou(coco_mask.decode(encoded).astype(bool), mask) > 0.95
    whole = coco_mask.frPyObjects([in_one_piece(rings)], 120, 160)
    assert iou(coco_mask.decode(whole[0]).astype(bool), mask) > 0.95
    assert in_one_piece([]) == []


def test_counts(finished: Path) -> None:
    counts, labelled = count_phrases(label_files(finished), [*PROMPTS, "dog"])
    assert labelled == 5
    assert {name: (one.images, one.instances) for name, one in counts.items()} == {
        "car": (5, 15), "traffic light": (5, 15), "dog": (0, 0),
    }  # fmt: skip


def test_a_preview_shows_what_was_labelled_and_says_what_is_gone(finished: Path) -> None:
    gone = finished.parent / "in" / "b" / "1.png"
    data = gone.read_bytes()
    gone.unlink()
    page = write_preview(finished, 50).read_text()
    gone.write_bytes(data)
    assert page.count("<figure") == 5
    assert page.count("data:image/jpeg") == 4
    assert "no such image file" in page
    assert "1 errors" in page
    assert "3 car, 3 traffic light" in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_coco_file_is_small_beside_its_labels(finished: Path) -> None:
    """Ready for JSON, and a mask is what pycocotools itself encodes."""
    content = json.loads((finished / "instances.json").read_text())
    if isinstance(content["annotations"][0]["segmentation"], dict):
        path = finished.parent / "in" / content["images"][0]["file_name"]
        assert content["annotations"][0]["segmentation"] == mask_to_rle(expected_masks(path)[0])
    assert set(content) == {"info", "licenses", "categories", "images", "annotations"}
