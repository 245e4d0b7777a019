"""Shared by the layers around vLLM's server: ASGI types, errors, and a delayed answer."""

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

# Events of /v1/responses that vLLM sends before the engine has received the request.
_EARLY = re.compile(rb"event: response\.(created|queued|in_progress)\n")
_KINDS = {
    400: "BadRequestError",
    401: "invalid_api_key",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "service_unavailable",
}


class Held:
    """Holds an answer back until its first byte; a stream, until the first event from the
    engine.
    """

    def __init__(self, send: Send, instead: Callable[[], Awaitable[None] | None]) -> None:
        """`instead` is called at that time: returns None, or an awaitable that sends another
        answer.
        """
        self._send = send
        self._instead = instead
        self._waiting: list[MutableMapping[str, Any]] = []
        self._is_replaced = False
        self.has_begun = False
        self.is_stream = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self.has_begun:
            if not self._is_replaced:
                await self._send(message)
            return
        self._waiting.append(message)
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.is_stream = kind.startswith(b"text/event-stream")
        elif not (message.get("more_body") and _EARLY.match(message.get("body", b""))):
            self.has_begun = True
            other = self._instead()
            self._is_replaced = other is not None
            if other is not None:
                await other
                return
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                await self._send(one)


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
