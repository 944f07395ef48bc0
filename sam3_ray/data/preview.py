"""A contact sheet of labels: one HTML file with the pictures in it, which opens without a network."""

from __future__ import annotations

import base64
import html
import io
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from sam3_ray.data.files import replace_file
from sam3_ray.data.manifest import Manifest, read_manifest
from sam3_ray.data.output import ERRORS, label_files
from sam3_ray.data.reading import read_input
from sam3_ray.data.rows import label_rows
from sam3_ray.data.sources import short_name
from sam3_ray.data.statistics import PhraseCount, count_phrases
from sam3_ray.images import ImageSource
from sam3_ray.masks import polygon_to_mask, rle_to_mask
from sam3_ray.overlay import PALETTE, draw_overlay
from sam3_ray.result import Sam3Result

PREVIEW_FILE = "preview.html"
LONG_SIDE = 640
"""Pixels of a picture on the sheet: 50 of them are about 4 MB."""

SHOWN_ERRORS = 20
_PAGE = Path(__file__).with_name("preview.html")


@dataclass(frozen=True)
class _Figure:
    """One picture of the sheet."""

    name: str
    jpeg: bytes | None
    counts: dict[str, int]
    problem: str | None = None


def write_preview(folder: Path, count: int = 50) -> Path:
    """Write ``preview.html`` into a folder of labels.

    Args:
        folder: that ``label_images`` wrote, finished or not.
        count: pictures, spread evenly over all that have a label.

    Returns:
        The file.

    Raises:
        FileNotFoundError: the folder has no labels.
        ValueError: a count below 1, or a manifest that is none.
    """
    if count < 1:
        raise ValueError(f"a preview has at least 1 picture, got {count}")
    manifest = read_manifest(folder)
    files = label_files(folder)
    if manifest is None or not files:
        raise FileNotFoundError(f"{folder} has no labels: `sam3-ray label` writes them there")
    phrases = manifest.arguments.phrases
    counts, labelled = count_phrases(files, phrases)
    colors = {phrase: PALETTE[n % len(PALETTE)] for n, phrase in enumerate(phrases)}
    figures = (_figure(row, colors, manifest) for row in _spread(files, labelled, count))
    page = Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=html.escape(f"Labels of {posixpath.basename(manifest.arguments.source)}"),
        about=html.escape(_about(manifest, labelled)),
        classes="\n".join(_class(phrase, counts[phrase], colors[phrase]) for phrase in phrases),
        figures="\n".join(map(_html, figures)),
        errors=_errors(folder, manifest),
    )
    path = folder / PREVIEW_FILE
    replace_file(path, lambda unfinished: unfinished.write_text(page, encoding="utf-8"))
    return path


def _spread(files: Sequence[Path], labelled: int, count: int) -> Iterator[dict[str, Any]]:
    """So many rows, evenly over all; files that have none of them are not read."""
    wanted = sorted(
        {(2 * n + 1) * labelled // (2 * count) for n in range(count)} if labelled else ()
    )
    start = 0
    for path in files:
        rows = pq.read_metadata(path).num_rows
        here = {row - start for row in wanted if start <= row < start + rows}
        if here:
            yield from (row for n, row in enumerate(label_rows([path])) if n in here)
        start += rows


def _figure(row: dict[str, Any], colors: dict[str, str], manifest: Manifest) -> _Figure:
    counts: dict[str, int] = {}
    for instance in row["instances"]:
        counts[instance["prompt"]] = counts.get(instance["prompt"], 0) + 1
    name = short_name(row["path"], manifest.arguments.source)
    try:
        pixels = ImageSource.from_file(read_input(row["path"]), row["path"]).pixels()
    except (ValueError, OSError) as error:  # gone, or changed, since it was labelled
        return _Figure(name, None, counts, str(error))
    if pixels.shape[:2] != (row["height"], row["width"]):
        return _Figure(name, None, counts, "the file is not the one that was labelled")
    scale = min(1.0, LONG_SIDE / max(row["width"], row["height"]))
    size = (max(1, round(row["width"] * scale)), max(1, round(row["height"] * scale)))
    picture = Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)
    drawn = draw_overlay(
        picture,
        [_result(row, phrase, size) for phrase in colors],
        list(colors.values()),
    )
    buffer = io.BytesIO()
    drawn.save(buffer, "JPEG", quality=82)
    return _Figure(name, buffer.getvalue(), counts)


def _result(row: dict[str, Any], phrase: str, size: tuple[int, int]) -> Sam3Result:
    """The instances of a phrase, as of the smaller picture."""
    found = [instance for instance in row["instances"] if instance["prompt"] == phrase]
    across, down = size[0] / row["width"], size[1] / row["height"]
    boxes = np.array([one["box"] for one in found], np.float32).reshape(-1, 4)
    masks = None
    if all("mask" in one for one in found):
        masks = np.zeros((len(found), size[1], size[0]), np.bool_)
        for mask, one in zip(masks, found, strict=True):
            mask[:] = _small_mask(one["mask"], row, size)
    return Sam3Result(
        prompt=phrase,
        scores=np.array([one["score"] for one in found], np.float32),
        boxes=boxes * np.array([across, down, across, down], np.float32),
        masks=masks,
        presence=0.0,
        width=size[0],
        height=size[1],
    )


def _small_mask(mask: Any, row: dict[str, Any], size: tuple[int, int]) -> np.ndarray[Any, Any]:
    if isinstance(mask, dict):
        whole = rle_to_mask(mask)
    else:
        whole = polygon_to_mask(mask, row["height"], row["width"])
    return np.asarray(Image.fromarray(whole).resize(size, Image.Resampling.NEAREST))


# -- HTML ------------------------------------------------------------------------------------------


def _about(manifest: Manifest, labelled: int) -> str:
    arguments = manifest.arguments
    state = "" if manifest.finished else " (not finished)"
    return (
        f"{labelled} images{state}, labelled with {arguments.checkpoint}, threshold {arguments.threshold:g}, "
        f"by sam3_ray {manifest.version}"
    )


def _class(phrase: str, count: PhraseCount, color: str) -> str:
    return (
        f'<tr><td><label><input type="checkbox" checked data-class="{html.escape(phrase)}"> '
        f'<i style="background:{color}"></i>{html.escape(phrase)}</label></td>'
        f"<td>{count.instances}</td><td>{count.images}</td></tr>"
    )


def _html(figure: _Figure) -> str:
    name = html.escape(figure.name)
    told = ", ".join(f"{count} {phrase}" for phrase, count in figure.counts.items()) or "nothing"
    if figure.jpeg is None:
        picture = f"<p>{html.escape(figure.problem or '')}</p>"
    else:
        data = base64.b64encode(figure.jpeg).decode()
        picture = f'<img alt="{name}" src="data:image/jpeg;base64,{data}">'
    found = html.escape("\n".join(figure.counts))
    return (
        f'<figure data-found="{found}">{picture}'
        f"<figcaption><b>{name}</b> {html.escape(told)}</figcaption></figure>"
    )


def _errors(folder: Path, manifest: Manifest) -> str:
    total = 0
    shown: list[dict[str, Any]] = []
    for path in sorted((folder / ERRORS).glob("part-*.parquet")):
        table = pq.read_table(path)
        total += len(table)
        shown += table.slice(0, SHOWN_ERRORS - len(shown)).to_pylist()
    if not total:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(short_name(row['path'], manifest.arguments.source))}</td>"
        f"<td>{html.escape(row['kind'])}</td><td>{html.escape(row['message'])}</td></tr>"
        for row in shown
    )
    more = f" (the first {len(shown)})" if total > len(shown) else ""
    return (
        f"<h2>{total} errors{more}</h2><table class=wide><tr><th>image</th><th>kind</th><th>message</th>"
        f"</tr>{rows}</table>"
    )
