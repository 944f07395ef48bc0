"""The columns of a batch: what goes through, and each row's image and phrases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from sam3_ray.prompt import Prompt

INPUT_COLUMNS = ("bytes", "path", "image")
"""Where a row's image is looked for, in this order."""

type Batch = pa.Table | Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        column: of ``INPUT_COLUMNS``.
        value: what that column has.
        path: the row's path, where there is such a column.
        prompts: its phrases, as they were given.
    """

    column: str
    value: Any
    path: Any
    prompts: Any

    def key(self) -> str | None:
        """A name for its image that needs no decoding; None where there is none."""
        if isinstance(self.path, str):
            return xxhash.xxh3_128_hexdigest(self.path.encode())
        return xxhash.xxh3_128_hexdigest(self.value) if isinstance(self.value, bytes) else None


def kept_columns(batch: Batch, keep: Sequence[str] | None) -> pa.Table:
    """The columns that go through.

    Args:
        batch: a table, or a dict of arrays.
        keep: their names; None: ``path``, where there is one.

    Raises:
        ValueError: a name that is not there.
        TypeError: a batch of another format.
    """
    names = _names(batch)
    if keep is None:
        keep = [name for name in ("path",) if name in names]
    missing = sorted(set(keep) - set(names))
    if missing:
        raise ValueError(f"keep names {', '.join(missing)}; the columns are {', '.join(names)}")
    if isinstance(batch, pa.Table):
        return batch.select(list(keep))
    if not keep:
        return pa.table({})
    from ray.data.block import BlockAccessor

    return BlockAccessor.batch_to_block({name: batch[name] for name in keep}, None)


def rows_of(batch: Batch, prompts: tuple[Prompt, ...] | None) -> list[Row]:
    """The rows of a batch.

    Args:
        batch: a table, or a dict of arrays.
        prompts: of every row; None: a column has them.

    Raises:
        ValueError: no column has images, or none has phrases.
        TypeError: a batch of another format.
    """
    names = _names(batch)
    column = next((name for name in INPUT_COLUMNS if name in names), None)
    if column is None:
        raise ValueError(
            f"a batch needs a column {', '.join(INPUT_COLUMNS[:-1])} or {INPUT_COLUMNS[-1]} with its "
            f"images; it has {', '.join(names) or 'none'}"
        )
    values = _values(batch, column)
    paths = _values(batch, "path") if "path" in names else [None] * len(values)
    asked: Sequence[Any]
    if prompts is not None:
        asked = [prompts] * len(values)
    elif "prompts" in names:
        asked = [_listed(cell) for cell in _values(batch, "prompts")]
    else:
        raise ValueError(
            "no prompts: give Sam3Labeler a list of phrases, or each row a column `prompts`"
        )
    return [
        Row(column, value, path, phrases)
        for value, path, phrases in zip(values, paths, asked, strict=True)
    ]


def _names(batch: object) -> list[str]:
    if isinstance(batch, pa.Table):
        names: list[str] = batch.column_names
        return names
    if isinstance(batch, Mapping):
        return list(batch)
    raise TypeError(
        f"a batch is a pyarrow.Table or a dict of arrays, got a {type(batch).__name__}: call map_batches "
        'with batch_format="pyarrow"'
    )


def _values(batch: Batch, name: str) -> Sequence[Any]:
    """A column's values; those of a column of arrays are arrays."""
    if not isinstance(batch, pa.Table):
        return list(batch[name])
    column = batch[name]
    if isinstance(column.type, pa.ExtensionType):
        from ray.data.block import BlockAccessor

        return list(BlockAccessor.for_block(batch.select([name])).to_numpy(name))
    values: list[Any] = column.to_pylist()
    if name == "image":  # nested lists
        return [None if value is None else np.asarray(value, np.uint8) for value in values]
    return values


def _listed(cell: Any) -> Any:
    """A cell of a column of phrases."""
    return cell.tolist() if isinstance(cell, np.ndarray) else cell
