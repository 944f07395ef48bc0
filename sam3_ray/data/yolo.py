"""A YOLO segmentation folder: ``data.yaml``, ``images/`` (links to local pictures) and ``labels/``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import batched
from pathlib import Path, PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped]

from sam3_ray.data.files import replace_file
from sam3_ray.data.manifest import Arguments
from sam3_ray.data.polygons import in_one_piece
from sam3_ray.data.reading import is_uri
from sam3_ray.data.rows import label_rows
from sam3_ray.masks import mask_to_polygon, rle_to_mask

THREADS = 4

_LONGEST_STEM, _LONGEST_SUFFIX = 200, 40
"""Bytes: a name may have 255 in a Linux folder, but more in a bucket."""


def write_yolo(
    folder: Path, files: Sequence[Path], arguments: Arguments, paths: Iterable[str]
) -> None:
    """Write a YOLO segmentation data set, whole or not at all.

    A label has a line for each instance: its class, and its outline in one piece, in parts of the image's
    width and height. Without masks it is the class and the box (centre, width, height), as for detection.
    An image without instances has an empty label. Two images of one name get different ones.

    Args:
        folder: of the data set; one that is there is replaced.
        files: labels, in order.
        arguments: of the run.
        paths: of all images, labelled or not.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for name in ("images", "labels"):
        (unfinished / name).mkdir(parents=True)
    names = _names(paths)
    classes = {name: number for number, name in enumerate(arguments.phrases)}

    def write(row: dict[str, Any]) -> None:
        name = names[row["image_id"]]
        lines = "".join(f"{line}\n" for line in _lines(row, classes))
        (unfinished / "labels" / f"{Path(name).stem}.txt").write_text(lines)
        if not is_uri(row["path"]) and os.path.exists(row["path"]):
            (unfinished / "images" / name).symlink_to(row["path"])

    with ThreadPoolExecutor(THREADS) as pool:
        for some in batched(label_rows(files), 8 * THREADS):
            list(pool.map(write, some))
    data = {"path": ".", "train": "images", "val": "images", "names": list(classes)}
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    replace_file(unfinished / "data.yaml", lambda path: path.write_text(text, encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _names(paths: Iterable[str]) -> dict[int, str]:
    """A file name for each image_id; no two have the same stem, which names the label."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    # Where to go on: all rows of a table, and the `0001.png` of many folders, have one stem.
    numbers: dict[str, int] = {}
    for image_id, path in enumerate(paths, 1):
        given = PurePosixPath(path)
        first = stem = given.stem.encode()[:_LONGEST_STEM].decode(errors="ignore")
        while stem in taken:
            numbers[first] = numbers.get(first, 1) + 1
            stem = f"{first}-{numbers[first]}"
        taken.add(stem)
        # Shortened, not left out: the name's own stem is the label's.
        suffix = given.suffix.encode()[:_LONGEST_SUFFIX].decode(errors="ignore")
        names[image_id] = f"{stem}{suffix}"
    return names


def _lines(row: dict[str, Any], classes: dict[str, int]) -> Iterator[str]:
    width, height = row["width"], row["height"]
    for instance in row["instances"]:
        number = classes[instance["prompt"]]
        if "mask" not in instance:
            x0, y0, x1, y1 = instance["box"]
            box = ((x0 + x1) / 2 / width, (y0 + y1) / 2 / height)
            yield _line(number, [*box, (x1 - x0) / width, (y1 - y0) / height])
            continue
        outline = in_one_piece(_rings(instance["mask"]))
        if outline:
            scale = (width, height)
            yield _line(
                number, [min(max(v / scale[i % 2], 0.0), 1.0) for i, v in enumerate(outline)]
            )


def _rings(mask: Any) -> list[list[float]]:
    return mask_to_polygon(rle_to_mask(mask)) if isinstance(mask, dict) else mask


def _line(number: int, values: Sequence[float]) -> str:
    return " ".join([str(number), *(f"{value:.6f}" for value in values)])
