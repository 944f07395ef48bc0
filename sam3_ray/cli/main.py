"""``sam3-ray``: reads which command is asked for, and loads that command only.

``sam3-ray --help`` must be quick: argparse, and no import of a command, numpy, torch or ray here.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from sam3_ray import __version__

COMMANDS = {
    "serve": "start the HTTP service on this machine",
    "predict": "find objects in images, here, without a service",
    "label": "label many images into Parquet, COCO and YOLO, on all chips",
    "preview": "a contact sheet of labels, as one HTML file",
    "chips": "list the Tenstorrent chips and their replicas, park one, enable ETH dispatch",
    "cache": "what the running service keeps of images and phrases, and forgetting it",
    "doctor": "check this machine: what is here, and what to do about what is not",
}
"""Each is a module of this package with ``DESCRIPTION``, ``EXAMPLES``, ``add_arguments`` and ``run``."""

EXAMPLES = """\
examples:
  sam3-ray serve                                   then open http://127.0.0.1:8000
  sam3-ray predict photo.jpg --prompt "red circle"
  sam3-ray label pictures/ --prompt car --out labels
  sam3-ray doctor

`sam3-ray COMMAND --help` has a command's options and more examples.
"""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

BROKEN_PIPE = 141
"""Exit code where the reader of our output went away: 128 + SIGPIPE."""


class CommandError(Exception):
    """What ends a command: its message is printed, without a traceback.

    Attributes:
        exit_code: of the process; never 0.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: of the command line; default those of the process.

    Returns:
        The exit code: 0; 1 where the command failed; 2 where the command line is wrong.
    """
    _prepare_streams()
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            sys.stdout.flush()  # here, where a reader that went away is noticed
    except CommandError as error:
        print(f"sam3-ray: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _give_stdout_up()
        return BROKEN_PIPE
    except OSError as error:
        # A file has a name; what is left is the output itself.
        if (
            error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
            or error.filename
        ):
            raise
        _give_stdout_up()
        print(f"sam3-ray: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _prepare_streams() -> None:
    """Have output that works: a name of a file need not be text, and a stream may be closed (``>&-``)."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            # Its number too, or the next file that is opened would get it, and what is written to it.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))
        elif stream.errors == "strict" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _give_stdout_up() -> None:
    """Python flushes stdout once more at exit: give it something that takes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="sam3-ray",
        description="SAM3 text-prompted instance segmentation, on Tenstorrent Blackhole chips or the CPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sam3-ray {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    command = None
    for name, summary in COMMANDS.items():
        if name != asked:
            commands.add_parser(name, help=summary)
            continue
        command = importlib.import_module(f"sam3_ray.cli.{name}")
        options = commands.add_parser(
            name,
            help=summary,
            description=command.DESCRIPTION,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(options)
    if not arguments:
        parser.print_help()
        return 2
    parsed = parser.parse_args(arguments)
    assert command is not None  # argparse has refused any other word
    if asked != "doctor":  # which tells of them among other things
        from sam3_ray.settings import settings

        try:
            settings()
        except ValueError as error:
            raise CommandError(str(error)) from error
    return int(command.run(parsed))
