"""``sam3-ray label``: a folder, list or table of images in; labels as Parquet, COCO and YOLO out."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sam3_ray.cli.main import CommandError
from sam3_ray.cli.options import add_model_arguments, add_prompt_argument, decide_model, say

if TYPE_CHECKING:
    from sam3_ray.data import LabelSummary, Progress

DESCRIPTION = """\
Label many images, on every Tenstorrent chip of this machine or on the CPU where there is none, into a folder:
labels/ and errors/ (Parquet), instances.json (COCO), yolo/ where asked, manifest.json.

SOURCE is a folder (with its folders), a glob in quotes, a text file with a path or URI a line, a Parquet
table with a column `path` or `bytes`, one picture, or a URI of these (s3://...).

Stop it at any moment, and start it again with the same command: it goes on. Every image ends in exactly one
of labels/ and errors/. The same command also adds what the source has got since, and labels files again that
have changed.

checkpoint `auto` means: SAM3's weights (SAM3_WEIGHTS_DIR, or facebook/sam3 from the Hub); on a machine
without chips where they cannot be had, the small demo checkpoint, which only knows coloured shapes.

exit codes: 0 all are labelled, 3 some are in errors/, 2 the command is wrong, 1 it failed.
"""

EXAMPLES = """\
examples:
  sam3-ray label pictures/ --prompt car --prompt person --out labels
  sam3-ray label 'shots/**/*.jpg' --prompt dog --out labels --format coco,yolo --masks polygon
  sam3-ray label s3://bucket/pictures --prompt car --out labels --chips 4 --preview
  sam3-ray label table.parquet --prompt car --out labels --max-errors 5%
"""

SOME_ERRORS = 3
LINE_EVERY_S = 10.0
WRONG_USE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("source", metavar="SOURCE", help="what to label")
    add_prompt_argument(parser, help_more=", and is a category of the COCO file")
    parser.add_argument(
        "--out", "-o", required=True, type=Path, metavar="DIR", help="the folder to write"
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--masks",
        choices=("rle", "polygon", "none"),
        default="rle",
        help="form of the masks (default: %(default)s)",
    )
    parser.add_argument(
        "--format",
        type=_formats,
        default=["parquet", "coco"],
        metavar="LIST",
        help="of parquet, coco, yolo, with commas; parquet is always written (default: parquet,coco)",
    )
    parser.add_argument(
        "--chips",
        type=_chips,
        default="auto",
        metavar="N",
        help="how many chips, auto for all there are (else the CPU), or cpu (default: auto)",
    )
    parser.add_argument(
        "--shard-size",
        type=_positive,
        default=512,
        metavar="N",
        help="images of a part file (default: %(default)s)",
    )
    parser.add_argument(
        "--max-errors",
        type=_max_errors,
        default="50%",
        metavar="N",
        help="stop above so many errors (100), or such a share of the images (10%%), judged from 100 images "
        "on (default: 50%%)",
    )
    parser.add_argument(
        "--preview",
        action="store_true",
        help="at the end also write preview.html, a contact sheet of 50 images",
    )


def run(arguments: argparse.Namespace) -> int:
    """Label, and tell."""
    from sam3_ray.local_ray import StartedProcesses, adopt_orphans, keep_ray_on_loopback

    keep_ray_on_loopback()
    adopt_orphans()
    processes = StartedProcesses()
    try:
        summary = _label(arguments)
    except KeyboardInterrupt:
        say("stopped; the same command goes on with it")
        raise
    finally:
        processes.end(lambda: None)
    print(_told(summary))
    return SOME_ERRORS if summary.errors else 0


def _label(arguments: argparse.Namespace) -> LabelSummary:
    wanted = arguments.chips
    backend: Literal["auto", "cpu", "blackhole"]
    backend = "blackhole" if isinstance(wanted, int) else wanted
    plan = decide_model(arguments, backend)
    from sam3_ray.data import label_images
    from sam3_ray.data.files import FolderInUseError
    from sam3_ray.data.machine import NoSuchChipsError
    from sam3_ray.data.manifest import ArgumentsDifferError, ManifestError
    from sam3_ray.data.plan import PlanError
    from sam3_ray.data.pool import LabellingError
    from sam3_ray.data.progress import TooManyErrorsError
    from sam3_ray.data.sources import SourceError
    from sam3_ray.errors import CheckpointError, WeightsAccessError, WeightsNotFoundError

    told = _Told()
    try:
        return label_images(
            arguments.source,
            arguments.prompts,
            arguments.out,
            threshold=arguments.threshold,
            max_instances=arguments.max_instances,
            masks=arguments.masks,
            formats=arguments.format,
            chips="cpu" if plan.backend == "cpu" else wanted,
            shard_size=arguments.shard_size,
            max_errors=arguments.max_errors,
            preview=arguments.preview,
            repo_id=plan.repo_id,
            revision=plan.revision,
            checkpoint_path=plan.checkpoint_path,
            on_progress=told,
        )
    except (CheckpointError, WeightsNotFoundError, WeightsAccessError) as error:
        raise CommandError(str(error)) from error
    except (SourceError, ManifestError, PlanError, ArgumentsDifferError, NoSuchChipsError) as error:
        raise CommandError(str(error), exit_code=WRONG_USE) from error
    except LabellingError as error:
        raise CommandError(f"{error}. The same command goes on with what is left") from error
    except (FolderInUseError, TooManyErrorsError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise CommandError(f"{error.filename}: {error.strerror}") from error
    finally:
        told.close()


class _Told:
    """A bar where a person looks at it; a line now and then where not."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._person = sys.stderr.isatty()
        self._next_line = 0.0
        self._out: tuple[str, ...] = ()

    def __call__(self, progress: Progress) -> None:
        from tqdm import tqdm

        for told in set(progress.out) - set(self._out):
            say(f"out of order, the others go on: {told}")
        self._out = progress.out
        if not self._person:
            now = time.monotonic()
            if now >= self._next_line or progress.done == progress.total:
                self._next_line = now + LINE_EVERY_S
                say(_line(progress))
            return
        if self._bar is None:
            self._bar = tqdm(total=progress.total, unit="image", file=sys.stderr)
            self._bar.initial = self._bar.n = progress.done  # of earlier runs: no part of the rate
        self._bar.set_postfix(instances=progress.instances, errors=progress.errors, refresh=False)
        self._bar.update(progress.done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _line(progress: Progress) -> str:
    parts = [
        f"{progress.done} of {progress.total} images",
        f"{progress.instances} instances",
        f"{progress.errors} errors",
    ]
    if progress.images_per_s is not None and progress.seconds_left is not None:
        parts += [f"{progress.images_per_s:.1f} images/s", f"{_time(progress.seconds_left)} left"]
    return ", ".join(parts)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _told(summary: LabelSummary) -> str:
    earlier = summary.images - summary.new_images
    device = {"cpu": "the CPU", "blackhole": "Tenstorrent chips"}.get(summary.backend, "")
    lines = [
        f"{summary.labelled} images labelled, {summary.errors} errors, {summary.instances} instances "
        f"({summary.checkpoint} on {device}, {_time(summary.seconds)})",
    ]
    lines += [f"  {told}" for told in summary.first_errors]
    if len(summary.first_errors) < summary.errors:
        lines.append(f"  and {summary.errors - len(summary.first_errors)} more")
    if earlier:
        lines.append(f"{earlier} images were done before, {summary.new_images} are new")
    lines += [f"out of order, the others did its share: {told}" for told in summary.out_of_order]
    if summary.changed:
        lines.append(f"files that have changed since, and were labelled again: {summary.changed}")
    if summary.other_files:
        lines.append(f"files of the source that are no pictures: {summary.other_files}")
    width = max(map(len, summary.phrases))
    lines += [
        f"  {name:{width}}  {count.instances} in {count.images} images"
        for name, count in summary.phrases.items()
    ]
    lines += [str(path) for path in summary.files]
    return "\n".join(lines)


# -- values of options -----------------------------------------------------------------------------


def _formats(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - {"parquet", "coco", "yolo"})
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'} is no format; there are parquet, coco and yolo"
        )
    return names


def _chips(text: str) -> str | int:
    if text in ("auto", "cpu"):
        return text
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither auto, cpu nor a number of chips")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r}")
    return int(text)


def _max_errors(text: str) -> str:
    from sam3_ray.data.progress import max_errors_of

    try:
        max_errors_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text
