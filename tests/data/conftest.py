"""A local Ray for the tests that label in this process, and pictures to label."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sam3_ray.local_ray import keep_ray_on_loopback
from tests.data.bucket import Bucket

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
keep_ray_on_loopback()  # before anything imports Ray


@pytest.fixture(scope="package")
def bucket() -> Iterator[Bucket]:
    """An empty one, which the environment leads to: this process's, and that of a Ray started later."""
    bucket = Bucket()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bucket.environment.items():
            patch.setenv(name, value)
        yield bucket
    bucket.close()


@pytest.fixture(scope="package")
def local_ray(bucket: Bucket) -> Iterator[None]:
    """A Ray of our own; joins no other."""
    import ray

    folder = Path(tempfile.mkdtemp(prefix="s3r", dir="/tmp"))  # short: socket paths have a limit
    ray.init(
        address="local",
        num_cpus=2,
        resources={"TTNPU": 2},  # simulated
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 * 1024 * 1024,
        _temp_dir=str(folder),
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def draw(path: Path, number: int, size: tuple[int, int] = (64, 48)) -> Path:
    """A picture that no other number has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def draw_pictures(folder: Path) -> Path:
    """7 pictures in two folders, a broken one, an empty one, and what is no picture."""
    for number in range(4):
        draw(folder / f"a{number}.png", number, (64 + number, 48))
    for number in range(4, 7):
        draw(folder / "more" / f"b{number}.jpg", number)
    (folder / "broken.png").write_bytes((folder / "a0.png").read_bytes()[:2000])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "readme.txt").write_text("no picture")
    (folder / ".hidden").mkdir()
    draw(folder / ".hidden" / "a.png", 99)
    return folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of ``draw_pictures``."""
    return draw_pictures(tmp_path / "pictures")
