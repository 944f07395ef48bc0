"""The plan of a run: which image is in which shard. Made once, then only added to.

An image's id and shard never change, so a run that goes on, or whose source grew, finds what is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sam3_ray.data.files import replace_file
from sam3_ray.data.stamps import UNKNOWN, Stamp

PLAN_FILE = "plan.parquet"
_PLANNED = [("image_id", pa.int64()), ("shard", pa.int32()), ("path", pa.string())]
_STAMPS = [("size", pa.int64()), ("mtime_ns", pa.int64())]
_SCHEMA = pa.schema([*_PLANNED, *_STAMPS])


class PlanError(ValueError):
    """A plan that this version cannot read."""


@dataclass(frozen=True)
class Shard:
    """Images that are written together.

    Attributes:
        number: from 0.
        first_id: ``image_id`` of its first image; the others follow. The first of all is 1.
        paths: of its images.
        stamps: of their files, as they were when they were planned.
    """

    number: int
    first_id: int
    paths: tuple[str, ...]
    stamps: tuple[Stamp, ...]

    def images(self) -> Iterator[tuple[int, str]]:
        """(image_id, path) of each."""
        return enumerate(self.paths, self.first_id)

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class Plan:
    """All shards, in order."""

    shards: tuple[Shard, ...] = ()

    @property
    def images(self) -> int:
        """How many images."""
        return sum(map(len, self.shards))

    def paths(self) -> Iterator[str]:
        """Of all images, in the order of their ids."""
        return (path for shard in self.shards for path in shard.paths)

    def grown(self, inputs: Sequence[tuple[str, Stamp]], shard_size: int) -> Plan:
        """This plan, and new shards for the paths that it lacks. What it has stays where it is."""
        known = set(self.paths())
        shards = list(self.shards)
        first_id = self.images + 1
        for group in batched((one for one in inputs if one[0] not in known), shard_size):
            paths, stamps = zip(*group, strict=True)
            shards.append(Shard(len(shards), first_id, paths, stamps))
            first_id += len(group)
        return Plan(tuple(shards))

    def stamped(self, stamps: Mapping[str, Stamp]) -> Plan:
        """This plan with the files as they are now; what is not told, or not there, stays as planned."""
        return Plan(
            tuple(
                replace(
                    shard,
                    stamps=tuple(
                        stamps.get(path, UNKNOWN).known() or old
                        for path, old in zip(shard.paths, shard.stamps, strict=True)
                    ),
                )
                for shard in self.shards
            )
        )

    def save(self, folder: Path) -> None:
        """Write it into a run's folder, whole or not at all."""
        columns: dict[str, list[object]] = {name: [] for name in _SCHEMA.names}
        for shard in self.shards:
            for (image_id, path), stamp in zip(shard.images(), shard.stamps, strict=True):
                values = (image_id, shard.number, path, *stamp)
                for name, value in zip(_SCHEMA.names, values, strict=True):
                    columns[name].append(value)
        table = pa.table(columns, schema=_SCHEMA)
        replace_file(folder / PLAN_FILE, lambda path: pq.write_table(table, path))


def read_plan(folder: Path) -> Plan:
    """The plan of a run's folder; an empty one where there is none.

    One of a version that kept no stamps is read, with nothing known of the files.

    Raises:
        PlanError: it is no plan of this program.
        OSError: it cannot be read.
    """
    path = folder / PLAN_FILE
    if not path.is_file():
        return Plan()
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise PlanError(f"{path} is no plan of `sam3-ray label`: {error}") from error
    if not set(pa.schema(_PLANNED)) <= set(table.schema):
        raise PlanError(
            f"{path} is no plan of this version of `sam3-ray label`: its columns are "
            f"{', '.join(f'{field.name}: {field.type}' for field in table.schema)}. Go on with the version "
            "that wrote it, or give another folder"
        )
    for name, kind in _STAMPS:
        if name not in table.schema.names:
            table = table.append_column(name, pa.nulls(len(table), kind))
    shards: dict[int, tuple[int, list[str], list[Stamp]]] = {}
    for image_id, number, name, *stamp in zip(
        *(table[c].to_pylist() for c in _SCHEMA.names), strict=True
    ):
        _, paths, stamps = shards.setdefault(number, (image_id, [], []))
        paths.append(name)
        stamps.append(Stamp(*stamp))
    return Plan(
        tuple(
            Shard(number, first, tuple(paths), tuple(stamps))
            for number, (first, paths, stamps) in shards.items()
        )
    )
