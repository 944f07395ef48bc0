"""Pictures behind URIs: S3 through pyarrow, in the actors too, and HTTP through fsspec."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sam3_ray.data import label_images
from sam3_ray.data.reading import read_input
from sam3_ray.data.sources import SourceError, list_inputs
from sam3_ray.data.stamps import UNKNOWN
from sam3_ray.images import file_digest
from tests.data.bucket import NAME, Bucket
from tests.data.conftest import draw
from tests.data.simulated import open_simulated


@pytest.fixture
def filled(bucket: Bucket, tmp_path: Path) -> Iterator[Bucket]:
    bucket.objects = {
        f"shots/{folder}/{number} ü%20.png": draw(tmp_path / "drawn.png", number).read_bytes()
        for number, folder in enumerate(["a", "a", "b/c", "b/c"])
    }
    bucket.objects |= {
        "shots/broken.png": b"no picture",
        "shots/readme.md": b"",
        "other/0.png": b"",
    }
    yield bucket
    bucket.objects = {}


def test_a_bucket_is_listed_and_read(filled: Bucket) -> None:
    found = list_inputs(f"s3://{NAME}/shots")
    assert list(found.stamps) == [
        f"s3://{NAME}/shots/{name}"
        for name in (
            "a/0 ü%20.png",
            "a/1 ü%20.png",
            "b/c/2 ü%20.png",
            "b/c/3 ü%20.png",
            "broken.png",
        )
    ]
    assert found.other_files == 1
    for path, stamp in found.stamps.items():
        data = filled.objects[path.removeprefix(f"s3://{NAME}/")]
        assert read_input(path) == data
        assert stamp.size == len(data)
    assert len(list_inputs(f"s3://{NAME}/shots/b/*/2*.png").stamps) == 1
    with pytest.raises(SourceError, match="is not there"):
        list_inputs(f"s3://{NAME}/gone")
    with pytest.raises(FileNotFoundError, match="no such image file"):
        read_input(f"s3://{NAME}/shots/gone.png")


def test_a_bucket_that_does_not_let_us_in(filled: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    with pytest.raises(SourceError, match="ACCESS_DENIED"):
        list_inputs(f"s3://{NAME}/shots")
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        read_input(f"s3://{NAME}/shots/broken.png")


def test_actors_read_a_bucket(local_ray: None, filled: Bucket, tmp_path: Path) -> None:
    """With the credentials that the environment gives them."""
    filled.readers.clear()
    source = f"s3://{NAME}/shots"

    def label() -> tuple[int, int, int]:
        summary = label_images(
            source, "car", tmp_path / "out", chips="cpu", open_engine=open_simulated()
        )
        return summary.labelled, summary.errors, summary.changed

    assert label() == (4, 1, 0)
    assert filled.readers
    labels = pq.read_table(tmp_path / "out/labels/part-00000.parquet").to_pylist()
    for row in labels:
        data = filled.objects[row["path"].removeprefix(f"s3://{NAME}/")]
        assert row["digest"] == file_digest(data)
    filled.objects["shots/broken.png"] = draw(tmp_path / "mended.png", 9).read_bytes()
    assert label() == (5, 0, 1)


def test_local_uris_are_percent_encoded(tmp_path: Path) -> None:
    path = draw(tmp_path / "a ü%20.png", 1)
    [uri] = list_inputs(tmp_path.as_uri()).stamps
    assert uri == path.as_uri()
    assert read_input(uri) == path.read_bytes()


def test_http_through_fsspec(tmp_path: Path) -> None:
    data = draw(tmp_path / "served" / "a.png", 1).read_bytes()
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "served")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_address[1]}"
        (tmp_path / "served" / "list.txt").write_text(f"{base}/a.png\n{base}/gone.png\n")
        found = list_inputs(f"{base}/list.txt")
        assert found.stamps == {f"{base}/a.png": UNKNOWN, f"{base}/gone.png": UNKNOWN}
        assert read_input(f"{base}/a.png") == data
        with pytest.raises(FileNotFoundError):
            read_input(f"{base}/gone.png")
    finally:
        server.shutdown()
        server.server_close()
