"""Error bodies of the API and of workers' chat servers: in Anthropic's form for paths below
/v1/messages, else in OpenAI's form.
"""

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
# a tuple, because a worker's type may be a list or object, which no set can look up
_ANTHROPIC_KINDS = (_USUAL[1], *(kind for _, kind in _KINDS.values()))


def error_body(
    status: int, message: str, kind: str | None = None, param: str | None = None
) -> dict[str, object]:
    """Returns an error body in OpenAI's form. `kind`: the error's type; None means the usual type
    of the HTTP status. `param`: the invalid field.
    """
    kind = kind or _KINDS.get(status, _USUAL)[0]
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def shaped(path: str, status: int, body: Any) -> Any:
    """Converts an error body (FastAPI's {"detail": ...}, OpenAI's or Anthropic's) to the form that
    clients of `path` expect. For paths that such clients do not use, returns `body` unchanged.
    """
    if not is_clients_path(path):
        return body
    error = body.get("error") if isinstance(body, dict) else None
    if not (isinstance(error, dict) and isinstance(error.get("message"), str)):
        detail = error or (body.get("detail") if isinstance(body, dict) else None)
        message, param = _sentence(detail or body)
        message = message or f"The server gives no reason (HTTP {status})"
        body = error_body(status, message, param=param)
        error = body["error"]
    if not path.startswith(_ANTHROPIC):
        return body
    if body.get("type") == "error" and error.get("type") in _ANTHROPIC_KINDS:
        return body  # vLLM's own types are OpenAI's
    kind = _KINDS.get(status, _USUAL)[1]
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


def said_by(raw: bytes) -> Any:
    """Parses the body of an answer as JSON. Returns the text of a body that is not JSON."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw.decode(errors="replace")


def _sentence(detail: Any) -> tuple[str, str | None]:
    """Returns the text of an error's `detail`, and the name of the first invalid field or None."""
    texts, fields = [], []
    for one in detail if isinstance(detail, list) else [detail]:
        if not isinstance(one, dict):
            texts.append(str(one))
            continue
        loc = one.get("loc")
        field = ".".join(map(str, loc[1:])) if isinstance(loc, list | tuple) else ""
        text = str(one.get("msg") or one.get("message") or one)
        texts.append(f"{field}: {text}" if field else text)
        fields.append(field)
    return "; ".join(texts), (fields[0] or None) if fields else None


def error_event(error: Any) -> bytes:
    """Returns an error body as a server-sent event, named `error` if it has Anthropic's form."""
    name = b"event: error\n" if error.get("type") == "error" else b""
    return name + b"data: " + json.dumps(error).encode() + b"\n\n"
