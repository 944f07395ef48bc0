"""Stand-ins: a service without Ray for the routes, and a replica without a model for Ray's part."""

import asyncio
import json
import os
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from sam3_ray.serve.errors import Problem, ProblemError, ProblemType
from sam3_ray.serve.routes import http_app
from sam3_ray.serve.schemas import Failure, PredictJob, Reply
from sam3_ray.serve.uploads import Limits


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Ask again and again until it holds; fail where it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


LIMITS = Limits(max_upload_bytes=100_000, max_prompts=4)


class RecordingService:
    """Keeps the jobs it is given. A phrase "fail", "crash" or "slow" does that."""

    def __init__(self) -> None:
        self.jobs: list[PredictJob] = []
        self.is_ready = True
        self.cancelled = 0

    async def submit(self, job: PredictJob) -> Reply:
        self.jobs.append(job)
        texts = [prompt.text for prompt in job.prompts]
        if "fail" in texts:
            raise ProblemError(Problem(ProblemType.OVER_CAPACITY, "full", retry_after_s=2.5))
        if "crash" in texts:
            raise ZeroDivisionError("a secret")
        if "slow" in texts:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return Reply(json.dumps({"image_digest": job.digest}).encode())

    async def info(self) -> dict[str, Any]:
        return {"checkpoint": "demo"}

    async def ready(self) -> bool:
        return self.is_ready


class Web:
    """The routes over a RecordingService, called without a network."""

    def __init__(self, *, limits: Limits = LIMITS, deadline_s: float = 5.0) -> None:
        self.service = RecordingService()
        self.app = http_app(self.service, limits, deadline_s)

    def call(self, method: str, url: str, **arguments: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, url, **arguments)

        return asyncio.run(send())

    def post(self, **arguments: Any) -> httpx.Response:
        return self.call("POST", "/predict", **arguments)

    @property
    def job(self) -> PredictJob:
        return self.service.jobs[-1]


def assert_problem(response: httpx.Response, status: int, slug: str, detail: str = "") -> None:
    """It is the problem of RFC 9457 with this type, and its detail matches."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["type"], body["status"]) == (slug, status)
    assert body["title"]
    assert re.search(detail, body["detail"]), body["detail"]


class StubReplica:
    """A replica without a model. The phrase tells it what to do; files tell the test what it does.

    hold FOLDER: wait until FOLDER/release is there, with a file ``holding-*`` meanwhile; ``cancelled-*`` says
    that the caller went away. die FILE: end the process, unless FILE says that one has already. fail: a
    failure that another replica may not have, unless one has failed on it already.
    """

    def __init__(self, config: Any, plan: Any) -> None:
        from ray import serve

        self.name = serve.get_replica_context().replica_tag

    async def predict(self, job: PredictJob) -> Reply | Failure:
        what, _, path = (job.prompts[0].text if job.prompts else "").partition(" ")
        if what == "hold":
            await self._hold(Path(path))
        elif what == "die":
            try:
                Path(path).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os._exit(1)
        elif what == "fail" and not job.avoid:
            problem = Problem(ProblemType.INTERNAL, "broken", retry_elsewhere=True)
            return Failure(problem, self.name)
        return Reply(json.dumps({"replica": self.name, "avoided": sorted(job.avoid)}).encode())

    async def _hold(self, folder: Path) -> None:
        name = uuid.uuid4().hex
        (folder / f"holding-{name}").touch()
        try:
            while not (folder / "release").exists():
                await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            (folder / f"cancelled-{name}").touch()
            raise
        finally:
            (folder / f"holding-{name}").unlink()

    async def info(self) -> dict[str, Any]:
        return {"replica": self.name, "place": self.name, "chip": None, "parked": None}

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        pass
