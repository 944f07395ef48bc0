"""Options that several commands have, and which model they mean."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Literal

from sam3_ray.cli.main import CommandError
from sam3_ray.prompt import (
    DEFAULT_MAX_INSTANCES,
    DEFAULT_THRESHOLD,
    MAX_INSTANCES_LIMIT,
    as_prompts,
    checked_threshold,
)

if TYPE_CHECKING:
    from sam3_ray.serve.plan import Plan


def add_prompt_argument(parser: argparse.ArgumentParser, *, help_more: str = "") -> None:
    """``--prompt``, as often as wanted; ``prompts`` is a list of phrases."""
    parser.add_argument(
        "--prompt",
        "-p",
        action="append",
        required=True,
        type=phrase,
        dest="prompts",
        metavar="PHRASE",
        help=f"a noun phrase; may be given several times{help_more}",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What is kept of the answers, and which weights give them."""
    parser.add_argument(
        "--threshold",
        type=threshold,
        default=DEFAULT_THRESHOLD,
        help="keep instances with a score above it (default: %(default)s)",
    )
    parser.add_argument(
        "--max-instances",
        type=instances,
        default=DEFAULT_MAX_INSTANCES,
        metavar="N",
        help="at most so many instances a phrase, highest scores first (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        default="auto",
        help="auto, demo, a Hub repository such as facebook/sam3, or the path of a sam3.pt (default: auto)",
    )
    parser.add_argument("--revision", help="revision of the Hub repository")


def decide_model(
    arguments: argparse.Namespace, backend: Literal["auto", "cpu", "blackhole"]
) -> Plan:
    """The weights and the backend that the options mean on this machine, by the service's rules.

    Raises:
        CommandError: there are none such.
    """
    from sam3_ray import chips
    from sam3_ray.serve.config import ServeConfigError, load_config
    from sam3_ray.serve.preflight import PreflightError, decide

    try:
        config = load_config(
            {
                "checkpoint": arguments.checkpoint,
                "revision": arguments.revision,
                "backend": backend,
                "replicas": 1,
            }
        )
        plan, why_demo = decide(config, len(chips.look().visible()))
    except (PreflightError, ServeConfigError, ValueError) as error:
        raise CommandError(str(error)) from error
    if why_demo is not None:
        say(f"warning: {why_demo}; this is the demo checkpoint, which only knows coloured shapes")
    return plan


def say(message: str) -> None:
    """A line for the person at the terminal, above a bar that is there."""
    from tqdm import tqdm

    tqdm.write(f"sam3-ray: {message}", file=sys.stderr)


def phrase(text: str) -> str:
    """A noun phrase."""
    try:
        return as_prompts(text)[0].text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def threshold(text: str) -> float:
    """A score of 0 to 1."""
    try:
        return checked_threshold(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def instances(text: str) -> int:
    """A number of instances that may be asked for."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= MAX_INSTANCES_LIMIT:
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_INSTANCES_LIMIT}, got {text!r}")
    return count
