"""Error bodies for clients of model paths: in Anthropic's form below /v1/messages, elsewhere in
OpenAI's. Used by the API and the workers' chat servers."""

import json
from typing import Any

from poc_core.serving.openai_paths import is_clients_path

_ANTHROPIC = "/v1/messages"
# OpenAI's and Anthropic's error types by status. Other statuses are invalid requests.
_KINDS = {
    401: ("invalid_api_key", "authentication_error"),
    403: ("insufficient_permissions", "permission_error"),
    404: ("NotFoundError", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_exceeded", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("service_unavailable", "overloaded_error"),
}
_USUAL = ("invalid_request_error", "invalid_request_error")


def error_body(
    status: int, message: str, kind: str | None = None, param: str | None = None
) -> dict[str, object]:
    """Returns an OpenAI error body, also used as a stream's last event. `param`: the invalid field.

    `kind`: the error's type; None for the default of the HTTP status.
    """
    kind = kind or _KINDS.get(status, _USUAL)[0]
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def shaped(path: str, status: int, body: Any) -> Any:
    """Converts an error's JSON to the form for the path's clients. Other paths keep `body`.

    `body`: {"detail": ...}, or an error in OpenAI's or Anthropic's form.
    """
    if not is_clients_path(path):
        return body
    error = body.get("error") if isinstance(body, dict) else None
    if not (isinstance(error, dict) and isinstance(error.get("message"), str)):
        detail = error or (body.get("detail") if isinstance(body, dict) else None)
        message, param = _sentence(detail if detail is not None else body)
        body = error_body(status, message, param=param)
        error = body["error"]
    if not path.startswith(_ANTHROPIC) or body.get("type") == "error":
        return body
    kind = _KINDS.get(status, _USUAL)[1]
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def said_by(raw: bytes) -> Any:
    """Parses an answer's bytes as JSON, or as text if the bytes are not JSON."""
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def _sentence(detail: Any) -> tuple[str, str | None]:
    """Returns a detail as one text, and the first field that the detail names, or None."""
    problems = detail if isinstance(detail, list) else [detail]
    told, fields = [], []
    for one in problems:
        if not isinstance(one, dict):
            told.append(str(one))
            continue
        field = ".".join(str(part) for part in one.get("loc", ())[1:])
        said = str(one.get("msg") or one.get("message") or one)
        told.append(f"{field}: {said}" if field else said)
        fields.append(field)
    return "; ".join(told), (fields[0] or None) if fields else None


def error_event(error: Any) -> bytes:
    """Returns an error's body as an event of a stream. Anthropic's events have a name."""
    name = b"event: error\n" if error.get("type") == "error" else b""
    return name + b"data: " + json.dumps(error).encode() + b"\n\n"
