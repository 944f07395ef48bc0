"""Every environment knob, typed, with its why; and the pinned revision of the weights.

Values are read when :func:`settings` is called, not at import, so that a test or a replica can set them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

REPO_ID = "facebook/sam3"
CHECKPOINT_FILE = "sam3.pt"
PINNED_REVISION = "3c879f39826c281e95690f02c7821c4de09afae7"
"""The revision of facebook/sam3 that every published figure uses (spec/PYTHON.md)."""

DEMO_REPO_ID = "demo"
"""``repo_id`` of the small checkpoint that ships in the package."""

MAX_PROMPTS_LIMIT = 64
"""What the number of phrases of one HTTP request may be raised to."""

MIB = 1024 * 1024


@dataclass(frozen=True)
class Settings:
    """The knobs.

    Attributes:
        weights_dir: SAM3_WEIGHTS_DIR. A folder with sam3.pt, or the file: never touches the Hub.
        weights_revision: TT_WEIGHTS_REVISION. Another revision of the Hub repository.
        bpe_path: SAM3_BPE_PATH. A vocabulary file other than the one open_clip ships.
        num_threads: SAM3_NUM_THREADS. Host threads of torch; None leaves the default of 17 capped at the
            CPU count (17: spec/PYTHON.md).
        text_workers: SAM3_TEXT_WORKERS. Accepted for the one-chip server's sake; a batch does better here.
        max_prompts: SAM3_MAX_PROMPTS. Phrases of one HTTP request.
        exif: SAM3_EXIF. Turn files and bytes upright by their EXIF orientation (upstream leaves it to
            its caller).
        max_image_pixels: SAM3_MAX_IMAGE_PIXELS. A larger image is refused before it is decoded: a small
            file can unpack to gigabytes. 178,956,970 is Pillow's own bound of a decompression bomb.
        max_mask_pixels: SAM3_MAX_MASK_PIXELS. Pixels of all masks of one HTTP answer, at the image's size:
            the default is 4 phrases of 50 instances (what a request may ask without a word) at 25 megapixels,
            half a minute of one core as PNG or RLE.
        max_upload_bytes: SAM3_MAX_UPLOAD_BYTES. Largest image file over HTTP.
        image_cache_bytes: SAM3_IMAGE_CACHE_BYTES. Budget of the image cache; None asks the backend.
        log_level: SAM3_LOG_LEVEL. Level of the ``sam3_ray`` logger in a service.
        cache_dir: SAM3_CACHE_DIR. Where files are kept that are made once and used by every process; None
            is the user's own cache folder (:func:`cache_folder`).
    """

    weights_dir: Path | None = None
    weights_revision: str | None = None
    bpe_path: Path | None = None
    num_threads: int | None = None
    text_workers: int = 4
    max_prompts: int = 4
    exif: bool = True
    max_image_pixels: int = 178_956_970
    max_mask_pixels: int = 5_000_000_000
    max_upload_bytes: int = 32 * MIB
    image_cache_bytes: int | None = None
    log_level: str = "WARNING"
    cache_dir: Path | None = None


def settings() -> Settings:
    """The knobs as the environment has them now.

    Raises:
        ValueError: a variable has a value that does not fit, with its name.
    """
    defaults = Settings()
    return Settings(
        weights_dir=_path("SAM3_WEIGHTS_DIR"),
        weights_revision=_text("TT_WEIGHTS_REVISION"),
        bpe_path=_path("SAM3_BPE_PATH"),
        num_threads=_integer("SAM3_NUM_THREADS", minimum=1),
        text_workers=_integer("SAM3_TEXT_WORKERS", minimum=1) or defaults.text_workers,
        max_prompts=_integer("SAM3_MAX_PROMPTS", minimum=1, maximum=MAX_PROMPTS_LIMIT)
        or defaults.max_prompts,
        exif=_flag("SAM3_EXIF", defaults.exif),
        max_image_pixels=_integer("SAM3_MAX_IMAGE_PIXELS", minimum=1) or defaults.max_image_pixels,
        max_mask_pixels=_integer("SAM3_MAX_MASK_PIXELS", minimum=1) or defaults.max_mask_pixels,
        max_upload_bytes=_integer("SAM3_MAX_UPLOAD_BYTES", minimum=1) or defaults.max_upload_bytes,
        image_cache_bytes=_integer("SAM3_IMAGE_CACHE_BYTES", minimum=0),
        log_level=(_text("SAM3_LOG_LEVEL") or defaults.log_level).upper(),
        cache_dir=_path("SAM3_CACHE_DIR"),
    )


def default_num_threads() -> int:
    """Host threads of torch: SAM3_NUM_THREADS, else 17, capped at the CPUs this process may use."""
    return min(settings().num_threads or 17, len(os.sched_getaffinity(0)))


def cache_folder() -> Path:
    """Where this user's made-once files are: SAM3_CACHE_DIR, else ``sam3_ray`` in XDG_CACHE_HOME, else in
    ``~/.cache``. It need not exist yet."""
    chosen = settings().cache_dir
    if chosen is not None:
        return chosen.absolute()
    shared = _path("XDG_CACHE_HOME")
    # A relative XDG_CACHE_HOME is to be ignored: XDG base directory specification.
    if shared is None or not shared.is_absolute():
        shared = Path.home() / ".cache"
    return shared / "sam3_ray"


def _text(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None


def _path(name: str) -> Path | None:
    value = _text(name)
    return Path(value).expanduser() if value else None


def _integer(name: str, *, minimum: int, maximum: int | None = None) -> int | None:
    value = _text(name)
    if value is None:
        return None
    bounds = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} is not an integer ({bounds})") from None
    if number < minimum or (maximum is not None and number > maximum):
        raise ValueError(f"{name}={number} is out of range ({bounds})")
    return number


def _flag(name: str, default: bool) -> bool:
    value = _text(name)
    if value is None:
        return default
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{name}={value!r} is neither 0 nor 1")
