"""Pictures that have changed under the same path since they were labelled: they are labelled again."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from sam3_ray.data.output import RunFolder
from sam3_ray.data.plan import Plan, Shard
from sam3_ray.data.reading import read_input
from sam3_ray.data.stamps import UNKNOWN, Stamp
from sam3_ray.images import file_digest

_READERS = 8
"""Files that are read at a time to be compared: more than CPUs, for remote ones take their time."""


def take_out_changed(run: RunFolder, plan: Plan, stamps: Mapping[str, Stamp]) -> int:
    """Have what has changed labelled again.

    A file with another size or time than the plan has is read, and its digest compared with the label's: one
    that was only touched or copied stays as it is. An image that was an error is tried again. What is gone,
    cannot be read, or was never looked at, stays as it is.

    Args:
        run: where it was labelled.
        plan: with the files as they were.
        stamps: of the files as they are.

    Returns:
        How many images.
    """
    changed = 0
    for shard in plan.shards:
        suspects = _suspects(shard, stamps)
        if not suspects:
            continue
        digests = run.digests(shard)
        done = {image_id: path for image_id, path in suspects.items() if image_id in digests}
        with ThreadPoolExecutor(_READERS) as pool:
            now = dict(zip(done, pool.map(_digest, done.values()), strict=True))
        again = {n for n, digest in now.items() if digest is not None and digest != digests[n]}
        if again:
            run.take_out(shard, again)
            changed += len(again)
    return changed


def _suspects(shard: Shard, stamps: Mapping[str, Stamp]) -> dict[int, str]:
    found = {}
    for (image_id, path), old in zip(shard.images(), shard.stamps, strict=True):
        now = stamps.get(path, UNKNOWN).known()
        if now is not None and old != UNKNOWN and now != old:
            found[image_id] = path
    return found


def _digest(path: str) -> str | None:
    """Of a file as it is now; None where it cannot be read."""
    try:
        return file_digest(read_input(path))
    except (OSError, ValueError):  # an ImageError is a ValueError
        return None
