"""The four ways to ask ``POST /predict``: JSON, multipart, a raw image, and a digest alone.

All end in one ``PredictJob``, checked. Bodies are counted while they are read, so that one over the limit
is refused before it is all here. Nothing in a request is ever taken for a path or a URL.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import codecs
import json
import time
from collections.abc import Callable, Sequence
from typing import Any
from unicodedata import category
from urllib.parse import parse_qsl

from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from sam3_ray.images import file_digest
from sam3_ray.prompt import Prompt
from sam3_ray.serve.errors import Problem, ProblemError, ProblemType, invalid
from sam3_ray.serve.schemas import Options, PredictBody, PredictJob, PromptBody
from sam3_ray.serve.uploads import Body, Limits, too_large
from sam3_ray.serve.validation import fault_message, field_name, validation_problem

MAX_PHRASE_CHARACTERS = 500
"""The model reads 32 tokens of a phrase; a longer text only costs the tokenizer's time."""

_OPTIONS_BYTES = 256 * 1024
"""Room in a body for everything but the image."""

_BIG_JSON_BYTES = 16 * 1024
"""A JSON body above this is parsed on another thread: the event loop has others to serve."""

_MOST_JSON_COMMAS = 64 * 1024
"""More than any request has (base64 has none): millions of values are not even parsed."""

_MAX_FORM_FIELDS = 256


async def read_job(
    request: Request, limits: Limits, take: Callable[[int], None] = lambda count: None
) -> PredictJob:
    """The job that a request asks for.

    Args:
        request: with its body unread.
        limits: that hold for it.
        take: of ``UploadSpace.place``, told of the body's bytes as they come.

    Raises:
        ProblemError: 400, 408, 413, 415, 422 or 503, with what was wrong.
    """
    body = Body(request, limits, take)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise _unsupported(f"Content-Encoding {encoding!r} is not read; send the body as it is")
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type == "application/json":
        _refuse_query(request, media_type)
        data = await body.read(4 * (-(-limits.max_upload_bytes // 3)) + _OPTIONS_BYTES)
        parse = asyncio.to_thread(_from_json, data) if len(data) > _BIG_JSON_BYTES else None
        image, options = _from_json(data) if parse is None else await parse
    elif media_type == "multipart/form-data":
        _refuse_query(request, media_type)
        image, options = await _from_multipart(request, body, limits)
    elif media_type.startswith("image/"):
        options = _options(_query(request), "query parameter")
        image = await body.read(limits.max_upload_bytes)
    elif not media_type:
        options = _options(_query(request), "query parameter")
        image = None
        if await body.read(limits.max_upload_bytes):
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
        raise too_large(limits)
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
        threshold=options.threshold if "threshold" in options.model_fields_set else None,
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
        control = next((c for c in text if category(c) == "Cc" and not c.isspace()), None)
        if control is not None:
            raise invalid(f"prompts[{i}]", f"holds the control character U+{ord(control):04X}")
    return tuple(checked)


# -- the ways in -----------------------------------------------------------------------------------


def _from_json(data: bytes) -> tuple[bytes | None, Options]:
    if not data:
        raise ProblemError(Problem(ProblemType.NO_IMAGE, "the body is empty"))
    if data.count(b",") > _MOST_JSON_COMMAS:
        raise ProblemError(
            Problem(
                ProblemType.UNPARSEABLE_BODY, f"the JSON has more than {_MOST_JSON_COMMAS} values"
            )
        )
    _refuse_twice_given(data)
    try:
        # Strict: in JSON a number is a number and a string a string.
        body = PredictBody.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise validation_problem(error, "field") from error
    image = None if body.image is None else _decode_base64(body.image)
    return image, body


def _refuse_twice_given(data: bytes) -> None:
    """pydantic would take the last one in silence. What else is wrong with the JSON, it says better."""

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for name, value in pairs:
            if name in members:
                raise invalid(field_name([name]), "given more than once")
            members[name] = value
        return members

    try:
        json.loads(data, object_pairs_hook=checked)
    except (ValueError, RecursionError):
        return


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


async def _from_multipart(
    request: Request, body: Body, limits: Limits
) -> tuple[bytes | None, Options]:
    _refuse_charset(request.headers["content-type"])
    parser = _InMemoryParser(
        request.headers,
        body.chunks(limits.max_upload_bytes + _OPTIONS_BYTES),
        max_files=2,
        max_fields=_MAX_FORM_FIELDS,
        max_part_size=_OPTIONS_BYTES,
    )
    try:
        form: FormData = await parser.parse()
    except (MultiPartException, KeyError) as error:
        missing = "its Content-Type names no boundary"
        raise _broken_form(
            missing if isinstance(error, KeyError) else str(error.message)
        ) from error
    try:
        if not parser.ended:
            raise _broken_form("it ends before its last boundary")
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


def _refuse_charset(content_type: str) -> None:
    """Forms are UTF-8 (RFC 7578, section 5.1.2 knows others): a codec is nothing for a client to choose."""
    _, parameters = parse_options_header(content_type)
    charset = parameters.get(b"charset", b"utf-8").decode("latin-1")
    try:
        known = codecs.lookup(charset).name == "utf-8"
    except (LookupError, ValueError):
        known = False
    if not known:
        raise _unsupported(f"charset {charset[:40]!r} is not read; send the form in UTF-8")


def _broken_form(reason: str) -> ProblemError:
    return ProblemError(
        Problem(ProblemType.UNPARSEABLE_BODY, f"the multipart body cannot be parsed: {reason}")
    )


class _InMemoryParser(MultiPartParser):
    """Keeps uploads in memory: they are bounded, and a server needs no temporary files for them.

    Attributes:
        ended: the last boundary has come; without it parts may be missing.
    """

    spool_max_size = 1 << 62
    ended = False

    def on_part_end(self) -> None:
        """A part is whole. Text that is not UTF-8 would be read as Latin-1: as another phrase."""
        if self._current_part.file is None:
            try:
                self._current_part.data.decode("utf-8")
            except UnicodeDecodeError as error:
                name = self._current_part.field_name[:40]
                raise MultiPartException(f"the field {name!r} is not UTF-8") from error
        super().on_part_end()

    def on_end(self) -> None:
        """The last boundary."""
        self.ended = True


def _query(request: Request) -> list[tuple[str, str]]:
    """Names and values of the query; Starlette's own reading replaces what is not UTF-8."""
    try:
        return parse_qsl(
            request.scope.get("query_string", b"").decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_FORM_FIELDS,
        )
    except UnicodeDecodeError as error:
        raise invalid("query", "must be UTF-8, percent-encoded") from error
    except ValueError as error:
        raise invalid("query", f"more than {_MAX_FORM_FIELDS} parameters") from error


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
        raise validation_problem(error, what) from error


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
            f"prompts[{position}]" + (f".{where}" if where else ""), fault_message(first, "field")
        ) from error


def _refuse_query(request: Request, media_type: str) -> None:
    if request.query_params:
        name = next(iter(request.query_params))
        raise invalid(name, f"with {media_type} options are in the body, not in the URL's query")


def _takes_gzip(headers: Headers) -> bool:
    for part in headers.get("accept-encoding", "").lower().split(","):
        coding, _, quality = part.partition(";")
        if coding.strip() == "gzip":
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _unsupported(detail: str) -> ProblemError:
    return ProblemError(Problem(ProblemType.UNSUPPORTED_MEDIA_TYPE, detail))
