"""``sam3-ray cache``: what the replicas of a running service keep, and forgetting it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from sam3_ray.cli.running import add_arguments as add_service_arguments
from sam3_ray.cli.running import service
from sam3_ray.cli.table import print_table
from sam3_ray.settings import MIB

DESCRIPTION = """\
List what the replicas of the running service keep (images' features, phrases), or have all of them forget it.
"""

EXAMPLES = """\
examples:
  sam3-ray cache ls
  sam3-ray cache clear
"""


HEADINGS = ("place", "images", "MiB", "of", "hits", "misses", "phrases")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("action", choices=("ls", "clear"), help="what to do")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    add_service_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """List, or clear."""
    with service(arguments.address, arguments.application) as running:
        if arguments.action == "clear":
            cleared = running.call("clear_caches")
            print(json.dumps({"cleared": cleared}) if arguments.json else f"{cleared} cleared")
            return 0
        replicas = running.call("info")["replicas"]
    if arguments.json:
        print(json.dumps({"replicas": [_document(replica) for replica in replicas]}, indent=2))
        return 0
    print_table([HEADINGS, *(_row(replica) for replica in replicas)])
    return 0


def _document(replica: dict[str, Any]) -> dict[str, Any]:
    names = ("place", "chip", "parked", "image_cache", "text_cache")
    return {name: replica.get(name) for name in names}


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    images, phrases = replica.get("image_cache"), replica.get("text_cache")
    if images is None or phrases is None:
        return (str(replica["place"]), *["-"] * 6)
    return (
        str(replica["place"]),
        str(images["entries"]),
        f"{images['size'] / MIB:.0f}",
        f"{images['budget'] / MIB:.0f}",
        str(images["hits"]),
        str(images["misses"]),
        str(phrases["entries"]),
    )
