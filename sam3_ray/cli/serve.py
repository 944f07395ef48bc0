"""``sam3-ray serve``: check, start, wait until healthy, stay until stopped, leave nothing behind."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sam3_ray import __version__
from sam3_ray.cli.main import INTERRUPTED, CommandError

if TYPE_CHECKING:
    from sam3_ray.serve.launch import LocalService
    from sam3_ray.serve.preflight import Launch
    from sam3_ray.serve.proxies import ProxyMode

DESCRIPTION = """\
Start the HTTP service on this machine, in a Ray of its own: one replica on each Tenstorrent chip, or one on
the CPU where there is no chip. Weights, chips, port and configuration are checked first. Ctrl-C stops it.

checkpoint `auto` means: SAM3's weights (SAM3_WEIGHTS_DIR, or facebook/sam3 from the Hub); on a machine
without chips where they cannot be had, the small demo checkpoint, which only knows coloured shapes.
"""

EXAMPLES = """\
examples:
  sam3-ray serve                                  serve_config.yaml of this folder, else built-in defaults
  sam3-ray serve my_config.yaml --port 9000
  sam3-ray serve --checkpoint demo --backend cpu
  sam3-ray serve --checkpoint /data/sam3.pt --host 0.0.0.0
  TT_VISIBLE_DEVICES=0,1 sam3-ray serve           only these chips
"""

WATCH_S = 1.0
STATUS_EVERY_S = 10.0
TERMINATED = 143


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG",
        help="a Serve configuration file (default: ./serve_config.yaml where it exists, else built-in)",
    )
    parser.add_argument("--host", help="address to listen on; 0.0.0.0 is every interface")
    parser.add_argument("--port", type=int, help="port to listen on")
    parser.add_argument(
        "--checkpoint",
        help="auto, demo, a Hub repository such as facebook/sam3, or the path of a sam3.pt",
    )
    parser.add_argument("--revision", help="revision of the Hub repository")
    parser.add_argument(
        "--backend", choices=("auto", "cpu", "blackhole"), help="where the model runs"
    )
    parser.add_argument(
        "--chips", type=int, help="how many chips to serve on (default: all; without any, the CPU)"
    )
    parser.add_argument(
        "--replicas", type=int, help="how many replicas (default: one a chip; on a CPU one)"
    )
    parser.add_argument(
        "--proxy",
        default="auto",
        choices=("auto", "plain", "throughput", "haproxy"),
        help="what stands in front: auto is the cheapest that works with the configuration (docs/serving.md)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        help="port of the metrics for Prometheus (default: any free one)",
    )
    parser.add_argument("--dashboard", action="store_true", help="also start Ray's dashboard")
    parser.add_argument("--verbose", action="store_true", help="show Ray's and Serve's messages")


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    # Before anything else: a stop while modules are imported must not leave a half-started Ray.
    stopper = _Stopper()
    say("checking configuration, chips and weights ...")
    from sam3_ray.local_ray import keep_ray_on_loopback
    from sam3_ray.serve.launch import LaunchError, LocalService

    keep_ray_on_loopback()
    launch = _check(arguments)
    for note in launch.notes:
        say(f"note: {note}")
    service = LocalService(
        launch,
        proxy=_proxy(arguments.proxy, launch),
        verbose=arguments.verbose,
        dashboard=arguments.dashboard,
        metrics_port=arguments.metrics_port,
    )
    say("starting ...")
    try:
        service.start(lambda what: say(f"still starting: {what}"))
        stopper.quiet()
        print(_greeting(launch, service.metrics_url), flush=True)
        _watch(service, stopper.stopped)
        say("stopping ...")
        return 0
    except LaunchError as error:
        where = f" (Ray's logs: {service.log_folder})" if service.log_folder else ""
        raise CommandError(f"{error}{where}") from error
    except (KeyboardInterrupt, SystemExit) as stop:
        say("stopped before the service was ready")
        # While Ray starts, its own handler of SIGTERM is in place, which raises SystemExit.
        terminated = isinstance(stop, SystemExit) or stopper.signal == signal.SIGTERM
        return TERMINATED if terminated else INTERRUPTED
    finally:
        stopper.loud()
        service.stop()


def _check(arguments: argparse.Namespace) -> Launch:
    from sam3_ray.serve.address import AddressError, check_port
    from sam3_ray.serve.preflight import Overrides, PreflightError, check

    chosen = {
        name: getattr(arguments, name)
        for name in ("checkpoint", "revision", "backend", "chips", "replicas")
        if getattr(arguments, name) is not None
    }
    try:
        launch = check(arguments.config, Overrides(arguments.host, arguments.port, chosen))
        if arguments.metrics_port is not None:
            if arguments.metrics_port == launch.values["http_options"].get("port", 8000):
                raise PreflightError(
                    f"--metrics-port {arguments.metrics_port} is the service's own port; choose another"
                )
            check_port("127.0.0.1", arguments.metrics_port, "--metrics-port")
        return launch
    except (PreflightError, AddressError) as error:
        raise CommandError(str(error)) from error


def _proxy(wanted: str, launch: Launch) -> ProxyMode:
    from sam3_ray.serve.proxies import ProxyError, choose

    try:
        return choose(wanted, launch.values.get("http_options", {}))
    except ProxyError as error:
        raise CommandError(str(error)) from error


def _greeting(launch: Launch, metrics_url: str | None) -> str:
    plan = launch.plan
    device = "the CPU" if plan.backend == "cpu" else f"{plan.replicas} Tenstorrent chip(s)"
    lines = [f"sam3_ray {__version__} is ready: {launch.url}"]
    if launch.everywhere:
        lines.append("It listens on all interfaces: everyone who reaches this machine can use it.")
    if plan.checkpoint.is_demo:
        lines.append(
            f"It serves the DEMO checkpoint on {device}, which only knows coloured shapes "
            '(such as "red circle").'
        )
        if launch.why_demo is not None:
            lines.append(f"Why: {launch.why_demo}. The README tells how to get SAM3's weights.")
    else:
        lines.append(f"It serves {plan.checkpoint.label} on {device}.")
    if metrics_url is not None:
        lines.append(f"Metrics for Prometheus: {metrics_url}")
    lines.append("Ctrl-C stops it.")
    return "\n".join(lines)


def _watch(service: LocalService, stopped: threading.Event) -> None:
    """Wait for a signal; say it when the service falls ill, and when it is well again."""
    from ray.exceptions import RayError

    was: str | None = None
    next_look = time.monotonic() + STATUS_EVERY_S
    while not stopped.wait(WATCH_S):
        service.check_alive()
        if time.monotonic() < next_look:
            continue
        next_look = time.monotonic() + STATUS_EVERY_S
        try:
            now = service.trouble()
        except RayError as error:
            now = str(error).splitlines()[0]
        if now != was:
            say(f"unhealthy: {now}" if now else "healthy again")
            was = now


def say(message: str) -> None:
    """A line for the person at the terminal; not for a program that reads stdout."""
    with contextlib.suppress(BrokenPipeError):
        print(f"sam3-ray: {message}", file=sys.stderr, flush=True)


class _Stopper:
    """SIGINT, SIGTERM and SIGHUP: an interrupt while starting and stopping, an event while serving."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.signal: int | None = None
        self._quiet = False
        self._install()

    def quiet(self) -> None:
        """From now on only set the event."""
        self._quiet = True
        self._install()  # Ray has put its own handler of SIGTERM in its place

    def loud(self) -> None:
        """From now on interrupt again: whoever asks a second time will not wait."""
        self._quiet = False
        self._install()

    def _install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.stopped.set()
        if not self._quiet:
            raise KeyboardInterrupt
