"""The client's errors, and the conversion of the API's error details to text."""

import json
from typing import Any

from poc_core.errors import ProoflineError


class UrlError(ProoflineError):
    """The url of a node is invalid."""


class ApiError(ProoflineError):
    """The API refused a request, was not reached, or sent an unexpected answer."""

    def __init__(
        self,
        message: str,
        status: int | None = None,
        retry_after_s: float | None = None,
        was_sent: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status  # the answer's HTTP status; None without an answer
        # Seconds until a retry, as requested by the API; None without such a request.
        self.retry_after_s = retry_after_s
        self.was_sent = was_sent  # False if there was no connection to send the request

    @property
    def is_temporary(self) -> bool:
        """True if the same request can succeed later, for example after a restart of the API."""
        return self.status is None or self.status == 429 or self.status >= 500


class JobFailedError(ProoflineError):
    """A job ended without a result, because it failed or was cancelled."""


def describe_detail(detail: Any) -> str:
    """Converts the field `detail` of the API's error bodies to one line of text."""
    if isinstance(detail, str):
        return detail
    if isinstance(detail, list):
        return "; ".join(map(_problem, detail))
    if not isinstance(detail, dict):
        return "The API gives no reason"
    message = detail.get("message") or detail.get("error")
    rest = {name: value for name, value in detail.items() if name not in ("message", "error")}
    if not message:
        return json.dumps(rest)
    return f"{message} {json.dumps(rest)}" if rest else str(message)


def _problem(item: Any) -> str:
    if not isinstance(item, dict) or "msg" not in item:
        return json.dumps(item)
    loc = item.get("loc")
    parts = loc if isinstance(loc, list | tuple) else ()
    place = ".".join(str(part) for part in parts if part != "body")
    return f"{place}: {item['msg']}" if place else str(item["msg"])
