"""Counts over the labels of a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


@dataclass(frozen=True)
class PhraseCount:
    """How often a phrase was found.

    Attributes:
        images: that have an instance of it.
        instances: of all images.
    """

    images: int = 0
    instances: int = 0


def count_phrases(
    files: Iterable[Path], phrases: Sequence[str]
) -> tuple[dict[str, PhraseCount], int]:
    """Counts for each phrase, and the number of images that have a label. Masks are not read."""
    images: Counter[str] = Counter()
    instances: Counter[str] = Counter()
    labelled = 0
    for path in files:
        with pq.ParquetFile(path) as file:
            column = file.read(columns=["instances.list.element.prompt"])["instances"]
        labelled += len(column)
        for chunk in column.chunks:
            rows = pc.list_parent_indices(chunk)
            prompts = pc.struct_field(pc.list_flatten(chunk), 0)
            pairs = pa.table({"row": rows, "prompt": prompts})
            instances.update(_counted(pairs["prompt"]))
            images.update(_counted(pairs.group_by(["row", "prompt"]).aggregate([])["prompt"]))
    return {one: PhraseCount(images[one], instances[one]) for one in phrases}, labelled


def _counted(values: pa.ChunkedArray) -> dict[str, int]:
    return {one["values"]: one["counts"] for one in pc.value_counts(values).to_pylist()}
