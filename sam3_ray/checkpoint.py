"""Find, download, verify and map a checkpoint in the layout of facebook/sam3's ``sam3.pt``.

A local checkpoint never touches the Hub. A file is memory-mapped: weights are read where they lie.
"""

from __future__ import annotations

import logging
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam3_ray.config import FULL, Sam3Config
from sam3_ray.errors import CheckpointError, WeightsAccessError, WeightsNotFoundError
from sam3_ray.hub import hub_problem
from sam3_ray.settings import (
    CHECKPOINT_FILE,
    DEMO_REPO_ID,
    PINNED_REVISION,
    REPO_ID,
    settings,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("sam3_ray")

DEMO_CHECKPOINT = Path(__file__).parent / "demo" / "sam3_demo.pt"
CONFIG_KEY = "sam3_ray_config"
DETECTOR_PREFIX = "detector."


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: the file.
        label: what ``/info`` and every answer call it: ``demo``, ``facebook/sam3@3c879f39``, or a
            file's name.
        revision: the Hub revision, None for a local file.
    """

    path: Path
    label: str
    revision: str | None = None

    @property
    def is_demo(self) -> bool:
        """Whether it is the small checkpoint that ships in the package."""
        return self.label == DEMO_REPO_ID


def local_checkpoint(
    repo_id: str = REPO_ID,
    *,
    revision: str | None = None,
    checkpoint_path: str | Path | None = None,
) -> Checkpoint | None:
    """The checkpoint where it is on this disk, without asking the Hub; None where it is not.

    Looks at ``checkpoint_path``, then SAM3_WEIGHTS_DIR (for the default repository), then the Hub's cache.

    Raises:
        WeightsNotFoundError: ``checkpoint_path`` or SAM3_WEIGHTS_DIR names something that is not there.
    """
    if checkpoint_path is not None:
        path = _file_at(Path(checkpoint_path).expanduser(), "checkpoint_path")
        return Checkpoint(path, DEMO_REPO_ID if _is_demo(path) else path.name)
    if repo_id == DEMO_REPO_ID:
        return Checkpoint(_file_at(DEMO_CHECKPOINT, "the packaged demo checkpoint"), DEMO_REPO_ID)
    weights_dir = settings().weights_dir
    if weights_dir is not None and repo_id == REPO_ID:
        path = _file_at(weights_dir, "SAM3_WEIGHTS_DIR")
        return Checkpoint(path, DEMO_REPO_ID if _is_demo(path) else path.name)
    from huggingface_hub import try_to_load_from_cache

    revision = revision or settings().weights_revision or PINNED_REVISION
    cached = try_to_load_from_cache(repo_id, CHECKPOINT_FILE, revision=revision)
    if not isinstance(cached, str):
        return None
    return Checkpoint(Path(cached), f"{repo_id}@{revision[:8]}", revision)


def find_checkpoint(
    repo_id: str = REPO_ID,
    *,
    revision: str | None = None,
    checkpoint_path: str | Path | None = None,
) -> Checkpoint:
    """The checkpoint, from this disk or else downloaded from the Hub.

    Args:
        repo_id: a Hub repository that holds ``sam3.pt``, or ``demo``.
        revision: of the repository; default TT_WEIGHTS_REVISION, else ``PINNED_REVISION``.
        checkpoint_path: a ``sam3.pt`` or a folder that holds it; never touches the Hub.

    Raises:
        WeightsNotFoundError: not on this disk and not to be had from the Hub.
        WeightsAccessError: the Hub refuses the gated repository.
    """
    found = local_checkpoint(repo_id, revision=revision, checkpoint_path=checkpoint_path)
    if found is not None:
        return found
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    revision = revision or settings().weights_revision or PINNED_REVISION
    page = f"https://huggingface.co/{repo_id}"
    weights = f"{repo_id}'s {CHECKPOINT_FILE} (revision {revision[:8]})"
    other_ways = (
        "A copy on disk does too: SAM3_WEIGHTS_DIR=<folder with sam3.pt>, or checkpoint_path=... in Python. "
        'To try the program without the weights: repo_id="demo" (or --checkpoint demo).'
    )
    # hf_hub_download itself retries for half a minute, on the console, where there is no network.
    problem = hub_problem()
    if problem is not None:
        raise WeightsNotFoundError(f"{weights} is not on this disk, and {problem}", other_ways)
    try:
        path = hf_hub_download(repo_id, CHECKPOINT_FILE, revision=revision)
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise WeightsAccessError(
            f"{repo_id} is gated, and the Hub refused it",
            f"Request access at {page}, then run `hf auth login` once with a token that may read it. "
            f"{other_ways}",
        ) from error
    except LocalEntryNotFoundError as error:
        raise WeightsNotFoundError(
            f"{weights} is not on this disk, and the Hub cannot be reached", other_ways
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise WeightsNotFoundError(
            f"{weights} could not be downloaded from {page}: {error}", other_ways
        ) from error
    return Checkpoint(Path(path), f"{repo_id}@{revision[:8]}", revision)


def load_checkpoint(path: Path) -> tuple[Sam3Config, dict[str, Tensor]]:
    """Map a checkpoint's image model: its dimensions, and its tensors without the ``detector.`` prefix.

    Tensors stay memory-mapped and in the file's data type. Keys of the video tracker are left out.

    Raises:
        WeightsNotFoundError: no such file.
        CheckpointError: it cannot be read, or is no SAM3 checkpoint.
    """
    import torch

    if not path.is_file():
        raise WeightsNotFoundError(f"no checkpoint at {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (
        RuntimeError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        EOFError,
        ValueError,
        KeyError,
    ) as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {str(error).splitlines()[0]}. "
            "The file is broken or incomplete (or no torch file at all): fetch it again."
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, not a checkpoint's dict of tensors"
        )
    config = config_of(content, path)
    tensors = content["model"] if isinstance(content.get("model"), Mapping) else content
    weights = {
        key.removeprefix(DETECTOR_PREFIX): value
        for key, value in tensors.items()
        if isinstance(key, str)
        and key.startswith(DETECTOR_PREFIX)
        and isinstance(value, torch.Tensor)
    }
    if not weights:
        raise CheckpointError(
            f"{path} holds no tensor whose name starts with '{DETECTOR_PREFIX}': it is no SAM3 checkpoint "
            f"(first names: {[str(k) for k in list(tensors)[:3]]})"
        )
    return config, weights


def checkpoint_fingerprint(path: Path) -> str:
    """A name for a checkpoint's content, in hexadecimal: the same wherever the file lies.

    torch's files are zip archives, whose table of contents holds a checksum of every tensor: hashing that
    takes milliseconds, hashing 3.4 GB does not.

    Raises:
        CheckpointError: the file is no such archive.
    """
    import xxhash

    digest = xxhash.xxh3_128()
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                # The first folder is the name that the file had when it was written.
                name = entry.filename.partition("/")[2]
                digest.update(f"{name} {entry.file_size} {entry.CRC}\n".encode())
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    return digest.hexdigest()


def check_weights(
    config: Sam3Config,
    expected: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
    path: Path,
) -> None:
    """Compare what the model needs with what the file has; all differences are named at once.

    Keys beyond the model's are upstream's second neck and video parts: logged, not an error.

    Raises:
        CheckpointError: missing tensors, or tensors of another shape.
    """
    missing = sorted(set(expected) - set(weights))
    wrong = [
        f"{key}: {tuple(weights[key].shape)}, expected {expected[key]}"
        for key in sorted(set(expected) & set(weights))
        if tuple(weights[key].shape) != tuple(expected[key])
    ]
    if missing or wrong:
        raise CheckpointError(
            f"{path} does not fit the model of its configuration (image {config.image_size}, "
            f"ViT {config.vit_width}x{config.vit_depth}): {len(missing)} missing {_first(missing)}, "
            f"{len(wrong)} of another shape {_first(wrong)}"
        )
    unused = sorted(set(weights) - set(expected))
    if unused:
        logger.info(
            "%s: %d tensors are not of the image model %s", path, len(unused), _first(unused)
        )


def _first(names: list[str], count: int = 8) -> str:
    return str(names[:count]) + (" ..." if len(names) > count else "")


def config_of(content: Mapping[str, Any], path: Path) -> Sam3Config:
    """The dimensions that a checkpoint's top-level dict carries; without any, the full model's.

    Raises:
        CheckpointError: they cannot be read, or do not fit each other.
    """
    values = content.get(CONFIG_KEY)
    if values is None:
        return FULL
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{path}: {CONFIG_KEY} is a {type(values).__name__}, not a dict")
    try:
        return Sam3Config.from_dict(values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _is_demo(path: Path) -> bool:
    return DEMO_CHECKPOINT.is_file() and path.resolve() == DEMO_CHECKPOINT.resolve()


def _file_at(path: Path, what: str) -> Path:
    candidate = path / CHECKPOINT_FILE if path.is_dir() else path
    if not candidate.is_file():
        missing = f"a folder without {CHECKPOINT_FILE}" if path.is_dir() else "not there"
        raise WeightsNotFoundError(f"{what}: {path} is {missing}")
    return candidate
