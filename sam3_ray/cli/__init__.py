"""The command line, one file a command. ``sam3-ray`` is :func:`main`."""

from sam3_ray.cli.main import main

__all__ = ["main"]
