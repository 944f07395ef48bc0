"""Look into a checkpoint without torch and without reading its tensors: is it whole, and a SAM3?

For checks that must be quick, before anything is started. ``sam3_ray.checkpoint`` loads for real.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sam3_ray.checkpoint import DETECTOR_PREFIX, config_of
from sam3_ray.config import Sam3Config
from sam3_ray.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointHeader:
    """What a checkpoint file says of itself.

    Attributes:
        config: the dimensions of its model.
        tensors: how many tensors of the image model it has.
        nbytes: of the file.
    """

    config: Sam3Config
    tensors: int
    nbytes: int


def read_header(path: Path) -> CheckpointHeader:
    """Read the file's directory and its index of tensors; some milliseconds at any size.

    A file that was cut short is noticed, one with wrong bytes inside a tensor is not.

    Raises:
        CheckpointError: it is broken, or no SAM3 checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            index = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if index is None:
                raise CheckpointError(
                    f"{path} is a zip file, but not of torch (it has no data.pkl)"
                )
            with archive.open(index) as file:
                content = _IndexUnpickler(file).load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {str(error) or type(error).__name__}. "
            "The file is broken or incomplete (or no torch file at all): fetch it again."
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds no dict of tensors: it is no SAM3 checkpoint")
    tensors = content["model"] if isinstance(content.get("model"), Mapping) else content
    ours = [key for key in tensors if isinstance(key, str) and key.startswith(DETECTOR_PREFIX)]
    if not ours:
        raise CheckpointError(
            f"{path} holds no tensor whose name starts with '{DETECTOR_PREFIX}': it is no SAM3 checkpoint "
            f"(first names: {[str(key) for key in list(tensors)[:3]]})"
        )
    return CheckpointHeader(config_of(content, path), len(ours), path.stat().st_size)


class _Anything:
    """Stands for whatever class or function the index names; none of them is ever imported or called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class _IndexUnpickler(pickle.Unpickler):
    """Reads dicts, lists and plain values, and a stand-in for everything else: runs nothing of the file's."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Anything

    def persistent_load(self, _: Any) -> Any:
        return _Anything()
