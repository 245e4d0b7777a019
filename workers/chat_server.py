"""vLLM's own OpenAI server around a worker's engine, behind the gate that lets proofs see what chat is under way."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

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

    def __init__(self, app: App, gate: ChatGate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] in _WITHOUT_ENGINE:
            return await self._app(scope, receive, send)
        if not self._gate.enter_chat():
            return await _refuse(send)
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave_chat()


async def _refuse(send: Send) -> None:
    """503 in the form that OpenAI clients understand."""
    message = (
        "The node computes proofs for a round and serves no chat meanwhile (POC_CHAT_POLICY=exclusive); try later."
    )
    error = {"message": message, "type": "service_unavailable", "param": None, "code": 503}
    headers = [(b"content-type", b"application/json"), (b"retry-after", str(RETRY_AFTER_S).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
