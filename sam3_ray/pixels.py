"""PIL images, arrays and tensors -> (H, W, 3) uint8 RGB, by the rules in :mod:`sam3_ray.images`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sam3_ray.errors import ImageError

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

Uint8Array = npt.NDArray[np.uint8]

CHANNELS = (1, 3, 4)

_STRIP_BYTES = 256 * 1024
"""Pixels that leave Pillow at a time: it gives them through two copies, which then stay in the CPU's cache
and cost the memory of a strip, not of the image."""


def pixels_of_pil(image: Image.Image, name: str) -> Uint8Array:
    """A decoded PIL image of any mode; ``name`` is for messages.

    Raises:
        ImageError: values out of range, or a mode that has no RGB form.
    """
    mode = image.mode
    if mode.startswith("I;16"):
        return _grey_to_rgb((np.asarray(image) >> 8).astype(np.uint8))
    if mode in ("I", "F"):
        return _grey_to_rgb(_bytes_of_wide_grey(np.asarray(image), mode, name))
    if mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # straight to RGB warns about the alpha that we drop anyway
    elif mode == "La":
        image = image.convert("LA")  # La has no other conversion
    try:
        return _pixels_of_rgb(image if mode == "RGB" else image.convert("RGB"))
    except ValueError as error:
        raise ImageError(f"{name}: PIL mode {mode!r} has no conversion to RGB ({error})") from error


def _pixels_of_rgb(image: Image.Image) -> Uint8Array:
    """An image of mode RGB, strip by strip."""
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _STRIP_BYTES // max(1, 3 * width))
    for top in range(0, height, rows):
        end = min(top + rows, height)
        pixels[top:end] = np.asarray(image.crop((0, top, width, end)))
    return pixels


def _bytes_of_wide_grey(values: npt.NDArray[Any], mode: str, name: str) -> Uint8Array:
    low, high = values.min(), values.max()
    if mode == "I" and low >= 0 and high <= 65535:
        return (values >> 8 if high > 255 else values).astype(np.uint8)
    if mode == "F" and low >= 0 and high <= 255:
        return values.astype(np.uint8) if high > 1 else _bytes_of_unit_floats(values, name)
    allowed = "0 to 65535" if mode == "I" else "[0, 1] or [0, 255]"
    raise ImageError(f"{name}: PIL mode {mode!r} needs values in {allowed}, got {low} to {high}")


def _grey_to_rgb(grey: Uint8Array) -> Uint8Array:
    return np.repeat(grey[:, :, None], 3, axis=2)


def tensor_to_array(tensor: Tensor) -> npt.NDArray[Any]:
    """A torch tensor, wherever it is, as a numpy array.

    Raises:
        ImageError: a dtype or layout that numpy does not know, or a tensor without values (device meta).
    """
    try:
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point() and tensor.element_size() < 4:
            tensor = tensor.float()  # numpy has no bfloat16, and float16 rounds 255.999 up to 256
        array: npt.NDArray[Any] = tensor.numpy()
    except (TypeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        raise ImageError(
            f"tensor: {tensor.dtype}, {tensor.layout} on {tensor.device} has no numpy form: {error}"
        ) from error
    return array


def pixels_of_array(array: npt.NDArray[Any], name: str, *, channels_first: bool) -> Uint8Array:
    """A numpy array; ``channels_first`` says how a shape is read that could be (C, H, W) or (H, W, C).

    Returns:
        Pixels of their own, which share no memory with ``array``.

    Raises:
        ImageError: a shape, dtype or value that cannot be used.
    """
    shown = f"{name} of shape {tuple(array.shape)}, {array.dtype}"
    if array.ndim == 2:
        array = array[:, :, None]
    elif array.ndim == 3:
        first, last = array.shape[0] in CHANNELS, array.shape[2] in CHANNELS
        if not (first or last):
            raise ImageError(
                f"{shown}: neither the first nor the last axis has 1, 3 or 4 channels; "
                "give (H, W), (H, W, 3|4) or (3|4, H, W)"
            )
        if first and (channels_first or not last):
            array = np.moveaxis(array, 0, 2)
    else:
        hint = "; one image at a time: array[0]" if array.ndim == 4 else ""
        raise ImageError(f"{shown}: give (H, W), (H, W, 3|4) or (3|4, H, W){hint}")
    if array.size == 0:
        raise ImageError(f"{shown}: there are no pixels in it")
    values = _bytes_of_values(array[:, :, :3], shown)
    if values.shape[2] == 1:
        return _grey_to_rgb(values[:, :, 0])
    return np.array(values, order="C")  # our own, whatever the caller does with theirs


def _bytes_of_values(values: npt.NDArray[Any], shown: str) -> Uint8Array:
    if values.dtype == np.uint8:
        return np.asarray(values)
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * np.uint8(255)
    if np.issubdtype(values.dtype, np.floating):
        return _bytes_of_unit_floats(values, shown)
    hint = ", for 16-bit values (x >> 8).astype(uint8)" if values.dtype.kind in "iu" else ""
    raise ImageError(f"{shown}: values must be uint8, bool, or floats in [0, 1]{hint}")


def _bytes_of_unit_floats(values: npt.NDArray[Any], shown: str) -> Uint8Array:
    if values.dtype == np.float16:
        values = values.astype(np.float32)  # 255.999 is 256 in float16
    low, high = values.min(), values.max()  # NaN comes through both
    if np.isnan(low):
        raise ImageError(f"{shown}: has NaN values; floats must be in [0, 1]")
    if low < 0 or high > 1:
        hint = "; divide by 255, or convert to uint8" if low >= 0 and high <= 255 else ""
        raise ImageError(f"{shown}: floats must be in [0, 1], got {low:.6g} to {high:.6g}{hint}")
    scaled: Uint8Array = (values * values.dtype.type(255.999)).astype(np.uint8)
    return scaled
