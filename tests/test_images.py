"""Every input form against Pillow, numpy and torchvision; every wrong one against its message."""

import io
import pickle
import re
import subprocess
import sys
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from PIL import ExifTags, Image, ImageCms, ImageOps
from torchvision.transforms import v2

from sam3_ray import images
from sam3_ray.errors import (
    ImageDecodeError,
    ImageError,
    ImageNotCachedError,
    ImageTooLargeError,
)
from sam3_ray.images import (
    FORMATS,
    ImageSource,
    file_digest,
    load_image,
    pixel_digest,
    resize_to_square,
)


def colors(height: int = 23, width: int = 31, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels) if channels else (height, width)
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims this size and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        length = len(body).to_bytes(4, "big")
        return length + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    data = zlib.compress(b"\0" * 100)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


# --- files and bytes ---


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_file_gives_what_pillow_decodes(tmp_path: Path, file_format: str) -> None:
    data = encoded(Image.fromarray(colors()), file_format)
    path = tmp_path / f"picture.{file_format.lower()}"
    path.write_bytes(data)
    with Image.open(path) as image:
        expected = np.asarray(image.convert("RGB"))
    for given in (path, str(path), data, bytearray(data), memoryview(data)):
        pixels = load_image(given)
        assert pixels.dtype == np.uint8
        assert pixels.flags.c_contiguous
        np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("file_format", ["EPS", "ICO", "TGA", "PCX", "JPEG2000"])
def test_a_format_that_strangers_should_not_send_is_no_image(file_format: str) -> None:
    data = encoded(Image.fromarray(colors()), file_format)
    with pytest.raises(ImageDecodeError, match="not an image that is read here"):
        load_image(data)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied_as_pillow_does(file_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(Image.fromarray(colors()), file_format, exif=exif, **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(load_image(data), expected)


def test_exif_orientation_can_be_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    data = encoded(Image.fromarray(colors(23, 31)), "PNG", exif=exif)
    assert load_image(data).shape == (31, 23, 3)
    monkeypatch.setenv("SAM3_EXIF", "0")
    np.testing.assert_array_equal(load_image(data), colors(23, 31))


def test_a_pil_image_is_not_turned() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image = Image.open(io.BytesIO(encoded(Image.fromarray(colors()), "PNG", exif=exif)))
    np.testing.assert_array_equal(load_image(image), colors())


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_does_not_cost_the_picture() -> None:
    data = encoded(
        Image.fromarray(colors()), "PNG", exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff garbage"
    )
    np.testing.assert_array_equal(load_image(data), colors())


@pytest.mark.parametrize("file_format", ["GIF", "TIFF", "WEBP", "PNG"])
def test_of_several_frames_the_first_is_used(file_format: str) -> None:
    first, second = (Image.new("RGB", (40, 30), name) for name in ("red", "blue"))
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(first, file_format, save_all=True, append_images=[second], **options)
    pixels = load_image(data)
    assert pixels.shape == (30, 40, 3)
    assert (pixels == (255, 0, 0)).all()


@pytest.mark.parametrize(
    "file_format", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "PPM", "AVIF"]
)
def test_a_truncated_file_is_said_to_be_so(tmp_path: Path, file_format: str) -> None:
    data = encoded(Image.fromarray(colors(200, 200)), file_format)
    path = tmp_path / "half"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ImageDecodeError) as caught:
        load_image(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"hello, this is text", "not an image that is read here"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (b"\x89PNG\r\n\x1a\n", "truncated or damaged|not an image"),
        (b"\xff\xd8\xff\xe0", "truncated or damaged|not an image"),
    ],
)
def test_bytes_that_are_no_image(data: bytes, message: str) -> None:
    with pytest.raises(ImageDecodeError, match=message):
        load_image(data)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    # 3,600 million pixels are beyond Pillow's bound too, 179 million beyond ours only.
    for width, height in ((60_000, 60_000), (14_000, 12_783)):
        with pytest.raises(ImageTooLargeError) as caught:
            load_image(png_header(width, height))
        assert f"{width * height} pixels, the limit is 178956970" in str(caught.value)
        assert "SAM3_MAX_IMAGE_PIXELS" in str(caught.value)
        assert caught.value.reason.endswith(f"{width * height} pixels, the limit is 178956970")


def test_pillows_bound_is_said_where_it_is_the_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3_MAX_IMAGE_PIXELS", "9999999999")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    with pytest.raises(
        ImageTooLargeError, match=r"200 pixels, the limit is 100 .*MAX_IMAGE_PIXELS"
    ):
        load_image(encoded(Image.new("RGB", (20, 10))))


@pytest.mark.parametrize("data", [b"", b"hello", encoded(Image.new("RGB", (99, 99)))[:60]])
def test_a_reason_is_free_of_names_and_of_the_decoders_words(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "somebody's.png"
    path.write_bytes(data)
    with pytest.raises(ImageDecodeError) as caught:
        load_image(path)
    assert str(path) in str(caught.value)
    assert not re.search(r"somebody|b'|Error", caught.value.reason)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.reason) == (str(caught.value), caught.value.reason)


@pytest.mark.parametrize("file_format", FORMATS)
def test_the_pixel_limit_holds_for_every_format(
    monkeypatch: pytest.MonkeyPatch, file_format: str
) -> None:
    data = encoded(Image.new("RGB", (40, 30)), file_format)
    monkeypatch.setenv("SAM3_MAX_IMAGE_PIXELS", "1199")
    monkeypatch.setattr(
        images, "_load", lambda *_: pytest.fail("decoded before the size was checked")
    )
    with pytest.raises(ImageTooLargeError, match=r"40 x 30 = 1200 pixels, the limit is 1199"):
        load_image(data)


def test_at_the_pixel_limit_an_image_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAM3_MAX_IMAGE_PIXELS", "1200")
    assert load_image(encoded(Image.new("RGB", (40, 30)))).shape == (30, 40, 3)
    with pytest.raises(ImageTooLargeError):
        load_image(Image.new("RGB", (40, 31)))


def test_paths_that_lead_to_no_image(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.png"):
        load_image(tmp_path / "nowhere.png")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        load_image(tmp_path)
    with pytest.raises(ImageError, match="empty"):
        load_image("")
    with pytest.raises(ImageError, match="not fetched"):
        load_image("https://example.com/cat.png")
    with pytest.raises(ImageError, match="null"):
        load_image("a\0b.png")
    with pytest.raises(OSError, match="cannot read") as caught:  # base64 text, say
        load_image("iVBORw0KGgo" * 1000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("thing", [None, 3, [[0, 1], [2, 3]], {"image": 1}, object()])
def test_a_thing_that_is_no_image(thing: object) -> None:
    with pytest.raises(TypeError, match=type(thing).__name__):
        ImageSource.of(thing)  # type: ignore[arg-type]


# --- PIL images ---


@pytest.mark.parametrize(
    "mode",
    ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"],
)
def test_pil_modes_equal_pillows_rgb(mode: str) -> None:
    source = Image.fromarray(colors(channels=4), "RGBA")
    image = {
        "PA": lambda: source.convert("LA").convert("PA"),
        "RGBa": lambda: source.convert("RGBa"),
        "RGBA": lambda: source,
        "LA": lambda: source.convert("LA"),
    }.get(mode, lambda: source.convert("RGB").convert(mode))()
    assert image.mode == mode
    before = image.tobytes()
    np.testing.assert_array_equal(load_image(image), np.asarray(image.convert("RGB")))
    assert image.tobytes() == before


def test_for_pil_rgb_upstream_sees_the_same_pixels() -> None:
    image = Image.fromarray(colors())
    upstream = v2.functional.to_image(image).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(load_image(image), upstream)


def test_la_premultiplied_equals_its_plain_form() -> None:
    image = Image.fromarray(colors(channels=4), "RGBA").convert("LA").convert("La")
    np.testing.assert_array_equal(load_image(image), np.asarray(image.convert("LA").convert("RGB")))


def test_lab_is_converted_as_a_colour_space() -> None:
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    image = ImageCms.profileToProfile(Image.fromarray(colors()), srgb, lab, outputMode="LAB")
    difference = load_image(image).astype(int) - colors()
    assert (
        np.abs(difference).mean() < 1.5
    )  # LAB has 8 bits a channel too, and lays them out otherwise


def test_a_palette_with_transparency_keeps_its_colours_and_warns_of_nothing() -> None:
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4) % 3, "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    data = encoded(image, "PNG", transparency=bytes([0, 128, 255]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pixels = load_image(data)
    assert pixels[0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 0, 0]]


def test_alpha_is_dropped_not_blended() -> None:
    rgba = colors(channels=4)
    rgba[..., 3] = 0
    for given in (Image.fromarray(rgba), encoded(Image.fromarray(rgba)), rgba):
        np.testing.assert_array_equal(load_image(given), rgba[..., :3])


@pytest.mark.parametrize("file_format", [None, "PNG", "TIFF", "PPM"])
def test_sixteen_bits_keep_the_high_byte(file_format: str | None) -> None:
    values = np.array([[0, 255, 256, 4096, 65535]], np.uint16)
    image = Image.fromarray(values)
    assert image.mode == "I;16"
    pixels = load_image(image if file_format is None else encoded(image, file_format))
    assert pixels[0, :, 0].tolist() == [0, 0, 1, 16, 255]
    assert (pixels == pixels[:, :, :1]).all()


def test_big_endian_sixteen_bits() -> None:
    image = Image.frombytes("I;16B", (2, 1), bytes([0x12, 0x34, 0xFF, 0xFE]))
    assert load_image(image)[0, :, 0].tolist() == [0x12, 0xFF]


def test_wide_grey_modes() -> None:
    def grey(values: list[float], dtype: type) -> list[int]:
        image = Image.fromarray(np.array([values], dtype))
        assert image.mode == ("I" if dtype is np.int32 else "F")
        return load_image(image)[0, :, 1].tolist()

    assert grey([0, 7, 255], np.int32) == [0, 7, 255]
    assert grey([0, 255, 65535], np.int32) == [0, 0, 255]
    assert grey([0, 0.5, 1], np.float32) == [0, 127, 255]
    assert grey([0, 1.5, 255], np.float32) == [0, 1, 255]
    for values, dtype in (
        ([-1, 3], np.int32),
        ([70000], np.int32),
        ([-0.1], np.float32),
        ([256], np.float32),
    ):
        with pytest.raises(ImageError, match="needs values in"):
            grey(values, dtype)
    with pytest.raises(ImageError, match="nan"):
        grey([float("nan")], np.float32)


def test_a_pil_image_of_no_size() -> None:
    with pytest.raises(ImageError, match="0 x 5"):
        load_image(Image.new("RGB", (0, 5)))


def test_a_truncated_pil_image_says_so() -> None:
    data = encoded(Image.fromarray(colors(100, 100)))
    with pytest.raises(ImageDecodeError, match="truncated"):
        load_image(Image.open(io.BytesIO(data[:-2000])))


# --- arrays and tensors ---


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_shapes_of_arrays(library: str) -> None:
    rgb, rgba, grey = colors(), colors(channels=4), colors(channels=0)

    def given(array: np.ndarray) -> np.ndarray | torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)) if library == "torch" else array

    for array, expected in (
        (rgb, rgb),
        (rgb.transpose(2, 0, 1), rgb),
        (rgba, rgba[..., :3]),
        (rgba.transpose(2, 0, 1), rgba[..., :3]),
        (grey, np.stack([grey] * 3, 2)),
        (grey[:, :, None], np.stack([grey] * 3, 2)),
        (grey[None], np.stack([grey] * 3, 2)),
        (rgb[::-2, ::3], rgb[::-2, ::3]),
    ):
        pixels = load_image(given(array))
        assert pixels.dtype == np.uint8
        assert pixels.flags.c_contiguous
        np.testing.assert_array_equal(pixels, expected)


def test_an_ambiguous_shape_follows_its_librarys_convention() -> None:
    array = np.random.default_rng(1).integers(0, 256, (3, 9, 4), dtype=np.uint8)
    np.testing.assert_array_equal(load_image(array), array[..., :3])
    tensor = torch.from_numpy(array)
    np.testing.assert_array_equal(load_image(tensor), array.transpose(1, 2, 0))
    for given in (array[..., :3], tensor[..., :3]):
        upstream = v2.functional.to_image(given).permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(load_image(given), upstream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_become_bytes_as_upstream_does(dtype: torch.dtype) -> None:
    every = torch.cat(
        [torch.linspace(0, 1, 20001, dtype=dtype), torch.arange(256, dtype=dtype) / 255]
    )
    tensor = every[: len(every) // 3 * 3].reshape(3, 1, -1).contiguous()
    upstream = v2.ToDtype(torch.uint8, scale=True)(v2.functional.to_image(tensor))
    expected = upstream.permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(load_image(tensor), expected)
    np.testing.assert_array_equal(load_image(tensor.numpy()), expected)
    np.testing.assert_array_equal(load_image(tensor.permute(1, 2, 0).numpy()), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_through_float32(dtype: torch.dtype) -> None:
    tensor = torch.linspace(0, 1, 300).reshape(3, 10, 10).to(dtype)
    pixels = load_image(tensor)
    np.testing.assert_array_equal(pixels, load_image(tensor.float()))
    assert pixels.max() == 255
    if dtype == torch.float16:
        np.testing.assert_array_equal(load_image(tensor.numpy()), pixels)


def test_bools_become_black_and_white() -> None:
    mask = colors(channels=0) > 128
    expected = np.where(mask[:, :, None], 255, 0).repeat(3, 2)
    np.testing.assert_array_equal(load_image(mask), expected)
    np.testing.assert_array_equal(load_image(torch.from_numpy(mask)), expected)


def test_a_tensor_that_needs_a_gradient() -> None:
    tensor = torch.rand(3, 8, 9, requires_grad=True)
    np.testing.assert_array_equal(load_image(tensor), load_image(tensor.detach()))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((5, 6, 7), np.uint8), r"\(5, 6, 7\).*neither the first nor the last axis"),
        (np.zeros((2, 6, 7), np.uint8), "neither"),
        (np.zeros((1, 3, 6, 7), np.uint8), r"one image at a time: array\[0\]"),
        (np.zeros(5, np.uint8), r"give \(H, W\)"),
        (np.zeros((0, 6, 3), np.uint8), "no pixels"),
        (np.zeros((3, 6, 0), np.uint8), "no pixels"),
        (np.zeros((4, 6, 3), np.int64), r"int64.*must be uint8, bool, or floats"),
        (np.zeros((4, 6, 3), np.uint16), r"uint16.*>> 8"),
        (np.zeros((4, 6, 3), np.complex64), "complex64"),
        (np.array([["a", "b"]]), "<U1"),
        (np.full((4, 6), np.nan, np.float32), "NaN"),
        (np.full((4, 6), np.inf), r"floats must be in \[0, 1\], got inf"),
        (np.linspace(0, 255, 24).reshape(4, 6), "got 0 to 255; divide by 255"),
        (np.full((4, 6), -0.01), "-0.01"),
    ],
)
def test_arrays_that_cannot_be_used(array: np.ndarray, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        load_image(array)


def test_tensors_that_cannot_be_used() -> None:
    with pytest.raises(ImageError, match="sparse"):
        load_image(torch.eye(4).to_sparse())
    with pytest.raises(ImageError, match="int32"):
        load_image(torch.zeros(3, 4, 5, dtype=torch.int32))


def test_the_pixels_are_nobody_elses() -> None:
    array = colors()
    pixels = load_image(array)
    array[:] = 0
    np.testing.assert_array_equal(pixels, colors())


# --- ImageSource and digests ---


def test_a_file_is_read_once_and_its_bytes_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "picture.png"
    data = encoded(Image.fromarray(colors()))
    path.write_bytes(data)
    reads = []
    monkeypatch.setattr(
        Path, "read_bytes", lambda self, real=Path.read_bytes: reads.append(self) or real(self)
    )
    source = ImageSource.of(path)
    assert reads == []
    assert source.digest == xxhash.xxh3_128(data).hexdigest() == file_digest(data)
    path.unlink()
    pixels = source.pixels()
    assert source.pixels() is pixels
    assert source.digest == file_digest(data)
    assert reads == [path]
    assert source._given is None


def test_the_digest_survives_decoding_without_being_asked_for_first() -> None:
    data = encoded(Image.fromarray(colors()))
    source = ImageSource.of(data)
    source.pixels()
    assert source.digest == file_digest(data)


def test_only_files_have_a_digest() -> None:
    for given in (colors(), torch.from_numpy(colors()), Image.fromarray(colors())):
        source = ImageSource.of(given)
        assert source.digest is None
        source.pixels()
        assert source.digest is None


def test_many_threads_decode_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    real = images._decode_file
    monkeypatch.setattr(images, "_decode_file", lambda *args: decoded.append(1) or real(*args))
    source = ImageSource.of(encoded(Image.fromarray(colors(300, 300))))
    start = threading.Barrier(8)
    seen = []

    def look() -> None:
        start.wait(timeout=30)
        seen.append((id(source.pixels()), source.digest))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert decoded == [1]


def test_a_failure_is_told_each_time() -> None:
    source = ImageSource.of(b"no image")
    for _ in range(2):
        with pytest.raises(ImageDecodeError):
            source.pixels()
    assert source.digest == file_digest(b"no image")


def test_an_image_known_by_its_digest_only() -> None:
    digest = file_digest(b"x")
    source = ImageSource.from_digest(digest.upper())
    assert source.digest == digest
    with pytest.raises(ImageNotCachedError, match=digest):
        source.pixels()
    for wrong in ("", "abc", "g" * 32, "../../etc/passwd"):
        with pytest.raises(ValueError, match="32 hex digits"):
            ImageSource.from_digest(wrong)


def test_a_source_is_taken_as_it_is() -> None:
    source = ImageSource.of(colors())
    assert ImageSource.of(source) is source


def test_pixel_digests_know_values_and_shape() -> None:
    pixels = colors(4, 6)
    assert pixel_digest(pixels) == pixel_digest(pixels.copy())
    assert pixel_digest(np.asfortranarray(pixels)) == pixel_digest(pixels)
    changed = pixels.copy()
    changed[3, 5, 2] ^= 1
    others = [
        pixel_digest(changed),
        pixel_digest(pixels.reshape(6, 4, 3)),
        file_digest(pixels.tobytes()),
    ]
    assert len({pixel_digest(pixels), *others}) == 4


# --- the resize ---


@pytest.mark.parametrize(
    "shape", [(480, 640), (1080, 1920), (64, 64), (224, 224), (1, 1), (3, 500), (1008, 7)]
)
@pytest.mark.parametrize("size", [224, 1008])
def test_the_resize_is_upstreams_bit_for_bit(shape: tuple[int, int], size: int) -> None:
    pixels = colors(*shape)
    upstream = v2.Resize((size, size))
    for image in (
        v2.functional.to_image(Image.fromarray(pixels)),
        torch.from_numpy(pixels).permute(2, 0, 1).contiguous(),
    ):
        expected = upstream(image).permute(1, 2, 0).numpy()
        resized = resize_to_square(pixels, size)
        assert resized.flags.c_contiguous
        np.testing.assert_array_equal(resized, expected)


def test_the_resize_takes_read_only_pixels_without_a_warning() -> None:
    pixels = colors()
    pixels.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resize_to_square(pixels, 32).shape == (32, 32, 3)


def test_importing_it_is_light() -> None:
    heavy = (
        "torch",
        "torchvision",
        "ray",
        "PIL.Image",
        "skimage",
        "scipy",
        "matplotlib",
        "contourpy",
    )
    code = (
        "import sys, sam3_ray.images, sam3_ray.masks, sam3_ray.result; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
