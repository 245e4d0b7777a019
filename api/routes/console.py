"""Serves web pages: the console (/console) with its data, and the API's reference (/docs, /redoc).

The console's page needs no key. The console's data and the reference need one.
"""

from collections.abc import Callable
from contextlib import aclosing
from functools import cache
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response
from starlette.responses import JSONResponse, RedirectResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from api.console import page
from api.console.live import MOST_PAGES, Live
from api.console.view import View, steps_of
from api.errors import unavailable
from api.routes.services import AppServices
from poc_core.state.history import STEPS

router = APIRouter(include_in_schema=False)

_files = cache(page.load)


@router.get("/console")
async def console(request: Request) -> Response:
    return _answer(request, page.FOLDER, page.INDEX, page.HEADERS)


@router.get("/console/")
async def console_with_slash() -> Response:
    """Redirects to /console, because the page's links are relative to the path without a slash."""
    return RedirectResponse("../console")


@router.get("/console/{name:path}")
async def console_file(name: str, request: Request) -> Response:
    return _answer(request, page.FOLDER, name, page.HEADERS)


@router.get("/docs")
async def swagger_ui(request: Request) -> Response:
    return _answer(request, page.REFERENCE_FOLDER, page.SWAGGER_UI, page.REFERENCE_HEADERS)


@router.get("/redoc")
async def redoc(request: Request) -> Response:
    return _answer(request, page.REFERENCE_FOLDER, page.REDOC, page.REFERENCE_HEADERS)


@router.get("/docs/{name:path}")
async def reference_file(name: str, request: Request) -> Response:
    return _answer(request, page.REFERENCE_FOLDER, name, page.REFERENCE_HEADERS)


@router.get("/api/v1/console/events")
async def events(services: AppServices) -> Response:
    """Streams the node's state as server-sent events: all sections first, then changed ones."""
    if services.live.followers >= MOST_PAGES:
        raise unavailable(f"{MOST_PAGES} pages of the console are open already; close some.")
    return _Events(services.live, services.view)


@router.get("/api/v1/console/history")
async def history(services: AppServices, step: int = min(STEPS)) -> JSONResponse:
    """Returns chart data: the last 180 time steps of the history, each `step` seconds long."""
    if step not in STEPS:
        known = ", ".join(map(str, STEPS))
        raise HTTPException(422, f"There is no history by {step} s: steps have {known} s.")
    return JSONResponse(
        await services.together.get(
            ("history", step), lambda: steps_of(services.history, step, services.health.now())
        )
    )


@router.get("/api/v1/console/log")
async def log(services: AppServices, after: float = 0.0) -> JSONResponse:
    """Returns the event log's entries after the Unix time `after`, the newest first.

    The log has 1,000 entries.
    """
    found = await services.together.get("events", services.events.read)
    return JSONResponse([event.model_dump() for event in found if event.at > after])


@router.get("/api/v1/console/work/{work_id}")
def work(work_id: str, services: AppServices) -> JSONResponse:
    """Returns all details of a job or round."""
    found = None
    if len(work_id) == 32 and work_id.isalnum():
        found = services.work.job_page(work_id) or services.work.round_page(work_id)
    if found is None:
        raise HTTPException(
            404, "No job or round has this id; both are kept for a time only, see docs/settings.md."
        )
    return JSONResponse(found)


@router.get("/api/v1/console/worker")
def worker(name: str, services: AppServices) -> JSONResponse:
    """Returns the last lines of a worker's log, and the worker's counters."""
    lines = [
        line
        for host in services.deployments.logs()
        for child in host.workers
        if child.name == name
        for line in child.lines
    ]
    stats = [dict(one.stats) for one in services.workers.live() if one.name == name]
    return JSONResponse({"lines": lines, "stats": stats[-1] if stats else {}})


def _answer(request: Request, folder: Path, name: str, headers: dict[str, str]) -> Response:
    file = _files(folder).get(name)
    if file is None:
        raise HTTPException(404, "There is no such file.")
    headers = headers | {"ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


class _Events(StreamingResponse):
    """The response with the console's event stream. Closes the stream when the page disconnects."""

    def __init__(self, live: Live, begin: Callable[[], View]) -> None:
        self._stream = live.follow(lambda: begin().read)
        super().__init__(
            self._stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._stream):
            await super().__call__(scope, receive, send)
