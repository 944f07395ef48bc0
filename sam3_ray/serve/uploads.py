"""A request's body as it arrives: bounded in bytes and in time, and in what all bodies take together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.requests import Request

from sam3_ray.serve.config import ServeConfig
from sam3_ray.serve.errors import Problem, ProblemError, ProblemType
from sam3_ray.settings import settings

GIB = 1024**3


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    Attributes:
        max_upload_bytes: of an image file.
        max_prompts: phrases of one request.
        upload_space_bytes: of all bodies that are here at a time, those that wait for a replica included.
        upload_idle_s: a body may pause this long, in seconds.
        upload_grace_s: after this time in seconds a body must have come at ``upload_bytes_per_s`` since.
        upload_bytes_per_s: slower than any network that a person would wait for.
    """

    max_upload_bytes: int
    max_prompts: int
    upload_space_bytes: int = 2 * GIB
    upload_idle_s: float = 10.0
    upload_grace_s: float = 10.0
    upload_bytes_per_s: float = 4096.0


def limits_of(config: ServeConfig) -> Limits:
    """The limits of a configuration, with the environment's where it has none."""
    knobs = settings()
    return Limits(
        max_upload_bytes=config.max_upload_bytes or knobs.max_upload_bytes,
        max_prompts=config.max_prompts or knobs.max_prompts,
    )


class UploadSpace:
    """The bytes of all bodies that are here, in one event loop.

    Requests may be many, for one that waits for its client costs next to nothing; their bodies may not.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0

    @contextmanager
    def place(self) -> Iterator[Callable[[int], None]]:
        """Room for one request's body, given back at the end.

        Gives a function that takes so many bytes more, and raises ProblemError where there is no room.
        """
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if self.used_bytes + count > self._limit_bytes:
                raise ProblemError(
                    Problem(
                        ProblemType.OVER_CAPACITY,
                        f"the uploads that are under way fill the {self._limit_bytes} bytes for them",
                        retry_after_s=1,
                    )
                )
            self.used_bytes += count
            taken += count

        try:
            yield take
        finally:
            self.used_bytes -= taken


class Body:
    """The body of one request; read it once.

    Args:
        request: whose.
        limits: that hold for it.
        take: of ``UploadSpace.place``.
    """

    def __init__(self, request: Request, limits: Limits, take: Callable[[int], None]) -> None:
        self._request = request
        self._limits = limits
        self._take = take

    async def read(self, limit_bytes: int) -> bytes:
        """All of it.

        Raises:
            ProblemError: see :meth:`chunks`.
        """
        return b"".join([chunk async for chunk in self.chunks(limit_bytes)])

    async def chunks(self, limit_bytes: int) -> AsyncGenerator[bytes, None]:
        """It as it comes.

        Raises:
            ProblemError: 413 as soon as more than ``limit_bytes`` are declared or here, 408 where it comes
                too slowly, 503 where too much else is here.
        """
        declared = self._request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit_bytes:
            raise too_large(self._limits)
        loop = asyncio.get_running_loop()
        started = loop.time()
        seen = 0
        stream = self._request.stream()
        while True:
            try:
                async with asyncio.timeout(self._limits.upload_idle_s) as pause:
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                if not pause.expired():
                    raise
                raise self._slow(f"nothing came for {self._limits.upload_idle_s:g} s") from error
            seen += len(chunk)
            if seen > limit_bytes:
                raise too_large(self._limits)
            late_s = loop.time() - started - self._limits.upload_grace_s
            if seen < late_s * self._limits.upload_bytes_per_s:
                raise self._slow(
                    f"{seen} bytes in {loop.time() - started:.0f} s, at least "
                    f"{self._limits.upload_bytes_per_s:g} a second are wanted"
                )
            self._take(len(chunk))
            yield chunk

    @staticmethod
    def _slow(what: str) -> ProblemError:
        return ProblemError(Problem(ProblemType.SLOW_UPLOAD, f"{what}; send the request again"))


def too_large(limits: Limits) -> ProblemError:
    """413 for an image file, or a body around one, above the limit."""
    return ProblemError(
        Problem(
            ProblemType.TOO_LARGE, f"an image file may have {limits.max_upload_bytes} bytes at most"
        )
    )
