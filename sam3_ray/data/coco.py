"""``instances.json``: the labels as a COCO data set, written as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from sam3_ray import __version__
from sam3_ray.data.files import replace_file
from sam3_ray.data.manifest import Arguments
from sam3_ray.data.polygons import without_holes
from sam3_ray.data.rows import label_rows
from sam3_ray.data.sources import common_root, short_name


def write_coco(
    path: Path, files: Sequence[Path], arguments: Arguments, paths: Iterable[str]
) -> None:
    """Write a COCO file; what is held in memory does not grow with it.

    ``file_name`` is told from the source's folder, else from the folder that all images share. Ids of images
    are ``image_id``, those of annotations count from 1, categories are the prompts from 1 in their order. An
    annotation has its ``score`` too. A mask is compressed RLE, or polygons whose holes are cut open.

    Args:
        path: of the file.
        files: labels, in order.
        arguments: of the run.
        paths: of all images, labelled or not.
    """
    root = common_root(arguments.source, paths)
    categories = {name: number for number, name in enumerate(arguments.phrases, 1)}
    head = {
        "info": {
            "description": f"Labels of sam3_ray {__version__}",
            "version": __version__,
            "contributor": "sam3_ray",
            "checkpoint": arguments.checkpoint,
            "checkpoint_hash": arguments.checkpoint_hash,
            "threshold": arguments.threshold,
            "max_instances": arguments.max_instances,
            "prompts": arguments.prompts,
        },
        "licenses": [],
        "categories": [
            {"id": number, "name": name, "supercategory": ""} for name, number in categories.items()
        ],
    }

    def write(unfinished: Path) -> None:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(_json(head)[:-1])
            _write_list(file, "images", _images(files, root))
            _write_list(file, "annotations", _annotations(files, categories))
            file.write("}\n")

    replace_file(path, write)


def _write_list(file: IO[str], name: str, entries: Iterator[dict[str, Any]]) -> None:
    file.write(f',\n"{name}":[')
    separator = "\n"
    for entry in entries:
        file.write(separator)
        file.write(_json(entry))
        separator = ",\n"
    file.write("]")


def _images(files: Sequence[Path], root: str) -> Iterator[dict[str, Any]]:
    for row in label_rows(files, ["image_id", "path", "width", "height"]):
        yield {
            "id": row["image_id"],
            "file_name": short_name(row["path"], root),
            "width": row["width"],
            "height": row["height"],
        }


def _annotations(files: Sequence[Path], categories: dict[str, int]) -> Iterator[dict[str, Any]]:
    number = 0
    for row in label_rows(files, ["image_id", "instances"]):
        for instance in row["instances"]:
            number += 1
            x0, y0, x1, y1 = instance["box"]
            entry = {
                "id": number,
                "image_id": row["image_id"],
                "category_id": categories[instance["prompt"]],
                "bbox": [_short(x0), _short(y0), _short(x1 - x0), _short(y1 - y0)],
                "area": _short(instance["area"]),
                "iscrowd": 0,
                "score": round(instance["score"], 4),
            }
            mask = instance.get("mask")
            if isinstance(mask, dict):
                entry["segmentation"] = mask
            elif mask is not None:
                entry["segmentation"] = [list(map(_short, ring)) for ring in without_holes(mask)]
            yield entry


def _short(value: float) -> float:
    """Two decimals, and no point where there is nothing behind it."""
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded


_json: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False
).encode
