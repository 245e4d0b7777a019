"""vLLM's own OpenAI server around a worker's engine, behind the gate that lets proofs see what chat is under way."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from poc_core.openai_errors import error_body
from poc_core.records import ENGINE_LOST_HEADER
from workers.chat_gate import ChatGate

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Seconds after which a client that was refused may ask again. Rounds last minutes.
RETRY_AFTER_S = 30
# What the server answers without its engine, so proofs need not wait for it.
_WITHOUT_ENGINE = {"/tokenize", "/detokenize"}


class GatedChat:
    """ASGI middleware: every request that makes the engine work passes the gate."""

    def __init__(self, app: App, gate: ChatGate, is_lost: Callable[[], bool]) -> None:
        """`is_lost`: whether the engine is dead. What it leaves unanswered is marked, so that another worker may."""
        self._app = app
        self._gate = gate
        self._is_lost = is_lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in _WITHOUT_ENGINE:
            return await self._app(scope, receive, send)
        if not self._gate.enter_chat():
            return await _refuse(send)
        try:
            await self._app(scope, receive, self._unless_lost(send))
        finally:
            self._gate.leave_chat()

    def _unless_lost(self, send: Send) -> Send:
        """Holds an answer back until its first byte: one that begins after the engine's end is vLLM's complaint."""
        start: MutableMapping[str, Any] | None = None
        replaced = False

        async def send_on(message: MutableMapping[str, Any]) -> None:
            nonlocal start, replaced
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                replaced = self._is_lost()
                await (_lost(send) if replaced else send(start))
                start = None
            if not replaced:
                await send(message)

        return send_on


async def _refuse(send: Send) -> None:
    message = (
        "The node computes proofs for a round and serves no chat meanwhile (POC_CHAT_POLICY=exclusive); try later."
    )
    await _send_503(send, message, (b"retry-after", str(RETRY_AFTER_S).encode()))


async def _lost(send: Send) -> None:
    await _send_503(send, "The engine of this worker was lost; try again.", (ENGINE_LOST_HEADER.encode(), b"1"))


async def _send_503(send: Send, message: str, header: tuple[bytes, bytes]) -> None:
    """In the form that OpenAI clients understand."""
    body = error_body(503, message, "service_unavailable")
    headers = [(b"content-type", b"application/json"), header]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
