"""The four ways to ask ``POST /predict``: JSON, multipart, a raw image, and a digest alone.

All end in one ``PredictJob``, checked. Bodies are counted while they are read, so that one over the limit
is refused before it is all here. Nothing in a request is ever taken for a path or a URL.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from sam3_ray.images import file_digest
from sam3_ray.prompt import Prompt
from sam3_ray.serve.errors import Problem, ProblemError, ProblemType, invalid
from sam3_ray.serve.schemas import Options, PredictBody, PredictJob, PromptBody

MAX_PHRASE_CHARACTERS = 500
"""The model reads 32 tokens of a phrase; a longer text only costs the tokenizer's time."""

_OPTIONS_BYTES = 256 * 1024
"""Room in a body for everything but the image."""

_BIG_JSON_BYTES = 256 * 1024
"""A JSON body above this is parsed on another thread: the event loop has others to serve."""

_MAX_FORM_FIELDS = 256


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    Attributes:
        max_upload_bytes: of an image file.
        max_prompts: phrases of one request.
    """

    max_upload_bytes: int
    max_prompts: int


async def read_job(request: Request, limits: Limits) -> PredictJob:
    """The job that a request asks for.

    Raises:
        ProblemError: 400, 413, 415 or 422, with what was wrong.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise _unsupported(f"Content-Encoding {encoding!r} is not read; send the body as it is")
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type == "application/json":
        _refuse_query(request, media_type)
        data = await _read(request, 4 * (-(-limits.max_upload_bytes // 3)) + _OPTIONS_BYTES, limits)
        parse = asyncio.to_thread(_from_json, data) if len(data) > _BIG_JSON_BYTES else None
        image, options = _from_json(data) if parse is None else await parse
    elif media_type == "multipart/form-data":
        _refuse_query(request, media_type)
        image, options = await _from_multipart(request, limits)
    elif media_type.startswith("image/"):
        options = _options(request.query_params.multi_items(), "query parameter")
        image = await _read(request, limits.max_upload_bytes, limits)
    elif not media_type:
        options = _options(request.query_params.multi_items(), "query parameter")
        image = None
        if await _read(request, limits.max_upload_bytes, limits):
            raise _unsupported(f"the body has no Content-Type; {_ACCEPTED}")
    else:
        raise _unsupported(f"Content-Type {media_type!r} is not read; {_ACCEPTED}")
    return _job(image, options, limits, gzip=_takes_gzip(request.headers))


def make_job(image: bytes | None, options: Options, limits: Limits) -> PredictJob:
    """The job for an image file (or only ``options.image_digest``), checked as a request's is.

    Raises:
        ProblemError: 400, 413 or 422.
    """
    return _job(image, options, limits, gzip=False)


_ACCEPTED = (
    "send application/json with base64, multipart/form-data with a file `image`, or the image file itself "
    "as image/jpeg, image/png, ..."
)


def _job(image: bytes | None, options: Options, limits: Limits, *, gzip: bool) -> PredictJob:
    if image is not None and len(image) > limits.max_upload_bytes:
        raise _too_large(limits)
    digest = options.image_digest
    if image:
        actual = file_digest(image)
        if digest not in (None, actual):
            raise invalid(
                "image_digest", f"{digest} is not the digest of the image sent, which is {actual}"
            )
        digest = actual
    if digest is None:
        what = "the image is empty" if image is not None else "there is no image"
        raise ProblemError(
            Problem(
                ProblemType.NO_IMAGE, f"{what}; send one, or the image_digest of one sent before"
            )
        )
    return PredictJob(
        digest=digest,
        image=image or None,
        prompts=_prompts(options.prompts, limits),
        threshold=options.threshold,
        max_instances=options.max_instances,
        mask_format=options.mask_format,
        gzip=gzip,
        sent_at=time.time(),
    )


def _prompts(prompts: Sequence[str | PromptBody], limits: Limits) -> tuple[Prompt, ...]:
    if len(prompts) > limits.max_prompts:
        raise invalid(
            "prompts", f"{len(prompts)} phrases; at most {limits.max_prompts} in one request"
        )
    checked = []
    for i, given in enumerate(prompts):
        text, threshold = (given, None) if isinstance(given, str) else (given.text, given.threshold)
        if len(text) > MAX_PHRASE_CHARACTERS:
            raise invalid(
                f"prompts[{i}]",
                f"{len(text)} characters; at most {MAX_PHRASE_CHARACTERS} in a phrase",
            )
        try:
            checked.append(Prompt(text, threshold))
        except (TypeError, ValueError) as error:
            raise invalid(f"prompts[{i}]", str(error)) from error
    return tuple(checked)


# -- the ways in -----------------------------------------------------------------------------------


def _from_json(data: bytes) -> tuple[bytes | None, Options]:
    if not data:
        raise ProblemError(Problem(ProblemType.NO_IMAGE, "the body is empty"))
    try:
        # Strict: in JSON a number is a number and a string a string.
        body = PredictBody.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise _validation_problem(error, "field") from error
    image = None if body.image is None else _decode_base64(body.image)
    return image, body


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        hint = ""
        if text.startswith("data:"):
            hint = "; leave out the 'data:...;base64,' before it"
        elif "://" in text[:16]:
            hint = "; a server never fetches a URL that a client names"
        raise ProblemError(
            Problem(
                ProblemType.INVALID_BASE64,
                f"image must be the file's bytes in base64 ({error}){hint}",
            )
        ) from error


async def _from_multipart(request: Request, limits: Limits) -> tuple[bytes | None, Options]:
    stream = _counted(request, limits.max_upload_bytes + _OPTIONS_BYTES, limits)
    parser = _InMemoryParser(
        request.headers,
        stream,
        max_files=2,
        max_fields=_MAX_FORM_FIELDS,
        max_part_size=_OPTIONS_BYTES,
    )
    try:
        form: FormData = await parser.parse()
    except (MultiPartException, KeyError, UnicodeDecodeError) as error:
        # KeyError: no boundary in the Content-Type.
        reason = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
        raise ProblemError(
            Problem(ProblemType.UNPARSEABLE_BODY, f"the multipart body cannot be parsed: {reason}")
        ) from error
    try:
        fields: list[tuple[str, str]] = []
        files: list[UploadFile] = []
        for name, value in form.multi_items():
            if name == "image":
                if not isinstance(value, UploadFile):
                    raise invalid("image", "must be a file part, with a filename")
                files.append(value)
            elif isinstance(value, UploadFile):
                raise invalid(name, "must be a plain field; `image` is the only file")
            else:
                fields.append((name, value))
        if len(files) > 1:
            raise invalid("image", "given more than once; one image a request")
        image = await files[0].read() if files else None
        return image, _options(fields, "field")
    finally:
        await form.close()


class _InMemoryParser(MultiPartParser):
    """Keeps uploads in memory: they are bounded, and a server needs no temporary files for them."""

    spool_max_size = 1 << 62


def _options(items: Sequence[tuple[str, str]], what: str) -> Options:
    """Options from names and texts, as forms and query strings have them; numbers are parsed."""
    values: dict[str, Any] = {}
    prompts: list[Any] = []
    for name, text in items:
        if name == "prompts":
            prompts.append(_form_prompt(text, len(prompts)))
        elif name in values:
            raise invalid(name, f"given more than once: {values[name]!r}, {text!r}")
        else:
            values[name] = text
    try:
        return Options.model_validate({**values, "prompts": prompts})
    except ValidationError as error:
        raise _validation_problem(error, what) from error


def _form_prompt(text: str, position: int) -> str | PromptBody:
    """A phrase, or the JSON of an object with text and threshold (no phrase starts with a brace)."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return PromptBody.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise invalid(
            f"prompts[{position}]" + (f".{where}" if where else ""), _plain(first, "field")
        ) from error


def _refuse_query(request: Request, media_type: str) -> None:
    if request.query_params:
        name = next(iter(request.query_params))
        raise invalid(name, f"with {media_type} options are in the body, not in the URL's query")


# -- reading ---------------------------------------------------------------------------------------


async def _read(request: Request, limit: int, limits: Limits) -> bytes:
    return b"".join([chunk async for chunk in _counted(request, limit, limits)])


async def _counted(request: Request, limit: int, limits: Limits) -> AsyncGenerator[bytes, None]:
    """The body's chunks; refuses it as soon as more than ``limit`` bytes are declared or here."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limits)
    seen = 0
    async for chunk in request.stream():
        seen += len(chunk)
        if seen > limit:
            raise _too_large(limits)
        yield chunk


def _takes_gzip(headers: Headers) -> bool:
    for part in headers.get("accept-encoding", "").lower().split(","):
        coding, _, quality = part.partition(";")
        if coding.strip() == "gzip":
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


# -- problems --------------------------------------------------------------------------------------


def _too_large(limits: Limits) -> ProblemError:
    return ProblemError(
        Problem(
            ProblemType.TOO_LARGE, f"an image file may have {limits.max_upload_bytes} bytes at most"
        )
    )


def _unsupported(detail: str) -> ProblemError:
    return ProblemError(Problem(ProblemType.UNSUPPORTED_MEDIA_TYPE, detail))


def _validation_problem(error: ValidationError, what: str) -> ProblemError:
    """pydantic's findings as one problem: field names as a client wrote them, one line a fault."""
    found: dict[str, str] = {}
    for fault in error.errors(include_url=False, include_context=False):
        if fault["type"] == "json_invalid":
            return ProblemError(
                Problem(ProblemType.UNPARSEABLE_BODY, f"the JSON cannot be parsed: {fault['msg']}")
            )
        field, message = _field(fault["loc"]), _plain(fault, what)
        if fault["loc"][:1] == ("prompts",) and fault["loc"][2:] in (("str",), ("PromptBody",)):
            message = 'must be a phrase, or an object {"text": ..., "threshold": ...}'
        found.setdefault(field, message)
    # A prompt of neither form is reported once for each form: keep the finer report.
    for field in [f for f in found if any(other.startswith(f + ".") for other in found)]:
        del found[field]
    errors = tuple(found.items())
    detail = "; ".join(f"{field}: {message}" if field else message for field, message in errors)
    return ProblemError(Problem(ProblemType.INVALID_REQUEST, detail, errors))


def _field(location: Sequence[int | str]) -> str:
    """("prompts", 1, "PromptBody", "threshold") -> "prompts[1].threshold"."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part not in ("str", "PromptBody"):
            name += f".{part}" if name else part
    return name


def _plain(fault: Mapping[str, Any], what: str) -> str:
    if fault["type"] == "extra_forbidden":
        return f"unknown {what}"
    given = fault.get("input")
    shown = (
        f", got {given!r}"
        if isinstance(given, (str, int, float)) and len(repr(given)) <= 80
        else ""
    )
    return f"{fault['msg']}{shown}"
