"""What the layers around vLLM's server share: ASGI's types, errors, and an answer held back."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from poc_core.serving.openai_errors import error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_KINDS = {
    400: "BadRequestError",
    401: "invalid_api_key",
    404: "NotFoundError",
    503: "service_unavailable",
}


def held(send: Send, instead: Callable[[], Awaitable[None] | None]) -> Send:
    """Holds an answer back until its first byte. `instead` is asked then: None, or what sends
    another answer in its place."""
    start: MutableMapping[str, Any] | None = None
    replaced = False

    async def send_on(message: MutableMapping[str, Any]) -> None:
        nonlocal start, replaced
        if message["type"] == "http.response.start":
            start = message
            return
        if start is not None:
            other = instead()
            replaced = other is not None
            await (send(start) if other is None else other)
            start = None
        if not replaced:
            await send(message)

    return send_on


async def send_error(
    send: Send,
    status: int,
    message: str,
    *more_headers: tuple[bytes, bytes],
    param: str | None = None,
) -> None:
    """In the form that OpenAI clients understand. `param`: the field that is wrong."""
    body = error_body(status, message, _KINDS[status], param)
    headers = [(b"content-type", b"application/json"), *more_headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
