"""The client's errors, and a refusal's reason as one line."""

import json
from typing import Any

from poc_core.errors import ProoflineError


class UrlError(ProoflineError):
    """A node's url that cannot be read."""


class ApiError(ProoflineError):
    """The API refused a request or could not be reached; the text is the API's reason."""

    def __init__(
        self,
        message: str,
        status: int | None = None,
        retry_after_s: float | None = None,
        was_sent: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status  # of the answer; None without one
        # when the API wants to be asked again; None: it does not say
        self.retry_after_s = retry_after_s
        self.was_sent = was_sent  # False: nobody was there to get the request

    @property
    def is_temporary(self) -> bool:
        """True if the same request may be answered a moment later, as over a restart of the API."""
        return self.status is None or self.status >= 500


class JobFailedError(ProoflineError):
    """A job ended without a result."""


def describe_detail(detail: Any) -> str:
    """A `detail` as one line: FastAPI's or ours, a text, a list of field errors, or an object."""
    if isinstance(detail, str):
        return detail
    if isinstance(detail, list):
        problems = []
        for item in detail:
            if isinstance(item, dict) and "msg" in item:
                place = ".".join(str(part) for part in item.get("loc", []) if part != "body")
                problems.append(f"{place}: {item['msg']}" if place else str(item["msg"]))
            else:
                problems.append(json.dumps(item))
        return "; ".join(problems)
    if isinstance(detail, dict):
        message = detail.get("message") or detail.get("error")
        rest = {name: value for name, value in detail.items() if name not in ("message", "error")}
        return (
            f"{message} {json.dumps(rest)}"
            if message and rest
            else str(message or json.dumps(rest))
        )
    return "The API gives no reason"
