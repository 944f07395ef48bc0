"""Any image a caller may give -> (H, W, 3) uint8 RGB pixels, its digest, and the model's resize.

Forms: a path (str, PathLike); the bytes of a file; a ``PIL.Image``; a numpy array or torch tensor of
shape (H, W), (H, W, 1|3|4) or (1|3|4, H, W).

- Files and bytes are turned upright by their EXIF orientation (upstream leaves that to its caller);
  ``SAM3_EXIF=0`` turns that off (but for TIFF, which Pillow itself turns). PIL images stay as they are.
- Files are read as one of :data:`FORMATS`. Of several frames or pages the first is used.
- Alpha is dropped, not blended: the colours under it are used, as by ``convert("RGB")``.
- More than 8 bits: 16-bit values keep their high byte. PIL mode ``I`` is read so where a value is over 255,
  and as it is otherwise. PIL mode ``F`` is read as [0, 1], or as [0, 255] where a value is over 1.
- Arrays: uint8 as it is; bool as 0 and 255; floats in [0, 1] as ``x * 255.999`` truncated, which is what
  upstream's ``v2.ToDtype(torch.uint8, scale=True)`` does (half precision goes through float32, for in
  float16 upstream's 1.0 becomes 0). No other dtype.
- Where both ends of a shape could be channels, as in (3, 480, 4), a numpy array is (H, W, C) and a torch
  tensor (C, H, W): the convention of each library, and of upstream's ``to_image``.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from sam3_ray.errors import (
    ImageDecodeError,
    ImageError,
    ImageNotCachedError,
    ImageTooLargeError,
)
from sam3_ray.pixels import Uint8Array, pixels_of_array, pixels_of_pil, tensor_to_array
from sam3_ray.settings import settings

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

    ImageLike = (
        str
        | os.PathLike[str]
        | bytes
        | bytearray
        | memoryview
        | Image.Image
        | npt.NDArray[Any]
        | Tensor
    )


FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "TIFF", "GIF", "BMP", "PPM")
"""What is decoded: common formats with well-kept decoders. Pillow reads more, some by starting other
programs (EPS), some with decoders that few people test: nothing to run on what strangers send."""

_log = logging.getLogger(__name__)
_DIGEST = re.compile(r"[0-9a-f]{32}")


class ImageSource:
    """An image as it was given: decoded at most once, on first need, by whichever thread asks first.

    All methods are thread-safe. A file is read once, and its bytes are let go once it is decoded: the digest
    and the pixels stay. An array, tensor or PIL image is not copied before :meth:`pixels` runs: do not change
    it until then.

    Attributes:
        name: what to call it in a message: the path, ``bytes``, ``PIL image``, ``array``, ``tensor``.
        namespace: what its features are cached under beside their digest: nobody finds them from another
            namespace, not even with the same picture.
    """

    def __init__(self, given: Any, name: str, digest: str | None = None) -> None:
        """Use :meth:`of`, :meth:`from_file` or :meth:`from_digest`."""
        self.name = name
        self.namespace = ""
        self._given = given
        self._digest = digest
        self._pixels: Uint8Array | None = None
        self._lock = threading.RLock()

    @classmethod
    def of(cls, image: ImageLike | ImageSource) -> ImageSource:
        """Take any form that the module names; nothing is read or decoded yet.

        Raises:
            TypeError: something that is no image.
            ImageError: an empty path, or a URL.
        """
        if isinstance(image, ImageSource):
            return image
        if isinstance(image, (bytes, bytearray, memoryview)):
            return cls(bytes(image), "bytes")
        if isinstance(image, (str, os.PathLike)):
            return cls(_checked_path(image), str(image))
        if isinstance(image, np.ndarray):
            return cls(image, "array")
        # Whoever holds a tensor or a PIL image has imported its library: no import here.
        for module, class_name, name in (
            ("torch", "Tensor", "tensor"),
            ("PIL.Image", "Image", "PIL image"),
        ):
            kind = getattr(sys.modules.get(module), class_name, None)
            if kind is not None and isinstance(image, kind):
                return cls(image, name)
        raise TypeError(
            "an image is a path, the bytes of a file, a PIL image, a numpy array or a torch tensor; "
            f"this is a {type(image).__name__}"
        )

    @classmethod
    def from_file(cls, data: bytes, name: str) -> ImageSource:
        """The bytes of a file that came from ``name``."""
        return cls(data, name)

    @classmethod
    def from_digest(cls, digest: str) -> ImageSource:
        """An image known by the digest of its file only; :meth:`pixels` raises ImageNotCachedError.

        Raises:
            ValueError: not 32 hex digits.
        """
        lowered = digest.lower()
        if not _DIGEST.fullmatch(lowered):
            raise ValueError(f"an image digest is 32 hex digits (xxh3_128), got {digest[:80]!r}")
        return cls(None, f"image {lowered}", lowered)

    @property
    def digest(self) -> str | None:
        """xxh3_128 of the file's bytes in hex, the file read if need be; None for the other forms.

        Raises:
            FileNotFoundError, IsADirectoryError, OSError: the file cannot be read.
        """
        with self._lock:
            if self._digest is None and isinstance(self._given, (Path, bytes)):
                self._digest = file_digest(self._read())
            return self._digest

    def pixels(self) -> Uint8Array:
        """The (H, W, 3) uint8 RGB pixels; the same array each time, which nobody else holds.

        Raises:
            ImageError: a shape, dtype or value that cannot be used.
            ImageDecodeError: bytes that are no image we read, or a truncated one.
            ImageTooLargeError: more pixels than ``SAM3_MAX_IMAGE_PIXELS``.
            ImageNotCachedError: only the digest is known.
            FileNotFoundError, IsADirectoryError, OSError: the file cannot be read.
        """
        with self._lock:
            if self._pixels is None:
                self._pixels = self._decode()
                self._given = None
            return self._pixels

    def forget_pixels(self) -> None:
        """Let go of the pixels, once whoever needs them has made something else of them."""
        with self._lock:
            if self._given is None:
                self._pixels = None

    def _read(self) -> bytes:
        if isinstance(self._given, Path):
            self._given = _read_file(self._given)
        assert isinstance(self._given, bytes)
        return self._given

    def _decode(self) -> Uint8Array:
        if self._given is None:
            raise ImageNotCachedError(f"{self.name} is not in the cache; send the image itself")
        if isinstance(self._given, (Path, bytes)):
            _ = self.digest  # while the bytes are here
            return _decode_file(self._read(), self.name)
        if isinstance(self._given, np.ndarray):
            return pixels_of_array(self._given, self.name, channels_first=False)
        if self.name == "tensor":
            return pixels_of_array(tensor_to_array(self._given), self.name, channels_first=True)
        _check_pixel_count(self._given.size, self.name)
        _load(self._given, self.name)
        return pixels_of_pil(self._given, self.name)

    def __repr__(self) -> str:
        return f"ImageSource({self.name!r})"


def load_image(image: ImageLike) -> Uint8Array:
    """The (H, W, 3) uint8 RGB array that the model uses for any supported input.

    Raises:
        TypeError, ImageError, OSError: see :meth:`ImageSource.of` and :meth:`ImageSource.pixels`.
    """
    return ImageSource.of(image).pixels()


def read_image_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of an image's file, not looked into.

    Raises:
        FileNotFoundError, IsADirectoryError, OSError: it cannot be read.
        ImageError: an empty path, or a URL.
    """
    return _read_file(_checked_path(path))


def stored_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) that an image file's header tells; None where it tells none. Decodes nothing."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.size
    except Exception:  # noqa: BLE001 - whoever decodes it finds out what is wrong
        return None


def file_digest(data: bytes) -> str:
    """xxh3_128 of a file's bytes, as 32 hex digits. Fast, and no proof against made collisions."""
    return xxhash.xxh3_128_hexdigest(data)


def pixel_digest(pixels: Uint8Array) -> str:
    """xxh3_128 of pixels and their shape, as 32 hex digits: the same picture in another file has the same."""
    state = xxhash.xxh3_128(f"pixels {pixels.shape} {pixels.dtype.str} ".encode())
    state.update(np.ascontiguousarray(pixels).data)
    return state.hexdigest()


def resize_to_square(pixels: Uint8Array, size: int) -> Uint8Array:
    """Squash (H, W, 3) uint8 to (size, size, 3) uint8, bit for bit as upstream's ``v2.Resize((size, size))``.

    Bilinear with antialiasing, on uint8, aspect ratio not kept.
    """
    import torch
    from torchvision.transforms.v2 import functional

    # torch cannot promise to leave a read-only array alone and warns; the copy is only then made.
    pixels = np.require(pixels, requirements=["C", "W"])
    resized = functional.resize(torch.from_numpy(pixels).permute(2, 0, 1), [size, size])
    return np.ascontiguousarray(resized.permute(1, 2, 0).numpy())


def _checked_path(image: str | os.PathLike[str]) -> Path:
    path = os.fsdecode(image)
    if not path:
        raise ImageError("the path of an image is empty")
    if re.match(r"(https?|ftp|s3|gs|data|file):", path):
        raise ImageError(
            f"URLs are not fetched, got {path[:80]!r}; download it and give the path or bytes"
        )
    return Path(path)


def _read_file(path: Path) -> bytes:
    shown = str(path) if len(str(path)) <= 300 else str(path)[:300] + "..."
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"no such image file: {shown}") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{shown} is a folder, not an image file") from None
    except ValueError as error:  # a null byte in the path
        raise ImageError(f"not a path of an image file: {shown!r} ({error})") from None
    except OSError as error:
        raise type(error)(f"cannot read the image file {shown}: {error.strerror}") from error


def _decode_file(data: bytes, name: str) -> Uint8Array:
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise ImageDecodeError(f"{name}: empty, no bytes to decode", "the file is empty")
    Image.init()
    formats = [known for known in FORMATS if known in Image.OPEN]
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise ImageDecodeError(
            f"{name}: not an image that is read here ({', '.join(formats)}); "
            f"{len(data)} bytes that begin with {data[:12]!r}",
            f"the file's {len(data)} bytes are not an image that is read here ({', '.join(formats)})",
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _pillow_bound(name, error) from error
    except MemoryError:
        raise
    except Exception as error:  # decoders raise many kinds on a damaged header
        raise _damaged(name, error) from error
    with image:
        _check_pixel_count(image.size, name)
        _load(image, name)
        return pixels_of_pil(_upright(image, name) if settings().exif else image, name)


def _check_pixel_count(size: tuple[int, int], name: str) -> None:
    width, height = size
    if width <= 0 or height <= 0:
        reason = f"an image of {width} x {height} pixels has nothing in it"
        raise ImageError(f"{name}: {reason}", reason)
    limit = settings().max_image_pixels
    if width * height > limit:
        reason = f"{width} x {height} = {width * height} pixels, the limit is {limit}"
        raise ImageTooLargeError(f"{name}: {reason} (SAM3_MAX_IMAGE_PIXELS)", reason)


def _load(image: Image.Image, name: str) -> None:
    """Decode ``image`` in place."""
    from PIL import Image

    try:
        image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _pillow_bound(name, error) from error
    except MemoryError:
        raise
    except Exception as error:  # decoders raise many kinds on damaged data
        raise _damaged(name, error) from error


def _damaged(name: str, error: Exception) -> ImageDecodeError:
    return ImageDecodeError(
        f"{name}: cannot be decoded, truncated or damaged ({type(error).__name__}: {error})",
        "the image cannot be decoded: the file is truncated or damaged",
    )


def _pillow_bound(name: str, error: Exception) -> ImageTooLargeError:
    """Pillow has a bound of its own: MAX_IMAGE_PIXELS where warnings are errors, else twice as many."""
    from PIL import Image

    ours = settings().max_image_pixels
    bound = (Image.MAX_IMAGE_PIXELS or ours) * (isinstance(error, Image.DecompressionBombError) + 1)
    counted = re.search(r"\((\d+) pixels\)", str(error))
    pixels = f"{counted[1]} pixels" if counted else "too many pixels"
    reason = f"{pixels}, the limit is {min(ours, bound)}"
    knob = (
        "SAM3_MAX_IMAGE_PIXELS" if ours <= bound else "Pillow's, set by PIL.Image.MAX_IMAGE_PIXELS"
    )
    return ImageTooLargeError(f"{name}: {reason} ({knob})", reason)


def _upright(image: Image.Image, name: str) -> Image.Image:
    from PIL import ExifTags
    from PIL.Image import Transpose

    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception as error:  # noqa: BLE001 - Pillow's EXIF parser raises many kinds
        # A damaged EXIF block says nothing of the picture, which is whole.
        _log.debug("%s: EXIF not readable, image used as stored (%s)", name, error)
        return image
    # What undoes each orientation (EXIF 2.3, tag 0x0112).
    undo = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }.get(orientation)
    return image if undo is None else image.transpose(undo)
