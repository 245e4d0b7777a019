"""Error responses: {"detail": ...} or OpenAI errors. Neither repeats the client's input."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from redis.exceptions import ResponseError
from starlette.requests import ClientDisconnect

from poc_core.errors import AnswerTooLargeError, BodyError, ClaimsError, QueueFullError
from poc_core.redis_at.connections import TRANSIENT, is_transient
from poc_core.serving.openai_errors import error_body

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds without Redis that a waiting request outlasts: more than a restart or a failover takes.
OUTLASTED_S = 20.0
# Retry-After in seconds: enough to restart Redis or a worker, or for a batch or two.
RETRY_AFTER_S = 5
# The body of the answer to an unexpected exception.
MISTAKE = {"detail": "The node failed; its log has the reason."}
# uvicorn closes a connection after an exception. A client that was not told so would lose its next
# request.
CLOSES = {"Connection": "close"}

# Most problems listed for one body, and most characters of a field's name, for short logs.
_MAX_PROBLEMS = 10
_MAX_NAME = 64
# Exceptions of poc_core whose text is sent to the client.
_REFUSALS = (QueueFullError, AnswerTooLargeError, BodyError, ClaimsError)


def unavailable(detail: str | dict[str, Any], status_code: int = 503) -> HTTPException:
    """Returns an HTTPException with Retry-After, for a valid request that could succeed later."""
    return HTTPException(status_code, detail, headers={"Retry-After": str(RETRY_AFTER_S)})


class Outlasting:
    """Reads Redis for a request that waits for long, and outlasts a short outage of Redis."""

    def __init__(self) -> None:
        self.failed_s = 0.0  # seconds that the last failed read took
        self._away_since: float | None = None

    async def read(self, read: Callable[..., T], *args: Any) -> T | None:
        """Returns the result of `read`, called in a thread; None while Redis is unavailable. Raises
        the error after OUTLASTED_S seconds.
        """
        began = time.monotonic()
        try:
            found = await to_thread.run_sync(read, *args)
        except Exception as error:
            if not is_transient(error):  # a host that died answers nothing: TimeoutError
                raise
            now = time.monotonic()
            self.failed_s = now - began
            self._away_since = now if self._away_since is None else self._away_since
            if now - self._away_since > OUTLASTED_S:
                raise
            return None
        self._away_since = None
        return found


def malformed(problems: Iterable[Mapping[str, Any]]) -> HTTPException:
    """Returns an HTTPException 422 that lists pydantic's errors: the body's wrong fields."""
    return HTTPException(422, [_problem(problem) for problem in list(problems)[:_MAX_PROBLEMS]])


def malformed_body(error: ValidationError) -> HTTPException:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return malformed({**problem, "loc": ("body", *problem["loc"])} for problem in problems)


def openai_error(
    status: int, message: str, kind: str | None = None, param: str | None = None
) -> JSONResponse:
    """Returns an OpenAI error as a response. A 503 also has a Retry-After header."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse(error_body(status, message, kind, param), status, headers)


def install(app: FastAPI) -> None:
    """Registers the app's exception handlers, including one for unexpected exceptions."""
    for redis_error in (*TRANSIENT, ResponseError):
        app.add_exception_handler(redis_error, _redis_away)
    for refusal in (*_REFUSALS, RequestValidationError):
        app.add_exception_handler(refusal, _refused)
    app.add_exception_handler(ClientDisconnect, _nobody_there)
    app.add_exception_handler(Exception, _bug)


def _problem(problem: Mapping[str, Any]) -> dict[str, Any]:
    loc = [part[:_MAX_NAME] if isinstance(part, str) else part for part in problem["loc"]]
    return {"loc": loc, "msg": problem["msg"], "type": problem["type"]}


async def _redis_away(_: Request, error: Exception) -> JSONResponse:
    if not is_transient(error):
        raise error
    log.error("Redis does not answer: %s", error)
    return _answer(unavailable(f"The node cannot reach its Redis; try again in {RETRY_AFTER_S} s."))


async def _refused(_: Request, error: Exception) -> JSONResponse:
    match error:
        case QueueFullError():
            return _answer(unavailable(str(error), 429))
        case AnswerTooLargeError():
            return _answer(HTTPException(413, str(error)))
        case BodyError():
            problem = {"loc": ("body", *error.loc), "msg": str(error), "type": error.kind}
            return _answer(malformed([problem]))
        case RequestValidationError():
            return _answer(malformed(error.errors()))
    return _answer(HTTPException(400, str(error)))


async def _nobody_there(_: Request, error: Exception) -> Response:
    return Response(status_code=400)  # the client disconnected while it sent its body


async def _bug(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse(MISTAKE, 500, CLOSES)


def _answer(error: HTTPException) -> JSONResponse:
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)
