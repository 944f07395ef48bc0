"""What is to be labelled: a folder, a glob, a list of paths, a Parquet table, here or behind a URI."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from sam3_ray.data.reading import BYTES_COLUMN, is_uri, open_uri, row_name
from sam3_ray.data.stamps import UNKNOWN, Stamp, local_stamp, remote_stamp

PICTURE_SUFFIXES = frozenset(
    "." + name
    for name in "png jpg jpeg jpe jfif webp avif tif tiff gif bmp ppm pgm pbm pnm".split()  # noqa: SIM905
)
"""Of a folder or glob, these files are inputs: the formats of ``sam3_ray.images.FORMATS``."""

LIST_SUFFIXES = frozenset((".txt", ".lst"))
TABLE_SUFFIXES = frozenset((".parquet", ".pq"))
_MAGIC = frozenset("*?[")


class SourceError(ValueError):
    """A source that is not there, has nothing to label, or cannot be read as what it is."""


@dataclass(frozen=True)
class Inputs:
    """What a source has.

    Attributes:
        source: it, with a local path made absolute.
        stamps: path and stamp of every image, each once, in the order of the plan. What a list or table
            names by URI has not been looked at: a request for each would take hours.
        other_files: files of a folder or glob that are no pictures by their name.
    """

    source: str
    stamps: dict[str, Stamp]
    other_files: int = 0


def list_inputs(source: str | os.PathLike[str], *, exclude: Path | None = None) -> Inputs:
    """Look what there is.

    Args:
        source: a folder (its folders too; not what is hidden), a glob, a text file with a path or URI a
            line, a Parquet table with a column ``path`` or ``bytes``, a single picture; or a URI of these.
        exclude: a folder that is left out: the output may lie inside of the source.

    Raises:
        SourceError: as the class says.
    """
    text = os.fspath(source)
    if not text.strip():
        raise SourceError("the source is empty: give a folder, a glob, a list or a Parquet table")
    if not is_uri(text):
        text = os.path.abspath(os.path.expanduser(text))
    try:
        if is_uri(text):
            files = dict(sorted(_uri_files(text, exclude)))
        else:
            files = {path: local_stamp(path) for path in sorted(_local_files(text, exclude))}
        found = _inputs(text, files)
    except SourceError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise SourceError(f"{text} cannot be read: {error}") from error
    for path in found.stamps:
        try:
            path.encode()
        except UnicodeEncodeError:
            raise SourceError(f"a file's name is no text: {path!r}; rename it") from None
    if not found.stamps:
        others = f" ({found.other_files} other files)" if found.other_files else ""
        raise SourceError(f"{text} has nothing to label{others}")
    return found


def _inputs(source: str, files: dict[str, Stamp]) -> Inputs:
    suffixes = {_suffix(file) for file in files}
    if files and suffixes <= TABLE_SUFFIXES:
        stamps: dict[str, Stamp] = {}
        for file, stamp in files.items():
            stamps |= _table_inputs(file, stamp)
        return Inputs(source, stamps)
    if list(files) == [source] and suffixes <= LIST_SUFFIXES:
        return Inputs(source, {path: _stamp(path) for path in sorted(set(_listed(source)))})
    pictures = {file: stamp for file, stamp in files.items() if _suffix(file) in PICTURE_SUFFIXES}
    return Inputs(source, pictures, len(files) - len(pictures))


def _local_files(path: str, exclude: Path | None) -> Iterator[str]:
    left_out = _left_out(_fixed_part(path), exclude)
    if os.path.isdir(path):
        for folder, folders, files in os.walk(path):
            folders[:] = [
                name
                for name in folders
                if not name.startswith(".")
                and os.path.realpath(os.path.join(folder, name)) != left_out
            ]
            yield from (os.path.join(folder, name) for name in files if name[0] != ".")
    elif os.path.exists(path):
        yield path
    elif _MAGIC & set(path):
        for found in glob.iglob(path, recursive=True):
            if os.path.isfile(found) and not _is_below(os.path.dirname(found), left_out):
                yield found
    else:
        raise SourceError(f"{path} is not there")


def _fixed_part(source: str) -> str:
    """The folder that a glob begins in, before its first part with a wildcard; what is no glob, whole."""
    first = min((source.find(c) for c in _MAGIC if c in source), default=None)
    return source if first is None else source[:first].rpartition("/")[0]


def _left_out(source: str, output: Path | None) -> str | None:
    """The output's folder, which is no input; None where the source itself lies in there."""
    left_out = None if output is None else os.path.realpath(output)
    return None if _is_below(source or "/", left_out) else left_out


def _is_below(folder: str, left_out: str | None) -> bool:
    return left_out is not None and Path(os.path.realpath(folder)).is_relative_to(left_out)


def _uri_files(uri: str, exclude: Path | None) -> Iterator[tuple[str, Stamp]]:
    base = _fixed_part(uri)
    system, inner = open_uri(base)
    info = system.get_file_info(inner)
    if info.type == fs.FileType.NotFound:
        raise SourceError(f"{uri} is not there")
    if info.type == fs.FileType.File:
        yield uri, remote_stamp(info)
        return
    prefix = base.rstrip("/")
    is_local = isinstance(system, fs.LocalFileSystem)
    left_out = _left_out(inner, exclude) if is_local else None
    for entry in system.get_file_info(fs.FileSelector(inner, recursive=True)):
        rest = entry.path[len(inner.rstrip("/")) :].lstrip("/")
        hidden = any(part.startswith(".") for part in rest.split("/"))
        full = f"{prefix}/{quote(rest) if prefix.startswith('file:') else rest}"
        wanted = base == uri or fnmatch.fnmatchcase(full, uri)
        if entry.type != fs.FileType.File or not wanted or hidden:
            continue
        if not _is_below(posixpath.dirname(entry.path), left_out):
            yield full, remote_stamp(entry)


def _listed(path: str) -> Iterator[str]:
    """The lines of a list; what is relative is so to the current folder, as shells have it."""
    if is_uri(path):
        system, inner = open_uri(path)
        with system.open_input_stream(inner) as stream:
            data = stream.read()
    else:
        data = Path(path).read_bytes()
    # Not splitlines: a name may have what Unicode counts as the end of a line.
    for line in data.decode("utf-8-sig").split("\n"):
        name = line.strip(" \t\r")
        if name:
            yield _absolute(name)


def _table_inputs(file: str, stamp: Stamp) -> Iterator[tuple[str, Stamp]]:
    """What a table names, or its own rows, which change with it."""
    system, inner = open_uri(file) if is_uri(file) else (fs.LocalFileSystem(), file)
    with pq.ParquetFile(system.open_input_file(inner)) as table:
        names = table.schema_arrow.names
        if "path" in names:
            for batch in table.iter_batches(columns=["path"]):
                for path in batch.column(0).to_pylist():
                    if not isinstance(path, str):
                        raise SourceError(f"{file}: a path is {path!r}, no text")
                    yield _absolute(path), _stamp(_absolute(path))
        elif BYTES_COLUMN in names:
            yield from ((row_name(file, row), stamp) for row in range(table.metadata.num_rows))
        else:
            raise SourceError(
                f"{file} has neither a column `path` nor `{BYTES_COLUMN}`, but {', '.join(names)}"
            )


def _absolute(path: str) -> str:
    return path if is_uri(path) else os.path.abspath(os.path.expanduser(path))


def _stamp(path: str) -> Stamp:
    return UNKNOWN if is_uri(path) else local_stamp(path)


def _suffix(path: str) -> str:
    return posixpath.splitext(path)[1].lower()


def common_root(source: str, paths: Iterable[str]) -> str:
    """The folder that names of images can be told from: the source's, else what all paths share; or ''."""
    if not is_uri(source) and os.path.isdir(source):
        return source
    folders = {tuple(path.split("/")[:-1]) for path in paths}
    first, last = min(folders, default=()), max(folders, default=())  # what these share, all do
    shared = list(
        itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    )
    root = "/".join(part for part, _ in shared)
    return "" if root.endswith(":/") else root


def short_name(path: str, root: str) -> str:
    """A path as seen from the root; whole where it is not below."""
    inside = root and path.startswith(f"{root.rstrip('/')}/")
    return path[len(root.rstrip("/")) + 1 :] if inside else path
