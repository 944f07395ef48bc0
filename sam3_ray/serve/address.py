"""Where the service listens: whether it can, who does already, and its certificate."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INFO_TIMEOUT_S = 3.0
"""For whoever holds our port to say that it is a service of ours; one that is busy takes two."""

INFO_BYTES = 1 << 20
"""More than any ``/info``: what answers may be anything."""

EVERYWHERE = ("0.0.0.0", "::", "")
"""Hosts that mean all interfaces."""


class AddressError(Exception):
    """The service cannot listen as it is told to. The message is for a person."""


class PortInUseError(AddressError):
    """Somebody listens there already.

    Attributes:
        found: who, as far as can be seen.
        todo: what to do about it.
        service: what ``GET /info`` says there, where it is a service of ours; else None.
    """

    def __init__(self, found: str, todo: str, service: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{found}; {todo}")
        self.found, self.todo, self.service = found, todo, service


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """The address as this machine reaches it."""
    address = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Whether this machine can listen there.

    Args:
        host, port: the address.
        option: of ``sam3-ray serve``, that would choose another port.

    Raises:
        PortInUseError: another program does; named where that can be seen.
        AddressError: it cannot.
    """
    if not 1 <= port <= 65535:
        raise AddressError(f"port {port} is not a port (1 to 65535)")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (
        OSError,
        UnicodeError,
    ) as error:  # UnicodeError: an empty or endless label between its dots
        reason = getattr(error, "strerror", None) or "not the name of a host"
        raise AddressError(f"host {host!r}: {reason}") from error
    with socket.socket(family, kind, protocol) as probe:
        # As a server: a closed connection's old address is no hindrance. Without SO_REUSEPORT, with which
        # Serve would silently share the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                service = running_service(host, port)
                who = _listener(port)
                if service is not None:
                    who = f" by a sam3_ray that is running: {service['checkpoint']}, {service['backend']}"
                raise PortInUseError(
                    f"port {port} on {host} is in use{who}",
                    "stop that, or choose another port: "
                    f"sam3-ray serve {option} {port + 1 if port < 65535 else 8000}",
                    service,
                ) from error
            reason = {
                errno.EADDRNOTAVAIL: f"{host} is not an address of this machine",
                errno.EACCES: f"port {port} needs more rights (ports below 1024 are the system's)",
            }.get(error.errno or 0, f"cannot listen on {host}:{port}: {error.strerror}")
            raise AddressError(reason) from error


def running_service(host: str, port: int) -> dict[str, Any] | None:
    """What ``GET /info`` says at an address; None where no service of ours answers in time."""
    url = f"{base_url(host, port)}/info"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=INFO_TIMEOUT_S) as response:
            info = json.loads(response.read(INFO_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return None  # not HTTP, not JSON, or nobody answers: another program
    ours = isinstance(info, dict) and info.get("service") == "sam3_ray"
    return info if ours and {"checkpoint", "backend", "version"} <= info.keys() else None


def _listener(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr.port == port
                and connection.pid
            ):
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""


def check_certificate(options: Mapping[str, Any]) -> None:
    """Whether the certificate of ``http_options``, if any, can be used; Serve would start without it.

    Raises:
        AddressError: a file is not there, is none, or does not go with the other.
    """
    names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    given = {name: str(options[name]) for name in names if options.get(name)}
    for name, file in given.items():
        if not Path(file).is_file():
            raise AddressError(f"http_options.{name}: no such file: {file}")
    if len(given.keys() & {"ssl_certfile", "ssl_keyfile"}) == 1:
        raise AddressError("http_options: ssl_certfile and ssl_keyfile go together")
    if "ssl_certfile" not in given:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A string, so that nobody is asked at the terminal.
    password = str(options.get("ssl_keyfile_password") or "")
    try:
        context.load_cert_chain(given["ssl_certfile"], given["ssl_keyfile"], password)
        if "ssl_ca_certs" in given:
            context.load_verify_locations(given["ssl_ca_certs"])
    except OSError as error:  # SSLError is one
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise AddressError(
            f"http_options: the certificate {given['ssl_certfile']} cannot be used: {reason}"
        ) from error
