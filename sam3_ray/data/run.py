"""``label_images``: a whole job in one call, which can be killed at any moment and called again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sam3_ray import __version__
from sam3_ray.checkpoint import checkpoint_fingerprint, find_checkpoint
from sam3_ray.data.changes import take_out_changed
from sam3_ray.data.coco import write_coco
from sam3_ray.data.files import only_run_in
from sam3_ray.data.labeler import check_prompts
from sam3_ray.data.machine import Actors, plan_actors
from sam3_ray.data.manifest import Arguments, Manifest, check_same, read_manifest
from sam3_ray.data.openings import told
from sam3_ray.data.output import (
    ERRORS,
    ERRORS_TOLD,
    LABELS,
    RunFolder,
    failures,
    instances_in,
    label_files,
)
from sam3_ray.data.plan import Plan, Shard, read_plan
from sam3_ray.data.pool import attempts_folder, batch_rows, blocks_of, results_of
from sam3_ray.data.preview import write_preview
from sam3_ray.data.progress import Meter, Progress, max_errors_of
from sam3_ray.data.ray_session import ray_session
from sam3_ray.data.schema import PLANNED, MaskFormat
from sam3_ray.data.sources import SourceError, list_inputs
from sam3_ray.data.statistics import PhraseCount, count_phrases
from sam3_ray.data.yolo import write_yolo
from sam3_ray.images import ImageSource
from sam3_ray.prompt import DEFAULT_MAX_INSTANCES, DEFAULT_THRESHOLD, Prompt, Request
from sam3_ray.settings import REPO_ID, settings

if TYPE_CHECKING:
    from sam3_ray.engine import Engine

Format = Literal["parquet", "coco", "yolo"]
FORMATS: tuple[Format, ...] = ("parquet", "coco", "yolo")

SHARD_SIZE = 512
DEFAULT_MAX_ERRORS = 0.5
COCO_FILE = "instances.json"
PREVIEW_FILE = "preview.html"
YOLO_FOLDER = "yolo"
PREVIEW_IMAGES = 50


@dataclass(frozen=True)
class LabelSummary:
    """What a job did.

    Attributes:
        out: the folder.
        images: of the plan, each of which is labelled or an error.
        labelled, errors: of those.
        first_errors: ``path: message`` of the first few; all are in ``errors/``.
        instances: of all labels.
        phrases: for each prompt, its images and instances.
        new_images: labelled, or tried, by this call; the others are of earlier ones.
        changed: of those, images whose file has changed since an earlier call.
        out_of_order: for each chip that did not open, which and why; the others did its share.
        seconds: that this call took.
        checkpoint: its label.
        backend: ``cpu`` or ``blackhole``; ``custom`` with ``open_engine``.
        other_files: files of the source that are no pictures by their name.
        files: what there is to use: the folders of labels and errors, and what the formats asked for.
    """

    out: Path
    images: int
    labelled: int
    errors: int
    first_errors: tuple[str, ...]
    instances: int
    phrases: dict[str, PhraseCount]
    new_images: int
    changed: int
    out_of_order: tuple[str, ...]
    seconds: float
    checkpoint: str
    backend: str
    other_files: int
    files: tuple[Path, ...]


def label_images(
    source: str | os.PathLike[str],
    prompts: str | Prompt | Sequence[str | Prompt],
    out: str | os.PathLike[str],
    *,
    threshold: float = DEFAULT_THRESHOLD,
    max_instances: int = DEFAULT_MAX_INSTANCES,
    masks: MaskFormat = "rle",
    formats: Sequence[Format] = ("parquet", "coco"),
    chips: Literal["auto", "cpu"] | int = "auto",
    shard_size: int = SHARD_SIZE,
    max_errors: float | str | None = DEFAULT_MAX_ERRORS,
    preview: bool | int = False,
    repo_id: str = REPO_ID,
    revision: str | None = None,
    checkpoint_path: str | os.PathLike[str] | None = None,
    on_progress: Callable[[Progress], object] | None = None,
    open_engine: Callable[[], Engine] | None = None,
) -> LabelSummary:
    """Label every image of a source, and write what is found into a folder.

    Called again with the same arguments it goes on where it was killed, and adds what the source has got
    since. It uses the Ray that this process is connected to, else starts one of its own and stops it.

    Args:
        source: a folder, a glob, a text file of paths, a Parquet table with a column ``path`` or ``bytes``,
            a picture, or a URI of these (``sam3_ray.data.sources``).
        prompts: the phrases to look for.
        out: the folder to write; a local one, or on a file system that all nodes of the cluster have there.
        threshold: keep instances with a score above it.
        max_instances: at most so many a phrase and image, highest scores first (1 to 200).
        masks: ``rle``, ``polygon`` or ``none``.
        formats: ``parquet`` (always written), ``coco``, ``yolo``.
        chips: how many; ``auto``: all there are, or the CPU; ``cpu``.
        shard_size: images of a part file.
        max_errors: stop above so many errors (an int) or such a share (a float, ``10%``); None: never.
        preview: write a contact sheet of 50, or so many, images at the end.
        repo_id, revision, checkpoint_path: the weights, as in ``Sam3.from_pretrained``.
        on_progress: told after each batch how far it is.
        open_engine: opens something else than ``Sam3.from_pretrained`` would, in each actor.

    Raises:
        SourceError, TypeError, ValueError: arguments that do not fit.
        ArgumentsDifferError: the folder has labels that were made with others.
        WeightsNotFoundError, WeightsAccessError, CheckpointError: of the weights.
        FolderInUseError: another run writes into the same folder.
        TooManyErrorsError: ``max_errors`` stopped it.
        LabellingError: it ended otherwise before all was labelled.
    """
    started = time.monotonic()
    asked = check_prompts(prompts)
    Request(ImageSource.from_digest("0" * 32), asked, threshold, max_instances)
    _check_choices(formats, shard_size)
    limit = max_errors_of(max_errors)
    folder = Path(os.path.abspath(os.path.expanduser(out)))
    if folder.exists() and not folder.is_dir():
        raise SourceError(f"{folder} is a file: give a folder for the labels")
    inputs = list_inputs(source, exclude=folder)
    weights = {"repo_id": repo_id, "checkpoint_path": checkpoint_path}
    backend, size = _backend(chips)
    if open_engine is None:
        checkpoint = find_checkpoint(
            repo_id,
            revision=revision,
            checkpoint_path=None if checkpoint_path is None else Path(checkpoint_path),
        )
        label, fingerprint = checkpoint.label, checkpoint_fingerprint(checkpoint.path)
    else:
        label, fingerprint = "custom", ""
    with only_run_in(folder), ray_session(backend, size) as connect:
        known = read_manifest(folder)
        if known is None and label_files(folder):
            raise SourceError(f"{folder} has labels and no manifest: give another folder")
        if open_engine is None and backend == "auto":
            backend = plan_actors("auto", size=size, **weights).backend  # type: ignore[arg-type]
        arguments = Arguments(
            source=inputs.source,
            prompts=[p.text if p.threshold is None else [p.text, p.threshold] for p in asked],
            threshold=float(threshold),
            max_instances=max_instances,
            masks=masks,
            shard_size=shard_size,
            checkpoint=label,
            checkpoint_hash=fingerprint,
            backend=backend if open_engine is None else "custom",
            exif=settings().exif,
            max_image_pixels=settings().max_image_pixels,
        )
        if known is not None:
            check_same(folder, known.arguments, arguments)
        manifest = Manifest(arguments)
        run = RunFolder(folder, masks)
        plan = read_plan(folder)
        manifest.save(folder)  # not finished
        changed = take_out_changed(run, plan, inputs.stamps)
        # Only now: a run that is killed before that finds the same files changed again.
        plan = plan.stamped(inputs.stamps).grown(list(inputs.stamps.items()), shard_size)
        plan.save(folder)
        remaining = {shard.number: run.remaining(shard) for shard in plan.shards}
        meter = _meter(run, plan, remaining)
        if any(remaining.values()):
            connect()
            actors = plan_actors(backend, size=size, **weights)  # type: ignore[arg-type]
            constructor = {
                "prompts": list(asked),
                "threshold": threshold,
                "max_instances": max_instances,
                "masks": masks,
                "keep": [field.name for field in PLANNED],
                "repo_id": repo_id,
                "revision": revision,
                "checkpoint_path": None
                if checkpoint_path is None
                else os.path.abspath(checkpoint_path),
                "backend": actors.backend,
                "num_threads": actors.num_threads,
                "open_engine": open_engine,
            }
            _label(run, plan, remaining, actors, constructor, meter, limit.check, on_progress)
        for shard in plan.shards:  # killed between its last batch and its files
            if not run.is_done(shard):
                run.finish(shard)
        run.clean()
        files = [folder / LABELS, folder / ERRORS]
        root_of = list(plan.paths())
        if "coco" in formats:
            write_coco(folder / COCO_FILE, label_files(folder), arguments, root_of)
            files.append(folder / COCO_FILE)
        if "yolo" in formats:
            write_yolo(folder / YOLO_FOLDER, label_files(folder), arguments, root_of)
            files.append(folder / YOLO_FOLDER)
        phrases, labelled = count_phrases(label_files(folder), arguments.phrases)
        instances = sum(one.instances for one in phrases.values())
        errors = plan.images - labelled
        counts = {
            "images": plan.images,
            "labelled": labelled,
            "errors": errors,
            "instances": instances,
        }
        written = tuple(name for name in FORMATS if name == "parquet" or name in formats)
        replace(manifest, version=__version__, finished=True, counts=counts, formats=written).save(
            folder
        )
        if preview:
            count = PREVIEW_IMAGES if preview is True else int(preview)
            write_preview(folder, count)
            files.append(folder / PREVIEW_FILE)
    return LabelSummary(
        out=folder,
        images=plan.images,
        labelled=labelled,
        errors=errors,
        first_errors=tuple(run.first_errors()),
        instances=instances,
        phrases=phrases,
        new_images=meter.images,
        changed=changed,
        out_of_order=meter.out,
        seconds=time.monotonic() - started,
        checkpoint=label,
        backend=arguments.backend,
        other_files=inputs.other_files,
        files=tuple(files),
    )


def _check_choices(formats: Sequence[str], shard_size: int) -> None:
    unknown = sorted(set(formats) - set(FORMATS))
    if unknown or isinstance(formats, str):
        raise ValueError(f"formats are of {', '.join(FORMATS)}, got {formats!r}")
    if isinstance(shard_size, bool) or not isinstance(shard_size, int) or shard_size < 1:
        raise ValueError(f"shard_size must be at least 1, got {shard_size!r}")


def _backend(
    chips: Literal["auto", "cpu"] | int,
) -> tuple[Literal["auto", "cpu", "blackhole"], int | None]:
    if chips == "auto" or chips == "cpu":
        return chips, None
    if isinstance(chips, bool) or not isinstance(chips, int) or chips < 1:
        raise ValueError(f"chips is auto, cpu, or a number of at least 1, got {chips!r}")
    return "blackhole", chips


def _meter(run: RunFolder, plan: Plan, remaining: dict[int, list[tuple[int, str]]]) -> Meter:
    instances = errors = 0
    for shard in plan.shards:
        if len(remaining[shard.number]) < len(shard):
            found = run.counts(shard)
            instances, errors = instances + found[0], errors + found[1]
    return Meter(plan.images, plan.images - sum(map(len, remaining.values())), instances, errors)


def _label(
    run: RunFolder,
    plan: Plan,
    remaining: dict[int, list[tuple[int, str]]],
    actors: Actors,
    constructor: dict[str, Any],
    meter: Meter,
    check: Callable[[int, int, Sequence[str]], None],
    on_progress: Callable[[Progress], object] | None,
) -> None:
    """Have the actors label what remains; each batch goes into the folder as it comes."""
    images = sum(map(len, remaining.values()))
    actors = replace(actors, size=min(actors.size, images))
    with attempts_folder(run.folder) as attempts:
        constructor = {**constructor, "attempts": str(attempts), "actors": actors.size}
        shard_of = {
            image_id: plan.shards[number]
            for number, pairs in remaining.items()
            for image_id, _ in pairs
        }
        failed: list[str] = []
        blocks = list(blocks_of(remaining, batch_rows(actors, images)))
        with closing(results_of(blocks, actors, constructor)) as results:
            for table in results:
                shard: Shard = shard_of[table["image_id"][0].as_py()]
                run.add(shard, table)
                errors = len(table) - table["error"].null_count
                meter.add(len(table), instances_in(table), errors)
                failed = [*failed, *failures(table)][:ERRORS_TOLD]
                meter.out = told(attempts)
                if on_progress is not None:
                    on_progress(meter.progress())
                check(meter.errors, meter.images, failed)
