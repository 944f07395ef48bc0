"""The service that runs on this machine or cluster, reached through Ray, for commands that look after it."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sam3_ray.cli.main import CommandError

APPLICATION = "sam3"
CALL_TIMEOUT_S = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which service."""
    parser.add_argument(
        "--address",
        default="auto",
        help="address of its Ray (default: the one that runs on this machine, or RAY_ADDRESS)",
    )
    parser.add_argument(
        "--application",
        default=APPLICATION,
        help=f"its name in Serve's configuration (default: {APPLICATION})",
    )


def ray_runs_here() -> bool:
    """Whether a Ray node runs on this machine. Quick: Ray is not imported."""
    import psutil

    return any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"]))


class Service:
    """A running service, as the ingress answers by handle.

    Args:
        handle: of the application.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the ingress.

        Raises:
            CommandError: it did not answer, or refused.
        """
        from ray.exceptions import RayTaskError

        try:
            return getattr(self._handle, method).remote(*arguments).result(timeout_s=CALL_TIMEOUT_S)
        except TimeoutError as error:
            raise CommandError(f"the service did not answer within {CALL_TIMEOUT_S:g} s") from error
        except RayTaskError as error:
            raise CommandError(str(error.cause)) from error


@contextmanager
def service(address: str, application: str) -> Iterator[Service]:
    """Connect to the Ray of a service, and leave it as it was.

    Raises:
        CommandError: no Ray there, or no such application in it.
    """
    from sam3_ray.local_ray import keep_ray_on_loopback

    keep_ray_on_loopback()
    # Throughput mode, where the user's shell has it set, would want an event loop of ours for a handle.
    os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        ray.init(
            address=address,
            namespace="serve",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError) as error:
        raise CommandError(
            f"no Ray to connect to ({address}): start the service first, or give --address"
        ) from error
    try:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            yield Service(serve.get_app_handle(application))
        except RayServeException as error:
            raise CommandError(
                f"no application {application!r} in the Ray at {address}: {error}"
            ) from error
    finally:
        ray.shutdown()
