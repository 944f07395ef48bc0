"""The HTTP application: routes, problem+json for everything that goes wrong, headers, OpenAPI.

Knows nothing of Ray: it is given a ``Service``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import sam3_ray
from sam3_ray.serve.access import ANYONE, OPEN_PATHS, Access, Caller, check_may_predict
from sam3_ray.serve.bodies import read_job
from sam3_ray.serve.deadlines import HEADER as DEADLINE
from sam3_ray.serve.deadlines import deadline, deadline_of
from sam3_ray.serve.docs import (
    CSS,
    docs_page,
    predict_openapi,
    problem_responses,
    with_body_schemas,
)
from sam3_ray.serve.errors import MEDIA_TYPE, Problem, ProblemError, ProblemType, problem_of_status
from sam3_ray.serve.request_log import HEADER as REQUEST_ID
from sam3_ray.serve.request_log import RequestLog, note
from sam3_ray.serve.schemas import PredictAnswer, PredictJob, Reply
from sam3_ray.serve.uploads import Limits, UploadSpace
from sam3_ray.serve.web import FAVICON, INDEX, examples_folder, static_folder

logger = logging.getLogger("sam3_ray")

SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


class Service(Protocol):
    """What is behind the routes."""

    async def submit(self, job: PredictJob) -> Reply:
        """Answer a job, or raise ProblemError."""
        ...

    async def info(self) -> dict[str, Any]:
        """What ``/info`` says."""
        ...

    async def ready(self) -> bool:
        """Whether a request would be answered now."""
        ...


def http_app(
    service: Service,
    limits: Limits,
    deadline_s: float,
    access: Access | None = None,
    count: Callable[[int], None] | None = None,
    cors_origins: Sequence[str] = (),
    id_is_answered: bool = False,
) -> FastAPI:
    """The application.

    Args:
        service: answers jobs.
        limits: of a request.
        deadline_s: seconds from a request's first byte to its answer; a client can only ask for fewer.
        access: the keys, one of which a request has to send; None asks for none.
        count: told the status of each request when it has ended.
        cors_origins: whose pages may call it from a browser.
        id_is_answered: what is in front answers ``X-Request-Id`` itself, as it came.
    """
    app = FastAPI(
        title="sam3_ray",
        version=sam3_ray.__version__,
        description="SAM3: an image and noun phrases in, every instance out.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    app.router.redirect_slashes = False
    uploads = UploadSpace(limits.upload_space_bytes)
    app.add_middleware(_Keys, access=access)
    app.add_middleware(_Unexpected)
    app.add_middleware(_SecurityHeaders)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", REQUEST_ID, DEADLINE],
            expose_headers=[REQUEST_ID, "Retry-After"],
        )
    app.add_middleware(RequestLog, count=count, id_is_answered=id_is_answered)
    _handle_errors(app)

    @app.post(
        "/predict",
        summary="Find every instance of noun phrases in an image",
        response_model=PredictAnswer,
        responses=problem_responses(400, 401, 403, 404, 408, 413, 415, 422, 500, 503, 504),
        openapi_extra=predict_openapi(limits),
    )
    async def predict(request: Request) -> Response:
        caller: Caller = request.scope["sam3_caller"]
        check_may_predict(caller)
        seconds = deadline_of(request.headers, deadline_s)
        with uploads.place() as take:
            async with deadline(seconds):
                job = await read_job(request, limits, take)
                note(request.scope, digest=job.digest, prompts=len(job.prompts))
                reply = await service.submit(replace(job, namespace=caller.namespace))
        note(request.scope, **reply.log)
        headers = {"Vary": "Accept-Encoding"}
        if reply.content_encoding:
            headers["Content-Encoding"] = reply.content_encoding
        return Response(reply.body, media_type="application/json", headers=headers)

    @app.get("/info", summary="Model, checkpoint, backend, limits, replicas and chips")
    async def info() -> JSONResponse:
        return JSONResponse(await service.info())

    @app.get("/healthz", include_in_schema=False)
    @app.get(
        "/health",
        summary="Whether a request would be answered now (/healthz is the same)",
        responses=problem_responses(503),
    )
    async def health() -> JSONResponse:
        if not await service.ready():
            raise ProblemError(
                Problem(ProblemType.NO_REPLICA, "no replica is ready", retry_after_s=5)
            )
        return JSONResponse({"status": "ok"})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    @app.get("/docs.css", include_in_schema=False)
    async def docs_css() -> Response:
        return Response(CSS, media_type="text/css")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(INDEX, headers={"Cache-Control": "no-cache"})

    @app.get("/favicon.ico", include_in_schema=False)
    async def favicon() -> FileResponse:
        return FileResponse(FAVICON, headers={"Cache-Control": "max-age=86400"})

    app.mount("/static", StaticFiles(directory=static_folder()), name="static")
    if examples_folder().is_dir():
        app.mount("/examples", StaticFiles(directory=examples_folder()), name="examples")
    with_body_schemas(app)
    return app


def _handle_errors(app: FastAPI) -> None:
    """Everything that goes wrong is a problem, what the framework itself refuses among it."""

    @app.exception_handler(ProblemError)
    async def problem_error(request: Request, error: ProblemError) -> Response:
        note(request.scope, problem=error.problem.kind.slug)
        return _problem_response(error.problem)

    @app.exception_handler(HTTPException)
    async def http_exception(request: Request, error: HTTPException) -> Response:
        phrase = HTTPStatus(error.status_code).phrase
        detail = f"{request.method} {request.url.path}: {error.detail or phrase}"
        return _problem_response(
            problem_of_status(error.status_code, detail), dict(error.headers or {})
        )

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        faults = tuple(
            (".".join(map(str, fault["loc"])), str(fault["msg"])) for fault in error.errors()
        )
        detail = "; ".join(f"{field}: {message}" for field, message in faults)
        return _problem_response(Problem(ProblemType.INVALID_REQUEST, detail, faults))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return _problem_response(Problem(ProblemType.UNPARSEABLE_BODY, "the client hung up"))


def _problem_response(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    return Response(
        problem.to_bytes(),
        status_code=problem.status,
        media_type=MEDIA_TYPE,
        headers=problem.headers() | (headers or {}),
    )


class _Keys:
    """Looks at the key before a byte of the body is read."""

    def __init__(self, app: ASGIApp, access: Access | None) -> None:
        self.app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["sam3_caller"] = ANYONE
            # The path has the route prefix before it, where the service has one.
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if self._access is not None and path not in OPEN_PATHS:
                try:
                    caller = self._access.caller(Headers(scope=scope).get("authorization"))
                except ProblemError as error:
                    note(scope, problem=error.problem.kind.slug)
                    await _problem_response(error.problem)(scope, receive, send)
                    return
                scope["sam3_caller"] = caller
                note(scope, caller=caller.name)
        await self.app(scope, receive, send)


class _Unexpected:
    """Answers what nobody foresaw, inside of the log and the headers: a framework's own handler of Exception
    is outside of both."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_and_look(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_look)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            logger.error("%s %r failed", scope["method"], scope["path"], exc_info=error)
            detail = f"{type(error).__name__}; the server's log has the details"
            note(scope, problem=ProblemType.INTERNAL.slug)
            await _problem_response(Problem(ProblemType.INTERNAL, detail))(scope, receive, send)


class _SecurityHeaders:
    """Adds the headers that let a browser load nothing from elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *SECURITY_HEADERS]
            await send(message)

        await self.app(scope, receive, send_with_headers)
