"""``manifest.json``: what a folder of labels was made with, and whether it is finished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from sam3_ray import __version__
from sam3_ray.data.files import replace_file

MANIFEST_FILE = "manifest.json"


class ManifestError(ValueError):
    """A manifest that this program did not write."""


class ArgumentsDifferError(ValueError):
    """A folder holds labels that were made with other arguments."""


@dataclass(frozen=True)
class Arguments:
    """What decides which labels an image gets, and where they are written.

    Attributes:
        source: with local paths made absolute.
        prompts: a text, or [text, threshold] where a phrase has its own.
        threshold, max_instances, masks, shard_size: as in ``label_images``.
        checkpoint: its label, such as ``facebook/sam3@3c879f39``.
        checkpoint_hash: of its content.
        backend: ``cpu`` or ``blackhole``.
        exif, max_image_pixels: of the environment (``sam3_ray.settings``).
    """

    source: str
    prompts: list[Any]
    threshold: float
    max_instances: int
    masks: str
    shard_size: int
    checkpoint: str
    checkpoint_hash: str
    backend: str
    exif: bool
    max_image_pixels: int

    @property
    def phrases(self) -> list[str]:
        """The texts of the prompts."""
        return [one if isinstance(one, str) else str(one[0]) for one in self.prompts]


@dataclass(frozen=True)
class Manifest:
    """The file's content.

    Attributes:
        arguments: of the run.
        version: of ``sam3_ray`` that ran last.
        finished: whether every image of the plan is in labels or errors, and what was asked is written.
        counts: images, labelled, errors, instances; empty before the end.
        formats: what has been written.
    """

    arguments: Arguments
    version: str = __version__
    finished: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    formats: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        replace_file(folder / MANIFEST_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where there is none.

    Raises:
        ManifestError: it is no manifest of this program.
    """
    path = folder / MANIFEST_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        arguments = Arguments(**values.pop("arguments"))
        return Manifest(arguments, **{**values, "formats": tuple(values["formats"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ManifestError(f"{path} is no manifest of `sam3-ray label`: {error}") from error


def check_same(folder: Path, old: Arguments, new: Arguments) -> None:
    """Check that a run may go on in a folder.

    Raises:
        ArgumentsDifferError: naming everything that differs.
    """
    before, now = asdict(old), asdict(new)
    differ = [
        f"{one.name} was {_shown(before, one.name)}, is {_shown(now, one.name)}"
        for one in fields(Arguments)
        if before[one.name] != now[one.name]
    ]
    if differ:
        raise ArgumentsDifferError(
            f"{folder} holds labels that were made with other arguments: {'; '.join(differ)}. Give the "
            "same arguments to go on with them, or another folder"
        )


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False)
