"""The bytes of an input, wherever it lies: a local file, a URI of pyarrow's or fsspec's, a row of a table.

A row of a Parquet table with a ``bytes`` column is called ``table.parquet#row=0000000012``.
"""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from sam3_ray.cache import LruCache
from sam3_ray.data.stamps import UNKNOWN, Stamp, local_stamp
from sam3_ray.errors import ImageError
from sam3_ray.images import read_image_file

BYTES_COLUMN = "bytes"
_URI = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_ROW = re.compile(r"(?P<table>.+)#row=(?P<row>\d{10})", re.DOTALL)
_ROW_GROUPS_KEPT = 2
"""Of one process: neighbours are asked for by threads that work on two batches."""


def is_uri(path: str) -> bool:
    """Whether a path names its file system (``s3://...``)."""
    return _URI.match(path) is not None


def row_name(table: str, row: int) -> str:
    """The name of a row, counted from 0, of a table with a ``bytes`` column."""
    return f"{table}#row={row:010d}"


def read_input(path: str) -> bytes:
    """The bytes of an input.

    Raises:
        FileNotFoundError, OSError: it cannot be read.
        ImageError: a path that cannot be one, or a row without bytes.
    """
    row = _ROW.fullmatch(path)
    if row is None and not is_uri(path):
        return read_image_file(path)
    try:
        if row is not None:
            return _rows().read(row["table"], int(row["row"]))
        return _read_uri(path)
    except ImageError:
        raise
    except (
        ValueError,
        pa.ArrowException,
    ) as error:  # of a URI that is none, of a table that is none
        raise OSError(f"{path} cannot be read: {error}") from error


def _read_uri(path: str) -> bytes:
    system, inner = open_uri(path)
    info = system.get_file_info(inner)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError(f"no such image file: {path}")
    with system.open_input_stream(inner) as stream:
        data: bytes = stream.read()
    return data


def open_uri(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system of a URI, and the path in it: pyarrow's own, else fsspec's.

    Names in a bucket are what they are, blanks, ``%`` and all, as the tools of S3 and others have it; in
    ``file://`` they are percent-encoded.

    Raises:
        ValueError: nobody knows such a file system.
        OSError: it does not answer.
    """
    scheme, _, rest = uri.partition("://")
    if scheme.lower() == "file":
        return fs.FileSystem.from_uri(uri)  # type: ignore[no-any-return]
    if scheme.lower() in ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"):
        host, slash, path = rest.partition("/")
        return fs.FileSystem.from_uri(f"{scheme}://{host}{slash}{quote(path)}")  # type: ignore[no-any-return]
    import fsspec

    try:
        system, inner = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{uri}: no file system is known for {scheme}:// ({error})") from error
    return fs.PyFileSystem(fs.FSSpecHandler(system)), inner


class _Rows:
    """Reads rows of Parquet tables a row group at a time.

    A local table that has changed is opened anew. One behind a URI is taken to be as it was for this
    process's life: asking for each row would be a request for each image.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: LruCache[tuple[str, Stamp, int], tuple[int, pa.ChunkedArray]] = LruCache(
            _ROW_GROUPS_KEPT
        )
        self._starts: dict[str, tuple[Stamp, list[int]]] = {}

    def read(self, table: str, row: int) -> bytes:
        with self._lock:
            start, column = self._group_of(table, row)
        value = column[row - start].as_py()
        if not value:
            raise ImageError(f"row {row} of {table} has no bytes")
        return bytes(value)

    def _group_of(self, table: str, row: int) -> tuple[int, pa.ChunkedArray]:
        stamp = UNKNOWN if is_uri(table) else local_stamp(table)
        known, starts = self._starts.get(table, (None, []))
        if known != stamp:
            with _open_table(table) as file:
                starts = [0]
                for group in range(file.num_row_groups):
                    starts.append(starts[-1] + file.metadata.row_group(group).num_rows)
            self._starts[table] = stamp, starts
        if row >= starts[-1]:
            raise FileNotFoundError(f"{table} has {starts[-1]} rows, no row {row}")
        group = next(n for n, start in enumerate(starts[1:]) if row < start)
        kept = self._groups.get((table, stamp, group))
        if kept is None:
            with _open_table(table) as file:
                kept = (starts[group], file.read_row_group(group, [BYTES_COLUMN])[BYTES_COLUMN])
            self._groups.put((table, stamp, group), kept)
        return kept


@lru_cache(maxsize=1)
def _rows() -> _Rows:
    return _Rows()


def _open_table(table: str) -> Any:
    if is_uri(table):
        system, inner = open_uri(table)
        return pq.ParquetFile(system.open_input_file(inner))
    return pq.ParquetFile(table)
