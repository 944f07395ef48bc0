"""A client for the HTTP service: images and phrases in, ``Sam3Result``s out.

It sends an image once: later requests for it carry its digest, and only where the service's cache has let
it go is it sent again. Where the service is over capacity it waits as long as told, and asks again.
"""

from __future__ import annotations

import base64
import io
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import httpx
import numpy as np

from sam3_ray.images import file_digest, load_image, pixel_digest
from sam3_ray.masks import png_to_mask, polygon_to_mask, rle_to_mask
from sam3_ray.prompt import (
    DEFAULT_MAX_INSTANCES,
    DEFAULT_THRESHOLD,
    Prompt,
    as_prompts,
    checked_threshold,
)
from sam3_ray.result import Sam3Result

if TYPE_CHECKING:
    from sam3_ray.images import ImageLike
    from sam3_ray.masks import BoolArray
    from sam3_ray.pixels import Uint8Array

MaskFormat = Literal["rle", "png", "polygon", "none"]

DEFAULT_URL = "http://127.0.0.1:8000"

_REMEMBERED_IMAGES = 4096
"""Digests kept of images sent; some 200 bytes each."""

_DEFAULT_RETRY_AFTER_S = 1.0
"""Where a 503 does not say how long to wait."""


class ServiceError(Exception):
    """The service did not answer a request.

    Attributes:
        status: the HTTP status, None where there was no answer at all.
        type: the problem's fixed name, such as ``image-not-cached``; ``about:blank`` for an answer that is
            not a problem of this service (from a proxy, or not this service at all).
        title: what kind of problem it is.
        detail: what was wrong this time.
    """

    def __init__(
        self, title: str, detail: str = "", *, status: int | None = None, type: str = ""
    ) -> None:
        super().__init__(f"{title}: {detail}" if detail else title)
        self.status = status
        self.type = type or "about:blank"
        self.title = title
        self.detail = detail

    def __str__(self) -> str:
        return str(self.args[0])


class RequestRefusedError(ServiceError, ValueError):
    """The request is at fault (4xx): not an image, too large, a value out of range, a wrong address."""


class OverCapacityError(ServiceError):
    """Still over capacity (503) after the last retry."""


class DeadlineError(ServiceError, TimeoutError):
    """No answer in time: the service's own deadline (504), or this client's timeout."""


class ServerFailedError(ServiceError):
    """The service failed on the request (other 5xx), or sent an answer that cannot be read."""


class UnreachableError(ServiceError, ConnectionError):
    """Nothing answers at the address, or the connection broke."""


@dataclass(frozen=True)
class ClientAnswer:
    """All that the service says of one image.

    Attributes:
        results: one for each phrase, in order.
        image_digest: the service's name for the image.
        cached: the image part came from its cache.
        checkpoint: ``demo``, or the weights' repository and revision.
        timing_ms: the service's stage times in milliseconds.
        replica: who answered.
        chip: the Tenstorrent chip, None on a CPU.
    """

    results: list[Sam3Result]
    image_digest: str
    cached: bool
    checkpoint: str
    timing_ms: dict[str, float]
    replica: str
    chip: int | None


class Client:
    """Talks to one service; may be shared by threads. Use it in a ``with`` statement, or ``close`` it.

    Args:
        url: of the service, such as ``http://127.0.0.1:8000``; a path prefix is kept.
        timeout: seconds for each try of a request, and never less than the service's answer takes.
        retries: how often a request that met a 503 is sent again, each time after the ``Retry-After`` of
            the answer.
        max_retry_wait: seconds; a longer ``Retry-After`` is cut to this.
        headers: sent with every request (an API key, say).
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout: float = 120.0,
        retries: int = 5,
        max_retry_wait: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, got {url!r}")
        if retries < 0:
            raise ValueError(f"retries must be at least 0, got {retries}")
        self.url = url.rstrip("/")
        self._retries = retries
        self._max_retry_wait = max_retry_wait
        self._timeout = timeout
        self._http = httpx.Client(base_url=self.url, timeout=timeout, headers=dict(headers or {}))
        self._sent: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is a Sequence[str] too
        self,
        image: ImageLike,
        prompts: str | Prompt,
        *,
        threshold: float = ...,
        max_instances: int = ...,
        mask_format: MaskFormat = ...,
    ) -> Sam3Result: ...

    @overload
    def predict(
        self,
        image: ImageLike,
        prompts: Sequence[str | Prompt],
        *,
        threshold: float = ...,
        max_instances: int = ...,
        mask_format: MaskFormat = ...,
    ) -> list[Sam3Result]: ...

    def predict(
        self,
        image: ImageLike,
        prompts: str | Prompt | Sequence[str | Prompt],
        *,
        threshold: float = DEFAULT_THRESHOLD,
        max_instances: int = DEFAULT_MAX_INSTANCES,
        mask_format: MaskFormat = "rle",
    ) -> Sam3Result | list[Sam3Result]:
        """Find every instance of the phrases, as ``Sam3`` does in this process.

        Args:
            image: anything that ``sam3_ray.load_image`` takes. Files and bytes go as they are; arrays,
                tensors and PIL images as PNG, which loses nothing.
            prompts: a phrase, or several.
            threshold: keep instances with a score above it; a ``Prompt`` may bring its own.
            max_instances: at most so many a phrase (1 to 200), highest scores first.
            mask_format: how masks travel. ``rle`` and ``png`` are exact, ``polygon`` is within a pixel of
                the outline; ``none`` leaves them out (``masks`` is None).

        Returns:
            One result for a single phrase, a list (same order) for a sequence. Scores are rounded to 4
            decimals, boxes to 2.

        Raises:
            TypeError, ValueError, OSError: an argument or an image that cannot be used.
            RequestRefusedError, OverCapacityError, DeadlineError, ServerFailedError, UnreachableError: the
                service did not answer; each is a ServiceError.
        """
        answer = self.ask(
            image,
            prompts,
            threshold=threshold,
            max_instances=max_instances,
            mask_format=mask_format,
        )
        return answer.results[0] if isinstance(prompts, (str, Prompt)) else answer.results

    def ask(
        self,
        image: ImageLike,
        prompts: str | Prompt | Sequence[str | Prompt],
        *,
        threshold: float = DEFAULT_THRESHOLD,
        max_instances: int = DEFAULT_MAX_INSTANCES,
        mask_format: MaskFormat = "rle",
    ) -> ClientAnswer:
        """As :meth:`predict`, with all that the service says beside the results."""
        if mask_format not in ("rle", "png", "polygon", "none"):
            raise ValueError(f"mask_format must be rle, png, polygon or none, got {mask_format!r}")
        options = {
            "threshold": checked_threshold(threshold),
            "max_instances": max_instances,
            "mask_format": mask_format,
        }
        body = self._predict(image, as_prompts(prompts), options)
        return _readable(lambda: _answer(body))

    def warm(self, image: ImageLike) -> str:
        """Have the service read an image before anything is asked of it.

        Returns:
            The service's digest of the image.
        """
        body = self._predict(image, (), {})
        return _readable(lambda: str(body["image_digest"]))

    def info(self) -> dict[str, Any]:
        """What the service says of itself (``GET /info``): model, checkpoint, backend, chips."""
        return self._request("GET", "/info")

    def close(self) -> None:
        """Close the connections; safe to call more than once."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- one request -------------------------------------------------------------------------------

    def _predict(
        self, image: ImageLike, prompts: tuple[Prompt, ...], options: dict[str, Any]
    ) -> dict[str, Any]:
        upload = _Upload.of(image)
        with self._lock:
            digest = self._sent.get(upload.key)
        if digest is not None:
            try:
                return self._request(
                    "POST",
                    "/predict",
                    json={
                        "image_digest": digest,
                        "prompts": [_json_prompt(prompt) for prompt in prompts],
                        **options,
                    },
                )
            except RequestRefusedError as error:
                if error.type != "image-not-cached":
                    raise
        body = self._request(
            "POST",
            "/predict",
            files={"image": ("image", upload.data(), "application/octet-stream")},
            data={"prompts": [_form_prompt(prompt) for prompt in prompts], **options},
        )
        with self._lock:
            self._sent[upload.key] = _readable(lambda: str(body["image_digest"]))
            self._sent.move_to_end(upload.key)
            while len(self._sent) > _REMEMBERED_IMAGES:
                self._sent.popitem(last=False)
        return body

    def _request(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """One request with its retries; the body of the 200."""
        for tries_left in range(self._retries, -1, -1):
            response = self._send(method, path, content)
            if response.status_code == HTTPStatus.OK:
                return _readable(lambda: dict(response.json()))  # noqa: B023 - called at once
            if response.status_code != HTTPStatus.SERVICE_UNAVAILABLE or not tries_left:
                break
            time.sleep(min(_retry_after(response), self._max_retry_wait))
        raise _error_of(response, self.url + path)

    def _send(self, method: str, path: str, content: dict[str, Any]) -> httpx.Response:
        # A kept connection may have been closed by the other side just when it is used again. Asking twice
        # does no harm, so a broken connection gets a second, fresh try.
        for last in (False, True):
            try:
                return self._http.request(method, path, **content)
            except httpx.TimeoutException as error:
                raise DeadlineError(
                    f"no answer from {self.url} within {self._timeout:g} s"
                ) from error
            except httpx.ConnectError as error:
                raise UnreachableError(
                    f"nothing answers at {self.url}",
                    f"{error}; is the service running (sam3-ray serve)?",
                ) from error
            except httpx.TransportError as error:
                if last:
                    raise UnreachableError(
                        f"the connection to {self.url} broke", str(error)
                    ) from error
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class _Upload:
    """An image on its way: a key that is the same for the same image, and the file to send."""

    key: str
    data: Callable[[], bytes]

    @classmethod
    def of(cls, image: ImageLike) -> _Upload:
        if isinstance(image, (bytes, bytearray, memoryview)):
            data = bytes(image)
        elif isinstance(image, str) or hasattr(image, "__fspath__"):
            with open(image, "rb") as file:
                data = file.read()
        else:
            pixels = load_image(image)
            return cls(f"pixels {pixel_digest(pixels)}", lambda: _png(pixels))
        if not data:
            name = (
                "the bytes are"
                if isinstance(image, (bytes, bytearray, memoryview))
                else f"{image} is"
            )
            raise ValueError(f"{name} empty: no image")
        return cls(f"file {file_digest(data)}", lambda: data)


def _png(pixels: Uint8Array) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _json_prompt(prompt: Prompt) -> str | dict[str, Any]:
    return (
        prompt.text
        if prompt.threshold is None
        else {"text": prompt.text, "threshold": prompt.threshold}
    )


def _form_prompt(prompt: Prompt) -> str:
    given = _json_prompt(prompt)
    if isinstance(given, str) and not given.startswith("{"):
        return given
    return json.dumps({"text": prompt.text} if isinstance(given, str) else given)


# -- reading answers -------------------------------------------------------------------------------


def _answer(body: Mapping[str, Any]) -> ClientAnswer:
    width, height = int(body["width"]), int(body["height"])
    return ClientAnswer(
        results=[
            _result(result, width, height, str(body["mask_format"])) for result in body["results"]
        ],
        image_digest=str(body["image_digest"]),
        cached=bool(body["cached"]),
        checkpoint=str(body["checkpoint"]),
        timing_ms={str(stage): float(ms) for stage, ms in body["timing_ms"].items()},
        replica=str(body["replica"]),
        chip=body["chip"],
    )


def _result(result: Mapping[str, Any], width: int, height: int, mask_format: str) -> Sam3Result:
    instances = result["instances"]
    masks: BoolArray | None = None
    if mask_format != "none":
        masks = np.zeros((len(instances), height, width), dtype=bool)
        for i, instance in enumerate(instances):
            masks[i] = _mask(instance["mask"], width, height, mask_format)
    return Sam3Result(
        prompt=result["prompt"],
        scores=np.array([instance["score"] for instance in instances], dtype=np.float32),
        boxes=np.array([instance["box_xyxy"] for instance in instances], np.float32).reshape(-1, 4),
        masks=masks,
        presence=float(result["presence"]),
        width=width,
        height=height,
        truncated=bool(result["truncated"]),
    )


def _mask(mask: Any, width: int, height: int, mask_format: str) -> BoolArray:
    if mask_format == "rle":
        return rle_to_mask(mask)
    if mask_format == "png":
        return png_to_mask(base64.b64decode(mask))
    return polygon_to_mask(mask, height, width)


def _readable[T](read: Callable[[], T]) -> T:
    """``read()``, where a body that is not as the service's contract says is the server's failure."""
    try:
        return read()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ServerFailedError(
            "the answer cannot be read",
            f"{type(error).__name__}: {error}; is it a sam3_ray service of this version?",
            status=HTTPStatus.OK,
        ) from error


def _retry_after(response: httpx.Response) -> float:
    """Seconds to wait, as a 503 says (the form with a date is not used by this service)."""
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:
        return _DEFAULT_RETRY_AFTER_S
    return seconds if math.isfinite(seconds) and seconds >= 0 else _DEFAULT_RETRY_AFTER_S


def _error_of(response: httpx.Response, url: str) -> ServiceError:
    status = response.status_code
    kind: type[ServiceError] = ServerFailedError
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        kind = OverCapacityError
    elif status in (HTTPStatus.GATEWAY_TIMEOUT, HTTPStatus.REQUEST_TIMEOUT):
        kind = DeadlineError
    elif 400 <= status < 500:
        kind = RequestRefusedError
    try:
        problem = response.json()
        title, detail = str(problem["title"]), str(problem.get("detail", ""))
        return kind(title, detail, status=status, type=str(problem.get("type", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = " ".join(response.text.split())[:200]
        return kind(
            f"{url} answered {status} {response.reason_phrase}".rstrip(), text, status=status
        )
