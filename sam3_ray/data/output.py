"""The folder of a run: finished shards, and the batches of those that are not.

A shard is done when both its files are in place, ``errors/part-N.parquet`` and ``labels/part-N.parquet``;
each is renamed there whole. Until then every batch that comes in is a file in ``unfinished/``, so that a run
that is killed has at most the batches at work to do again.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sam3_ray.data.files import replace_file
from sam3_ray.data.plan import Shard
from sam3_ray.data.schema import (
    ERRORS_FILE_SCHEMA,
    PLANNED,
    MaskFormat,
    label_schema,
    labels_file_schema,
)

LABELS = "labels"
ERRORS = "errors"
_UNFINISHED = "unfinished"

ERRORS_TOLD = 3
"""Errors that a person is told of, where there may be thousands."""


class RunFolder:
    """Where a run writes.

    Args:
        folder: it.
        masks: form of the masks, which decides the schema.
    """

    def __init__(self, folder: Path, masks: MaskFormat) -> None:
        self.folder = folder
        self._masks: MaskFormat = masks
        self._schema = label_schema(masks, PLANNED)
        self._images: dict[int, int] = {}

    def part(self, kind: str, number: int) -> Path:
        """The file of a shard: ``kind`` is ``labels`` or ``errors``."""
        return self.folder / kind / f"part-{number:05d}.parquet"

    def is_done(self, shard: Shard) -> bool:
        """Whether both its files are in place."""
        return all(self.part(kind, shard.number).is_file() for kind in (LABELS, ERRORS))

    def remaining(self, shard: Shard) -> list[tuple[int, str]]:
        """(image_id, path) of the images that are in no batch yet."""
        if self.is_done(shard):
            return []
        done = {
            image_id
            for table in self._batches(shard.number, ["image_id"])
            for image_id in table["image_id"].to_pylist()
        }
        self._images[shard.number] = len(done)
        return [(image_id, path) for image_id, path in shard.images() if image_id not in done]

    def add(self, shard: Shard, batch: pa.Table) -> None:
        """Keep a batch of a shard's images; the last one finishes the shard.

        Args:
            shard: whose ``remaining`` has been asked.
            batch: rows of ``label_schema`` with the columns ``PLANNED``.
        """
        self._write_batch(shard.number, pc.min(batch["image_id"]).as_py(), batch)
        self._images[shard.number] += len(batch)
        if self._images[shard.number] == len(shard):
            self.finish(shard)

    def finish(self, shard: Shard) -> None:
        """Write a shard's two files from its batches, sorted by ``image_id``.

        Raises:
            RuntimeError: the batches are not exactly the shard's images.
        """
        table = pa.concat_tables(
            [self._schema.empty_table(), *self._batches(shard.number)]
        ).sort_by("image_id")
        if table["image_id"].to_pylist() != [image_id for image_id, _ in shard.images()]:
            raise RuntimeError(
                f"{self._unfinished(shard.number)} does not hold the images of shard {shard.number}; "
                "delete that folder and run again"
            )
        failed = pc.is_valid(table["error"])
        bad = table.filter(failed)
        errors = pa.table(
            [
                *(bad[field.name] for field in PLANNED),
                *(pc.struct_field(bad["error"], name) for name in ("kind", "message")),
            ],
            schema=ERRORS_FILE_SCHEMA,
        )
        labels = table.filter(pc.invert(failed)).drop_columns(["error"])
        labels = labels.cast(labels_file_schema(self._masks))
        for kind, rows in ((ERRORS, errors), (LABELS, labels)):
            _replace_table(self.part(kind, shard.number), rows, compression="zstd")
        shutil.rmtree(self._unfinished(shard.number), ignore_errors=True)

    def digests(self, shard: Shard) -> dict[int, str | None]:
        """Of the images that are in a file: of the file's bytes that was labelled; None for errors."""
        if self.is_done(shard):
            found = pq.read_table(self.part(LABELS, shard.number), columns=["image_id", "digest"])
            failed = pq.read_table(self.part(ERRORS, shard.number), columns=["image_id"])
            return dict.fromkeys(failed["image_id"].to_pylist()) | _by_id(found)
        digests: dict[int, str | None] = {}
        for batch in self._batches(shard.number, ["image_id", "digest", "error"]):
            digests |= dict.fromkeys(batch["image_id"].to_pylist())
            digests |= _by_id(batch.filter(pc.is_null(batch["error"])))
        return digests

    def take_out(self, shard: Shard, images: set[int]) -> None:
        """Have some images of a shard labelled again. Killed half-way, it may be called again.

        Args:
            shard: whichever files it has.
            images: their ids.
        """
        values = pa.array(images, pa.int64())

        def others(table: pa.Table) -> pa.Table:
            return table.filter(pc.invert(pc.is_in(table["image_id"], values)))

        if not self.is_done(shard):
            for path in self._batch_files(shard.number):
                _replace_table(path, others(pq.read_table(path)))
            return
        labels = pq.read_table(self.part(LABELS, shard.number))
        labels = labels.append_column(
            self._schema.field("error"), pa.nulls(len(labels), self._schema.field("error").type)
        )
        errors = pq.read_table(self.part(ERRORS, shard.number))
        message = pa.StructArray.from_arrays(
            [errors[name].combine_chunks() for name in ("kind", "message")], ["kind", "message"]
        )
        errors = errors.select([field.name for field in PLANNED]).append_column("error", message)
        for field in self._schema:
            if field.name not in errors.schema.names:
                errors = errors.append_column(field, pa.nulls(len(errors), field.type))
        names = self._schema.names
        table = pa.concat_tables([labels.select(names), errors.select(names)])
        shutil.rmtree(self._unfinished(shard.number), ignore_errors=True)
        self._write_batch(shard.number, shard.first_id, others(table))
        for kind in (LABELS, ERRORS):
            self.part(kind, shard.number).unlink(missing_ok=True)

    def clean(self) -> None:
        """Take away what only an unfinished run needs."""
        shutil.rmtree(self.folder / _UNFINISHED, ignore_errors=True)

    def counts(self, shard: Shard) -> tuple[int, int]:
        """(instances, errors) of what there is of a shard."""
        if self.is_done(shard):
            labels = pq.read_table(self.part(LABELS, shard.number), columns=["instances"])
            errors = pq.read_metadata(self.part(ERRORS, shard.number)).num_rows
            return instances_in(labels), errors
        batches = list(self._batches(shard.number, ["instances", "error"]))
        return (
            sum(map(instances_in, batches)),
            sum(len(batch) - batch["error"].null_count for batch in batches),
        )

    def first_errors(self) -> list[str]:
        """What is wrong with the first few images in ``errors/``, as ``failures`` tells it."""
        told: list[str] = []
        for path in sorted((self.folder / ERRORS).glob("part-*.parquet")):
            if len(told) >= ERRORS_TOLD:
                break
            table = pq.read_table(path, columns=["path", "message"])
            told += _told(table["path"], table["message"])
        return told[:ERRORS_TOLD]

    def _unfinished(self, number: int) -> Path:
        return self.folder / _UNFINISHED / f"part-{number:05d}"

    def _write_batch(self, number: int, first: int, batch: pa.Table) -> None:
        """As a file of its own: what is taken out and labelled again must not replace what stayed."""
        batch = batch.cast(self._schema)
        path = self._unfinished(number) / f"{first:010d}-{uuid.uuid4().hex[:8]}.parquet"
        _replace_table(path, batch)

    def _batch_files(self, number: int) -> list[Path]:
        return sorted(self._unfinished(number).glob("[0-9]*.parquet"))

    def _batches(self, number: int, columns: list[str] | None = None) -> Iterator[pa.Table]:
        for path in self._batch_files(number):
            yield pq.read_table(path, columns=columns)


def _replace_table(path: Path, table: pa.Table, **options: Any) -> None:
    replace_file(path, lambda unfinished: pq.write_table(table, unfinished, **options))


def _by_id(table: pa.Table) -> dict[int, str | None]:
    return dict(zip(table["image_id"].to_pylist(), table["digest"].to_pylist(), strict=True))


def instances_in(table: pa.Table) -> int:
    """Instances of all rows."""
    return pc.sum(pc.list_value_length(table["instances"])).as_py() or 0


def failures(batch: pa.Table) -> list[str]:
    """``path: message`` of the first few images of a batch that have none but an error."""
    bad = batch.filter(pc.is_valid(batch["error"]))
    return _told(bad["path"], pc.struct_field(bad["error"], "message"))


def _told(paths: pa.ChunkedArray, messages: pa.ChunkedArray) -> list[str]:
    pairs = zip(paths.slice(0, ERRORS_TOLD), messages.slice(0, ERRORS_TOLD), strict=True)
    told = ((str(path), str(message)) for path, message in pairs)
    return [f"{path}: {message.removeprefix(f'{path}: ')}" for path, message in told]


def label_files(folder: Path) -> list[Path]:
    """The labels of a run, in the order of their images."""
    return sorted((folder / LABELS).glob("part-*.parquet"))
