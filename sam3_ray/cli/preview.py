"""``sam3-ray preview``: a contact sheet of a folder of labels."""

from __future__ import annotations

import argparse
from pathlib import Path

from sam3_ray.cli.main import CommandError

DESCRIPTION = """\
Write preview.html into a folder of labels: some of its images with what was found in them, and counts for
each class. The file has the pictures in it and opens without a network. A run that is not finished can be
looked at too.
"""

EXAMPLES = """\
examples:
  sam3-ray preview labels
  sam3-ray preview labels --n 200
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="that `sam3-ray label` wrote")
    parser.add_argument(
        "--n", type=int, default=50, metavar="N", help="images (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write it."""
    from sam3_ray.data.preview import write_preview

    try:
        print(write_preview(arguments.folder, arguments.n))
    except (ValueError, FileNotFoundError) as error:
        raise CommandError(str(error), exit_code=2) from error
    return 0
