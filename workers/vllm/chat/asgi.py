"""What the layers around vLLM's server share: ASGI's types, errors, and an answer held back."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from poc_core.serving.openai_errors import error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Events of /v1/responses that vLLM sends before the engine has the request.
_EARLY = re.compile(rb"event: response\.(created|queued|in_progress)\n")
_KINDS = {
    400: "BadRequestError",
    401: "invalid_api_key",
    404: "NotFoundError",
    503: "service_unavailable",
}


def held(send: Send, instead: Callable[[], Awaitable[None] | None]) -> Send:
    """Holds an answer back until its first byte, a stream's until an event that the engine has a
    part in. `instead` is asked then: None, or what sends another answer in its place."""
    start: MutableMapping[str, Any] | None = None
    early: list[MutableMapping[str, Any]] = []
    replaced = False

    async def send_on(message: MutableMapping[str, Any]) -> None:
        nonlocal start, replaced
        if message["type"] == "http.response.start":
            start = message
            return
        if start is not None:
            if message.get("more_body") and _EARLY.match(message.get("body", b"")):
                early.append(message)
                return
            other = instead()
            replaced = other is not None
            await (send(start) if other is None else other)
            start = None
            for one in () if replaced else early:
                await send(one)
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
