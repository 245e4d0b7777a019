"""vLLM's own OpenAI server around a worker's engine, behind the gate that lets proofs see what
chat is under way.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence

from poc_core.records import (
    ENGINE_LOST_HEADER,
    GATEWAY_CLIENT_HEADER,
    GATEWAY_SECRET_HEADER,
)
from poc_core.serving.openai_paths import USUAL, is_among
from workers.chat_gate import ChatGate
from workers.vllm.chat.asgi import App, Receive, Scope, Send, held, send_error
from workers.vllm.chat.fields import CLIENT

# Seconds after which a client that was refused may ask again. Rounds last minutes.
RETRY_AFTER_S = 30
# What the server answers without its engine, so proofs need not wait for it.
_WITHOUT_ENGINE = {"/tokenize", "/detokenize"}
# What the gateway asks for besides what it passes on.
_LOOKUPS = ("GET /v1/models", "GET /health", "GET /metrics")


class GatedChat:
    """ASGI middleware: takes only the gateway's requests for chat; what makes the engine work
    passes the gate.
    """

    def __init__(
        self,
        app: App,
        gate: ChatGate,
        is_lost: Callable[[], bool],
        secret: str | None = None,
        paths: Sequence[str] = USUAL,
    ) -> None:
        """`is_lost`: whether the engine is dead. What it leaves unanswered is marked, so that
        another worker may. `secret`: of the gateway; None: any client is taken for it. `paths`:
        what is served (openai_paths.passed_on); vLLM's server has others, which change or end
        the engine.
        """
        self._app = app
        self._gate = gate
        self._is_lost = is_lost
        self._secret = None if secret is None else secret.encode()
        self._paths = (*paths, *_LOOKUPS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # a WebSocket, of which vLLM has some
            return await send({"type": "websocket.close", "code": 1008})
        if not self._is_gateway(scope):
            return await send_error(
                send, 401, "Chat is served by the node's API, not by its workers."
            )
        if not is_among(self._paths, scope["method"], scope["path"]):
            return await send_error(send, 404, "A worker serves nothing but chat.")
        if scope["method"] != "POST" or scope["path"] in _WITHOUT_ENGINE:
            return await self._app(scope, receive, send)
        client = dict(scope["headers"]).get(GATEWAY_CLIENT_HEADER.encode(), b"")
        CLIENT.set(client.decode("latin-1"))
        if not self._gate.enter_chat():
            return await _refuse(send)
        try:
            await self._app(scope, receive, self._unless_lost(send, self._is_lost()))
        finally:
            self._gate.leave_chat()

    def _is_gateway(self, scope: Scope) -> bool:
        if self._secret is None:
            return True
        given = dict(scope["headers"]).get(GATEWAY_SECRET_HEADER.encode(), b"")
        return hmac.compare_digest(given, self._secret)

    def _unless_lost(self, send: Send, before: bool) -> Send:
        """An answer that begins after the engine's end is vLLM's complaint. `before`: whether the
        request came after that end too."""

        def instead() -> Awaitable[None] | None:
            return _lost(send, before) if self._is_lost() else None

        return held(send, instead)


async def _refuse(send: Send) -> None:
    message = (
        "PoC generation is active; the node serves no chat meanwhile (POC_CHAT_POLICY=exclusive)."
        " Try again later."
    )
    await send_error(send, 503, message, (b"retry-after", str(RETRY_AFTER_S).encode()))


async def _lost(send: Send, before: bool) -> None:
    await send_error(
        send,
        503,
        "The engine of this worker was lost; try again.",
        (ENGINE_LOST_HEADER.encode(), b"0" if before else b"1"),
    )
