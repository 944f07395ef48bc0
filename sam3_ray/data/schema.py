"""The columns of labels, as Arrow types. docs/labelling.md has them as a table, and a test compares both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import pyarrow as pa

MaskFormat = Literal["rle", "polygon", "none"]
MASK_FORMATS: tuple[MaskFormat, ...] = get_args(MaskFormat)

MASK_TYPES: dict[MaskFormat, pa.DataType] = {
    # COCO's compressed RLE: [height, width] and its counts.
    "rle": pa.struct([("size", pa.list_(pa.int32())), ("counts", pa.string())]),
    # Flat rings [x0, y0, x1, y1, ...], filled by the even-odd rule (``sam3_ray.masks.mask_to_polygon``).
    "polygon": pa.list_(pa.list_(pa.float32())),
}

ERROR = pa.struct([("kind", pa.string()), ("message", pa.string())])
PRESENCE = pa.struct(
    [("prompt", pa.string()), ("presence", pa.float32()), ("truncated", pa.bool_())]
)


def instance_type(masks: MaskFormat) -> pa.DataType:
    """One instance: its phrase, score, box (x0, y0, x1, y1 in pixels), area in pixels, and mask if asked for.

    The area is the mask's; without masks it is the box's.
    """
    fields: list[tuple[str, Any]] = [
        ("prompt", pa.string()),
        ("score", pa.float32()),
        ("box", pa.list_(pa.float32())),
        ("area", pa.float64()),
    ]
    if masks != "none":
        fields.append(("mask", MASK_TYPES[masks]))
    return pa.struct(fields)


def label_schema(masks: MaskFormat = "rle", kept: Iterable[pa.Field] = ()) -> pa.Schema:
    """What ``Sam3Labeler`` gives: the kept columns of the input, then the label.

    Args:
        masks: form of the masks.
        kept: columns of the input that go through.

    Raises:
        ValueError: an unknown form, or a kept column with the name of one of the label.
    """
    if masks not in MASK_FORMATS:
        raise ValueError(f"masks must be one of {', '.join(MASK_FORMATS)}, got {masks!r}")
    label = [
        pa.field("digest", pa.string()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("error", ERROR),
        pa.field("presence", pa.list_(PRESENCE)),
        pa.field("instances", pa.list_(instance_type(masks))),
    ]
    kept = list(kept)
    check_kept([field.name for field in kept])
    return pa.schema([*kept, *label])


LABEL_COLUMNS = ("digest", "width", "height", "error", "presence", "instances")


def check_kept(names: Iterable[str]) -> None:
    """Raise ValueError where a kept column has the name of one of the label."""
    taken = sorted(set(names) & set(LABEL_COLUMNS))
    if taken:
        raise ValueError(
            f"keep names {', '.join(taken)}, which the label itself has: rename the input's column"
        )


PLANNED = (pa.field("image_id", pa.int64()), pa.field("path", pa.string()))
"""The columns that a run keeps of its plan."""


def labels_file_schema(masks: MaskFormat) -> pa.Schema:
    """``labels/part-*.parquet``: a row for each image that has a label."""
    schema = label_schema(masks, PLANNED)
    return schema.remove(schema.get_field_index("error"))


ERRORS_FILE_SCHEMA = pa.schema([*PLANNED, ("kind", pa.string()), ("message", pa.string())])
"""``errors/part-*.parquet``: a row for each image that has none."""
