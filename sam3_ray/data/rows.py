"""The labels of a finished folder, read a few at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROWS_AT_A_TIME = 32
"""An image's labels may be a megabyte as Python objects."""


def label_rows(
    files: Iterable[Path], columns: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Each row of label files, in order, as plain values.

    Args:
        files: of ``output.label_files``.
        columns: those that are wanted; None: all.
    """
    for path in files:
        with pq.ParquetFile(path) as file:
            names = None if columns is None else list(columns)
            for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME, columns=names):
                yield from batch.to_pylist()
