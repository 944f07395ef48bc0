"""One line of JSON a request, and its id: ``X-Request-Id`` in and out."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"

CLIENT_GONE = 499
"""Status of a request whose client hung up, as the log and the metrics have it."""

logger = logging.getLogger("sam3_ray.requests")

_ALLOWED = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

_SHORT_DIGEST = 8


def request_id(given: str | None) -> str:
    """The client's id where it is printable and short, else a new one: an id must not forge log lines."""
    return given if given is not None and _ALLOWED.fullmatch(given) else uuid.uuid4().hex


def note(scope: Scope, **fields: Any) -> None:
    """Add fields to the line of the request of this scope; ``digest`` is cut short."""
    if "digest" in fields:
        fields["digest"] = str(fields["digest"])[:_SHORT_DIGEST]
    scope.setdefault("state", {}).setdefault("request_log", {}).update(fields)


class RequestLog:
    """Gives every request an id, answers it, and logs one line at its end. The answer's ``Server-Timing`` has
    ``after-body``: milliseconds from the last of the body to the answer's first byte.

    The line has ``id``, ``method``, ``path`` (no query), ``status`` (499: the client went away), ``ms``, and
    what ``note`` added: ``digest``, ``caller``, ``problem``, ``replica`` and the stages in ``timing_ms``.

    Args:
        app: the application.
        count: told the status of each.
        id_is_answered: what is in front of the application answers the id that came, well formed or not.
    """

    def __init__(
        self,
        app: ASGIApp,
        count: Callable[[int], None] | None = None,
        id_is_answered: bool = False,
    ) -> None:
        self.app = app
        self._count = count
        self._id_is_answered = id_is_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER)
        identity = request_id(given)
        id_header = [(HEADER.lower().encode(), identity.encode())]
        if self._id_is_answered and identity == given:
            id_header = []
        note(scope, id=identity)
        started = time.perf_counter()
        status = CLIENT_GONE

        body_came = started

        async def receive_and_look() -> Message:
            nonlocal body_came
            message = await receive()
            if message["type"] == "http.request":
                body_came = time.perf_counter()
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                after_body_ms = (time.perf_counter() - body_came) * 1000.0
                message["headers"] = [
                    *message.get("headers", []),
                    *id_header,
                    (b"server-timing", f"after-body;dur={after_body_ms:.1f}".encode()),
                ]
            await send(message)

        try:
            await self.app(scope, receive_and_look, send_with_id)
        finally:
            line = {
                "id": identity,
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "ms": round((time.perf_counter() - started) * 1000.0, 2),
            }
            if self._count is not None:
                self._count(status)
            logger.info(json.dumps(line | scope["state"]["request_log"], default=str))
