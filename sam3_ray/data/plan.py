"""The plan of a run: which image is in which shard. Made once, then only added to.

An image's id and shard never change, so a run that goes on, or whose source grew, finds what is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sam3_ray.data.files import replace_file

PLAN_FILE = "plan.parquet"
_SCHEMA = pa.schema([("image_id", pa.int64()), ("shard", pa.int32()), ("path", pa.string())])


@dataclass(frozen=True)
class Shard:
    """Images that are written together.

    Attributes:
        number: from 0.
        first_id: ``image_id`` of its first image; the others follow. The first of all is 1.
        paths: of its images.
    """

    number: int
    first_id: int
    paths: tuple[str, ...]

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

    def grown(self, paths: Sequence[str], shard_size: int) -> Plan:
        """This plan, and new shards for the paths that it lacks. What it has stays where it is."""
        known = set(self.paths())
        shards = list(self.shards)
        first_id = self.images + 1
        for group in batched((path for path in paths if path not in known), shard_size):
            shards.append(Shard(len(shards), first_id, group))
            first_id += len(group)
        return Plan(tuple(shards))

    def save(self, folder: Path) -> None:
        """Write it into a run's folder, whole or not at all."""
        columns: dict[str, list[object]] = {name: [] for name in _SCHEMA.names}
        for shard in self.shards:
            for image_id, path in shard.images():
                columns["image_id"].append(image_id)
                columns["shard"].append(shard.number)
                columns["path"].append(path)
        table = pa.table(columns, schema=_SCHEMA)
        replace_file(folder / PLAN_FILE, lambda path: pq.write_table(table, path))


def read_plan(folder: Path) -> Plan:
    """The plan of a run's folder; an empty one where there is none.

    Raises:
        OSError, pyarrow.ArrowException: it cannot be read.
    """
    path = folder / PLAN_FILE
    if not path.is_file():
        return Plan()
    table = pq.read_table(path)
    shards: dict[int, tuple[int, list[str]]] = {}
    for image_id, number, name in zip(*(table[c].to_pylist() for c in _SCHEMA.names), strict=True):
        shards.setdefault(number, (image_id, []))[1].append(name)
    return Plan(tuple(Shard(n, first, tuple(paths)) for n, (first, paths) in shards.items()))
