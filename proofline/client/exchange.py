"""Functions that both clients share: urls, answers, and polling of jobs."""

import os
from http import HTTPStatus
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from proofline.client.calls import PREFIX, Call
from proofline.client.errors import ApiError, JobFailedError, UrlError, describe_detail
from proofline.client.retries import retry_after_s

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"
PATIENCE_S = 30.0
FIRST_POLL_S = 0.1
MAX_POLL_S = 0.5
# Seconds of retries during polling while the API is unavailable: enough for a restart.
POLL_PATIENCE_S = 60.0
# A proxy of the environment (HTTP_PROXY) cannot reach this machine's node, and would see its key.
WITHOUT_PROXY: dict[str, None] = {
    f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")
}
# Errors that occur before anything is sent.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def base_url(url: str | None) -> str:
    """Returns a node's url: adds http://, and removes slashes and /api/v1/pow from the end.

    `url`: None means the variable PROOFLINE_URL or, without it, DEFAULT_URL. Raises UrlError if the
    url is invalid.
    """
    url = os.environ.get("PROOFLINE_URL", DEFAULT_URL) if url is None else url
    whole = url if "://" in url else f"http://{url}"
    base = whole.rstrip("/").removesuffix(PREFIX)
    try:
        parsed = httpx.URL(base)
        host = parsed.host
        host.encode("idna")  # as the connection does
    except (httpx.InvalidURL, UnicodeError) as error:  # UnicodeError: of IDNA
        raise UrlError(f"{url!r} cannot be read ({error}).") from error
    if parsed.scheme not in ("http", "https") or not host:
        raise UrlError(f"A node's url must look like http://host:port, not {url!r}.")
    return base


def headers(api_key: str | None) -> httpx.Headers:
    key = api_key if api_key is not None else os.environ.get("POC_API_KEY")
    return httpx.Headers({"Authorization": f"Bearer {key}"} if key else {}, encoding="utf-8")


def no_answer(base: str, error: httpx.HTTPError) -> ApiError:
    return ApiError(
        f"No answer from {base} ({error or type(error).__name__}); is `proofline up` running"
        " there?",
        was_sent=not isinstance(error, _NOT_SENT),
    )


def no_json(error: ValueError) -> ApiError:
    return ApiError(
        f"The body cannot be written as JSON ({error}).", HTTPStatus.UNPROCESSABLE_ENTITY
    )


def read(call: Call[T], base: str, answer: httpx.Response) -> T:
    """Converts a successful answer to the call's type. Raises ApiError for any other answer."""
    try:
        document = answer.json()
    except (ValueError, RecursionError):
        document = None
    if answer.status_code >= 400:
        detail = document.get("detail") if isinstance(document, dict) else None
        detail = detail or answer.text[:500] or None
        text = f"{describe_detail(detail)} (HTTP {answer.status_code})"
        raise ApiError(text, answer.status_code, retry_after_s(answer.headers.get("Retry-After")))
    try:
        if isinstance(document, dict) and answer.is_success:  # not a redirect
            return read_as(call.answer, document)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        why = f" ({place}: {problem['msg']}); is it of another version?"
    else:
        why = "; check the url."
    raise ApiError(
        f"{base}{call.path} answers something that is not Proofline's{why}", answer.status_code
    )


def read_as(model: type[T], document: dict[str, Any]) -> T:
    return TypeAdapter(model).validate_python(document)


def result_in(document: dict[str, Any], request_id: str) -> bool:
    """Returns True if `document` is a completed job's result. JobFailedError if the job failed.
    ApiError if `document` does not describe a job.
    """
    status = document.get("status")
    if status in ("failed", "cancelled"):
        why = f": {document['error']}" if document.get("error") else ""
        raise JobFailedError(
            f"Job {request_id} {status if status == 'failed' else 'was cancelled'}{why}"
        )
    if status in ("queued", "running"):
        return False
    if status not in ("completed", "OK"):  # "OK": jobs of distances
        raise ApiError(
            f"The answer for job {request_id} is not Proofline's; check the url.", HTTPStatus.OK
        )
    return True


def progress_in(document: dict[str, Any]) -> tuple[int, int] | None:
    """Returns (nonces done, all nonces) of an unfinished job; None if unknown."""
    n_done, n_total = document.get("n_done", 0), document.get("n_total")
    if n_total and isinstance(n_done, int) and isinstance(n_total, int):
        return n_done, n_total
    return None


def n_nonces_of(result: dict[str, Any]) -> int | None:
    """Returns the number of nonces of a completed job; None if the result does not contain it."""
    if isinstance(n_total := result.get("n_total"), int):
        return n_total
    artifacts, excluded = result.get("artifacts"), result.get("excluded_nonces") or []
    if isinstance(artifacts, list) and isinstance(excluded, list):
        return len(artifacts) + len(excluded)
    return None


def next_poll_s(pause_s: float) -> float:
    return min(MAX_POLL_S, pause_s * 1.3)
