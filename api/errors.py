"""Error responses: {"detail": ...} or OpenAI errors. Neither repeats the client's input."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

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
