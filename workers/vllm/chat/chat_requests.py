"""Requests that make the engine work, on their way to vLLM's server: what they ask for beyond it,
and how they are refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from poc_core.serving.openai_errors import error_event
from workers.vllm.chat.asgi import App, Held, Receive, Scope, Send, error_of, send_error
from workers.vllm.chat.errors import BadRequest, Failed, Refused, refusals
from workers.vllm.chat.fields import TOLD, Told
from workers.vllm.chat.network_fields import NetworkFields

logger = logging.getLogger(__name__)

# Bytes of a body that is read while nothing else of the event loop goes on.
_SHORT = 4096
# What vLLM's server takes for the client's fault.
_CLIENTS = {"VLLMClientError", "ValueError", "TypeError", "OverflowError"}
_WITH_FIELDS = ("/v1/chat/completions", "/v1/completions")


class ChatRequests:
    """ASGI middleware. Bodies go on as they came: vLLM leaves alone what it does not know."""

    def __init__(
        self,
        app: App,
        fields: NetworkFields,
        ids_for_all: bool,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """`ids_for_all`: logprobs call tokens by their ids for requests too that have none of the
        network's fields. `is_lost`: whether the engine is dead."""
        self._app = app
        self._fields = fields
        self._plain = Told(ids=ids_for_all)
        self._is_lost = is_lost

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

        answer = Held(send, instead)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:  # which vLLM's server raises once more when it has answered
            if not answer.is_stream or self._is_lost():
                if not refused:
                    raise
                return None
            # A stream's end without a word would be taken for the engine's.
            if not refused:
                logger.exception("a stream broke off")
            await _break_off(answer, send, refused[0] if refused else _as_refused(error))

    async def _read(self, body: bytes) -> Told | None:
        if len(body) < _SHORT:
            return self._fields.read(body)
        return await asyncio.to_thread(self._fields.read, body)


async def _refuse(send: Send, error: Refused) -> None:
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    await send_error(send, error.status, str(error), *headers, param=error.param)


async def _break_off(answer: Held, send: Send, error: Refused) -> None:
    """Ends a stream with an error: by its status where nothing was sent yet, else as an event."""
    if not answer.has_begun:
        await _refuse(send, error)
        return
    event = error_event(error_of(error.status, str(error), error.param))
    await answer.send({"type": "http.response.body", "body": event, "more_body": False})


def _as_refused(error: Exception) -> Refused:
    """With the status that vLLM's server gives an error outside of streams."""
    if {one.__name__ for one in type(error).__mro__} & _CLIENTS:
        return BadRequest(str(error), getattr(error, "parameter", None))
    return Failed("The worker could not compute this request; its log tells more.")


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
