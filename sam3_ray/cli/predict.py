"""``sam3-ray predict``: images and phrases in; tables, JSON or pictures out. No service, no Ray."""

from __future__ import annotations

import argparse
import io
import json
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam3_ray.cli.main import CommandError
from sam3_ray.cli.options import add_model_arguments, add_prompt_argument, decide_model, say

if TYPE_CHECKING:
    from sam3_ray.api import Sam3
    from sam3_ray.result import Sam3Result

DESCRIPTION = """\
Find every instance of noun phrases in images, in this process: on a Tenstorrent chip, or on the CPU where
there is none.

Which weights: --checkpoint auto (the default, and the same rule as the service's) means SAM3's weights
(SAM3_WEIGHTS_DIR, or facebook/sam3 from the Hub); on a machine without chips where they cannot be had, the
small demo checkpoint, which only knows coloured shapes. A warning says so.

An image that cannot be used is named on stderr, the others still get their answers, and the exit code is 1.
"""

EXAMPLES = """\
examples:
  sam3-ray predict photo.jpg --prompt "red circle"
  sam3-ray predict photo.jpg --prompt car --prompt person -o overlay.png
  sam3-ray predict pictures/*.jpg --prompt dog -o overlays/
  sam3-ray predict photo.jpg --prompt car --json --masks > answer.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="image files")
    add_prompt_argument(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH",
        help="write the pictures with masks, boxes and scores: a file such as overlay.png for one image, "
        "or a folder for any number",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON document on stdout instead of tables"
    )
    parser.add_argument(
        "--masks", action="store_true", help="with --json: also the masks, as COCO RLE"
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--backend",
        choices=("auto", "cpu", "blackhole"),
        default="auto",
        help="where the model runs (default: auto)",
    )


@dataclass(frozen=True)
class _Outcome:
    """One image's answer: results, or what went wrong."""

    image: Path
    results: Sequence[Sam3Result] = ()
    error: str | None = None
    overlay: Path | None = None


def run(arguments: argparse.Namespace) -> int:
    """Answer for each image."""
    if arguments.masks and not arguments.json:
        raise CommandError("--masks goes with --json", exit_code=2)
    targets = _targets(arguments.images, arguments.output)
    model, about = _open_model(arguments)
    failed = 0
    documents = []
    with model:
        for outcome in _progress(_answers(model, arguments, targets), len(arguments.images)):
            if outcome.error is not None:
                failed += 1
                say(outcome.error)
            if arguments.json:
                documents.append(_document(outcome, arguments.masks))
            elif outcome.error is None:
                _write(_table(outcome))
    if arguments.json:
        print(json.dumps({**about, "images": documents}, indent=2, ensure_ascii=False))
    if failed:
        say(f"{failed} of {len(arguments.images)} images failed")
    return 1 if failed else 0


def _open_model(arguments: argparse.Namespace) -> tuple[Sam3, dict[str, Any]]:
    from sam3_ray.errors import CheckpointError, WeightsAccessError, WeightsNotFoundError

    plan = decide_model(arguments, arguments.backend)
    from sam3_ray.api import Sam3

    try:
        model = Sam3.from_pretrained(
            plan.repo_id,
            revision=plan.revision,
            checkpoint_path=plan.checkpoint_path,
            backend=plan.backend,
        )
    except (CheckpointError, WeightsNotFoundError, WeightsAccessError) as error:
        raise CommandError(str(error)) from error
    return model, {"checkpoint": plan.checkpoint.label, "backend": plan.backend}


def _answers(
    model: Sam3, arguments: argparse.Namespace, targets: dict[int, Path]
) -> Iterator[_Outcome]:
    """An outcome for each image, in order."""
    # A missing file is named here, in the shell's words; the model sees what is there.
    missing = {i: _missing(path) for i, path in enumerate(arguments.images)}
    answers = model.predict_iter(
        (path for i, path in enumerate(arguments.images) if missing[i] is None),
        arguments.prompts,
        on_error="return",
        threshold=arguments.threshold,
        max_instances=arguments.max_instances,
    )
    for i, image in enumerate(arguments.images):
        if missing[i] is not None:
            yield _Outcome(image, error=missing[i])
            continue
        answer = next(answers)
        if isinstance(answer, Exception):
            yield _Outcome(image, error=_message(image, answer))
            continue
        error = _draw(image, answer, targets[i]) if i in targets else None
        yield _Outcome(image, answer, error, targets.get(i))


def _missing(path: Path) -> str | None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"{path}: no such file"
    except OSError as error:  # a name that is too long, a folder that may not be entered
        return f"{path}: {error.strerror}"
    return f"{path} is a folder; give its images: {path}/*" if stat.S_ISDIR(mode) else None


def _message(image: Path, error: Exception) -> str:
    """The error with the image's name; its number among the images that are there says nothing here."""
    text = re.sub(r"^image \d+ \(.*?\): ", "", str(error))
    return text if text.startswith(str(image)) else f"{image}: {text}"


# -- pictures --------------------------------------------------------------------------------------


def _targets(images: Sequence[Path], output: str | None) -> dict[int, Path]:
    """Where each image's picture goes; checked before the model is loaded, which takes its time."""
    if output is None:
        return {}
    from PIL import Image

    target = Path(output)
    try:
        is_folder = target.is_dir()
    except OSError as error:
        raise CommandError(f"--output {output}: {error.strerror}") from error
    if is_folder or output.endswith(("/", "\\")) or not target.suffix:
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"--output {output}: {error.strerror}") from error
        targets = _names_in(target, images)
    elif len(images) > 1:
        raise CommandError(
            f"--output {output} is one file, but there are {len(images)} images; give a folder",
            exit_code=2,
        )
    else:
        Image.init()
        picture_format = Image.EXTENSION.get(target.suffix.lower())
        if picture_format not in Image.SAVE:
            raise CommandError(
                f"--output {output}: no picture format is called {target.suffix!r}; take .png",
                exit_code=2,
            )
        try:
            Image.new("RGB", (16, 16)).save(io.BytesIO(), picture_format)
        except (OSError, ValueError, KeyError) as error:  # formats that are for other pixels
            raise CommandError(
                f"--output {output}: {target.suffix} cannot hold such a picture ({error}); take .png",
                exit_code=2,
            ) from error
        if not target.parent.is_dir():
            raise CommandError(f"--output {output}: there is no folder {target.parent}")
        targets = {0: target}
    inputs = {image.resolve() for image in images}
    for path in targets.values():
        if path.resolve() in inputs:
            raise CommandError(f"--output would overwrite the image {path}", exit_code=2)
    return targets


def _names_in(folder: Path, images: Sequence[Path]) -> dict[int, Path]:
    """A file name for each image; two images of the same name get different ones."""
    targets: dict[int, Path] = {}
    taken = set()
    for i, image in enumerate(images):
        name, number = f"{image.stem}.overlay.png", 1
        while name in taken:
            number += 1
            name = f"{image.stem}-{number}.overlay.png"
        taken.add(name)
        targets[i] = folder / name
    return targets


def _draw(image: Path, results: Sequence[Sam3Result], target: Path) -> str | None:
    """Write the picture; what went wrong, if anything."""
    from sam3_ray.overlay import draw_overlay

    try:
        draw_overlay(image, results).save(target)
    except (
        OSError,
        ValueError,
    ) as error:  # ValueError: a format's own limits, such as WebP's 16383 pixels
        reason = getattr(error, "strerror", None) or error
        return f"{image}: the picture {target} cannot be written: {reason}"
    return None


# -- what is printed -------------------------------------------------------------------------------


def _table(outcome: _Outcome) -> str:
    first = outcome.results[0]
    lines = [f"{outcome.image}  {first.width} x {first.height}"]
    for result in outcome.results:
        count = "nothing" if not len(result) else f"{len(result)} found"
        more = ", more were cut off" if result.truncated else ""
        lines.append(f'  "{result.prompt}": {count}{more} (presence {result.presence:.3f})')
        if len(result):
            lines.append(
                f"    {'score':>5}  {'x0':>8} {'y0':>8} {'x1':>8} {'y1':>8}  {'mask px':>9}"
            )
        areas = result.mask_areas() or [0] * len(result)
        for score, box, area in zip(result.scores, result.boxes, areas, strict=True):
            edges = " ".join(f"{edge:8.1f}" for edge in box)
            lines.append(f"    {score:5.3f}  {edges}  {area:9d}")
    if outcome.overlay is not None:
        lines.append(f"  -> {outcome.overlay}")
    return "\n".join(lines)


def _document(outcome: _Outcome, masks: bool) -> dict[str, Any]:
    if outcome.error is not None:
        return {"image": str(outcome.image), "error": outcome.error}
    from sam3_ray.masks import mask_to_rle

    results = []
    for result in outcome.results:
        document = result.to_dict()
        if masks and result.masks is not None:
            for instance, mask in zip(document["instances"], result.masks, strict=True):
                instance["mask"] = mask_to_rle(mask)
        results.append(document)
    overlay = {} if outcome.overlay is None else {"overlay": str(outcome.overlay)}
    return {"image": str(outcome.image), "results": results, **overlay}


def _progress(outcomes: Iterable[_Outcome], total: int) -> Iterable[_Outcome]:
    """A bar on stderr for several images, where a person looks at it."""
    if total == 1:
        return outcomes
    from tqdm import tqdm

    bar: Iterable[_Outcome] = tqdm(
        outcomes, total=total, unit="image", file=sys.stderr, disable=None
    )
    return bar


def _write(text: str) -> None:
    """Print above the bar."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stdout)
