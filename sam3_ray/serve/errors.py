"""What goes wrong over HTTP: one list of problem types, and ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sam3_ray.errors import ImageDecodeError, ImageError, ImageNotCachedError, ImageTooLargeError

MEDIA_TYPE = "application/problem+json"


class ProblemType(Enum):
    """Every problem: its ``type`` in the body, the HTTP status and the title."""

    UNPARSEABLE_BODY = ("unparseable-body", 400, "The body cannot be parsed")
    INVALID_BASE64 = ("invalid-base64", 400, "The image is not base64")
    NO_IMAGE = ("no-image", 400, "No image")
    UNAUTHORIZED = ("unauthorized", 401, "A key is needed")
    FORBIDDEN = ("forbidden", 403, "The key may not do this")
    NOT_FOUND = ("not-found", 404, "No such resource")
    IMAGE_NOT_CACHED = ("image-not-cached", 404, "The image is not in the cache; send it")
    METHOD_NOT_ALLOWED = ("method-not-allowed", 405, "Method not allowed")
    SLOW_UPLOAD = ("slow-upload", 408, "The body came too slowly")
    TOO_LARGE = ("too-large", 413, "The upload is too large")
    IMAGE_TOO_LARGE = ("image-too-large", 413, "The image has too many pixels")
    ANSWER_TOO_LARGE = ("answer-too-large", 413, "The answer's masks have too many pixels")
    UNSUPPORTED_MEDIA_TYPE = (
        "unsupported-media-type",
        415,
        "The body is of a type that is not read",
    )
    NOT_AN_IMAGE = ("not-an-image", 415, "The file is not an image that is read")
    INVALID_REQUEST = ("invalid-request", 422, "The request is not valid")
    IMAGE_REFUSED = ("image-refused", 422, "The image has ended replicas and is refused")
    INTERNAL = ("internal-error", 500, "The server failed")
    OVER_CAPACITY = ("over-capacity", 503, "Over capacity; try again")
    NO_REPLICA = ("no-replica", 503, "No replica can answer now; try again")
    DEADLINE = ("deadline-exceeded", 504, "No answer before the deadline")

    def __init__(self, slug: str, status: int, title: str) -> None:
        self.slug = slug
        self.status = status
        self.title = title


@dataclass(frozen=True)
class Problem:
    """One problem, ready to be sent.

    Attributes:
        kind: which of the ``ProblemType``s.
        detail: what was wrong this time, with the value, and what to do.
        errors: for ``invalid-request``: (field, message) pairs, one for each fault.
        retry_after_s: seconds to wait before the next try, sent as ``Retry-After``.
        retry_elsewhere: another replica may well answer the same request.
    """

    kind: ProblemType
    detail: str
    errors: tuple[tuple[str, str], ...] = ()
    retry_after_s: float | None = None
    retry_elsewhere: bool = False

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.kind.status

    def to_dict(self) -> dict[str, Any]:
        """The members of RFC 9457, and ``errors``."""
        body: dict[str, Any] = {
            "type": self.kind.slug,
            "title": self.kind.title,
            "status": self.kind.status,
            "detail": self.detail,
        }
        if self.errors:
            body["errors"] = [
                {"field": field, "message": message} for field, message in self.errors
            ]
        return body

    def to_bytes(self) -> bytes:
        """The body."""
        text = json.dumps(self.to_dict(), ensure_ascii=False)
        return text.encode(errors="backslashreplace")  # half a surrogate: as JSON escapes it

    def headers(self) -> dict[str, str]:
        """Headers that go with it, ``Content-Type`` not among them."""
        if self.kind is ProblemType.UNAUTHORIZED:
            return {"WWW-Authenticate": 'Bearer realm="sam3_ray"'}
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


class ProblemError(Exception):
    """A Problem on its way to the client. Survives pickling, so that it crosses Ray's handles."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.problem.kind.slug} ({self.problem.status}): {self.problem.detail}"


def problem_of(error: Exception) -> Problem:
    """What an error of the engine is to a client; anything unknown is the server's own fault."""
    match error:
        case ProblemError():
            return error.problem
        case ImageNotCachedError():
            return Problem(ProblemType.IMAGE_NOT_CACHED, _message(error))
        case ImageTooLargeError():
            return Problem(ProblemType.IMAGE_TOO_LARGE, error.reason)
        case ImageDecodeError():
            return Problem(ProblemType.NOT_AN_IMAGE, error.reason)
        case ImageError():
            return Problem(ProblemType.INVALID_REQUEST, error.reason, (("image", error.reason),))
    return Problem(
        ProblemType.INTERNAL,
        f"{type(error).__name__}: the model failed on this request; the server's log has the details",
        retry_elsewhere=True,
    )


def invalid(field: str, message: str) -> ProblemError:
    """A 422 about one field."""
    return ProblemError(
        Problem(ProblemType.INVALID_REQUEST, f"{field}: {message}", ((field, message),))
    )


def problem_of_status(
    status: int, detail: str, headers: Mapping[str, str] | None = None
) -> Problem:
    """The problem for a status that the web framework came up with (unknown routes, wrong methods)."""
    for kind in (
        ProblemType.NOT_FOUND,
        ProblemType.METHOD_NOT_ALLOWED,
        ProblemType.UNPARSEABLE_BODY,
    ):
        if kind.status == status:
            return Problem(kind, detail)
    return Problem(ProblemType.INTERNAL, detail)


def _message(error: Exception) -> str:
    return str(error.args[0]) if error.args else str(error)
