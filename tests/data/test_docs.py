"""docs/labelling.md says what the schema, the errors and the command line are."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa

from sam3_ray.data import label_schema
from sam3_ray.data.labels import ERROR_KINDS
from sam3_ray.data.schema import MASK_TYPES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "labelling.md").read_text()


def written(kind: pa.DataType) -> str:
    """A type as pyarrow writes it, in full."""
    if pa.types.is_struct(kind):
        fields = [kind.field(n) for n in range(kind.num_fields)]
        return f"struct<{', '.join(f'{one.name}: {written(one.type)}' for one in fields)}>"
    if pa.types.is_list(kind):
        return f"list<item: {written(kind.value_type)}>"
    return str(kind)


def test_the_table_of_columns_is_the_schema() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|$", PAGE, re.MULTILINE))
    assert table == {field.name: written(field.type) for field in label_schema("rle")}
    assert f"`{written(MASK_TYPES['polygon'])}`" in PAGE


def test_every_kind_of_error_is_named() -> None:
    sentence = PAGE.split("Kinds of errors:")[1].split(". To try")[0]
    assert set(re.findall(r"`([a-z-]+)`", sentence)) == {kind for _, kind in ERROR_KINDS}
