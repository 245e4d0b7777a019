"""ASGI types and errors around vLLM's server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from poc_core.serving.openai_errors import error_body
from workers.vllm.chat.errors import Refused

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_KINDS = {
    400: "BadRequestError",
    401: "invalid_api_key",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "service_unavailable",
}


def error_of(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """Returns the error as an OpenAI error body. `param`: the invalid field."""
    return error_body(status, message, _KINDS[status], param)


async def send_error(
    send: Send,
    status: int,
    message: str,
    *more_headers: tuple[bytes, bytes],
    param: str | None = None,
) -> None:
    body = error_of(status, message, param)
    headers = [(b"content-type", b"application/json"), *more_headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def send_refusal(send: Send, error: Refused) -> None:
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    await send_error(send, error.status, str(error), *headers, param=error.param)
