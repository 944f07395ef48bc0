"""The Ray that a job runs on: the one that is connected, else one of its own that goes with it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from sam3_ray import chips
from sam3_ray.local_ray import keep_ray_on_loopback
from sam3_ray.settings import MIB

OBJECT_STORE_BYTES = 256 * MIB
"""Paths go in and labels come out; the images themselves are read by the actors."""


def this_actor() -> Any:
    """Ray's runtime context of the actor that this process is; None in any other process."""
    import ray

    if not ray.is_initialized():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # outside of an actor Ray warns
        context = ray.get_runtime_context()
        return None if context.get_actor_id() is None else context


@contextmanager
def ray_session(
    backend: Literal["auto", "cpu", "blackhole"], size: int | None
) -> Iterator[Callable[[], None]]:
    """Gives a function that connects this process to Ray, where it is not; what that starts ends here.

    Args:
        backend: where the model will run; without chips, none is counted.
        size: chips that are wanted; None: all.

    Raises:
        ValueError: TT_VISIBLE_DEVICES names a chip that is not here.
    """
    keep_ray_on_loopback()
    import ray

    if ray.is_initialized():
        yield lambda: None
        return
    visible = () if backend == "cpu" else chips.look().visible()[:size]

    def connect() -> None:
        for name, value in {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # Both write to the console of whoever asked; what matters comes back as an exception.
            "RAY_BACKEND_LOG_LEVEL": "fatal",
            "RAY_DATA_LOG_LEVEL": "CRITICAL",
        }.items():
            os.environ.setdefault(name, value)
        if visible:
            os.environ[chips.VISIBLE_DEVICES] = chips.visible_devices_value(visible)
        for last in (False, True):
            try:
                start()
                break
            except Exception as error:  # Ray raises a bare Exception, among others
                ray.shutdown()
                # Ray gives itself 30 s, which a machine that is busy with other things can miss.
                if last or "timed out during startup" not in str(error):
                    raise

    def start() -> None:
        ray.init(
            address="local",
            include_dashboard=False,
            resources={chips.RAY_RESOURCE: len(visible)} if visible else None,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    try:
        yield connect
    finally:
        ray.shutdown()
