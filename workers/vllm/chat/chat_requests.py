"""Requests that make the engine work, on their way to vLLM's server: what they ask for beyond it,
and how they are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, MutableMapping
from typing import Any

from workers.vllm.chat.asgi import App, Receive, Scope, Send, held, send_error
from workers.vllm.chat.errors import Refused, refusals
from workers.vllm.chat.fields import TOLD, Told
from workers.vllm.chat.network_fields import NetworkFields

# Bytes of a body that is read while nothing else of the event loop goes on.
_SHORT = 4096
_WITH_FIELDS = ("/v1/chat/completions", "/v1/completions")


class ChatRequests:
    """ASGI middleware. Bodies go on as they came: vLLM leaves alone what it does not know."""

    def __init__(self, app: App, fields: NetworkFields, ids_for_all: bool) -> None:
        """`ids_for_all`: logprobs call tokens by their ids for requests too that have none of the
        network's fields."""
        self._app = app
        self._fields = fields
        self._plain = Told(ids=ids_for_all)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        refused = refusals()
        told = self._plain
        if scope["path"] in _WITH_FIELDS:
            body = await _body(receive)
            if body is None:
                return None
            try:
                told = await self._read(body) or told
            except Refused as error:
                return await _refuse(send, error)
            receive = _again(body, receive)
        TOLD.set(told)

        def instead() -> Awaitable[None] | None:
            return _refuse(send, refused[0]) if refused else None

        try:
            await self._app(scope, receive, held(send, instead))
        except Exception:  # which vLLM's server raises once more when it has answered
            if not refused:
                raise

    async def _read(self, body: bytes) -> Told | None:
        if len(body) < _SHORT:
            return self._fields.read(body)
        return await asyncio.to_thread(self._fields.read, body)


async def _refuse(send: Send, error: Refused) -> None:
    await send_error(send, error.status, str(error), param=error.param)


async def _body(receive: Receive) -> bytes | None:
    """None: the client has left."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read, then what comes."""
    read: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": body, "more_body": False}
    ]

    async def receive_again() -> MutableMapping[str, Any]:
        return read.pop() if read else await receive()

    return receive_again
