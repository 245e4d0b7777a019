"""vLLM's OpenAI server around a worker's engine, behind the gate that informs proofs about chat in
progress.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from poc_core.records import (
    ENGINE_LOST_HEADER,
    GATEWAY_CLIENT_HEADER,
    GATEWAY_SALT_HEADER,
    GATEWAY_SECRET_HEADER,
)
from poc_core.serving.openai_errors import error_body, error_event, shaped
from poc_core.serving.openai_paths import USUAL, is_among
from workers.chat_gate import ChatGate
from workers.vllm.chat.asgi import App, Held, Receive, Scope, Send, send_error
from workers.vllm.chat.fields import CLIENT, SALT

# Seconds until a refused client should retry. Rounds last minutes.
RETRY_AFTER_S = 30
# Error text for refused clients, as the network's nodes word it.
_ACTIVE = (
    "PoC generation is active; the node serves no chat meanwhile (POC_CHAT_POLICY=exclusive)."
    " Try again later."
)
# Seconds for vLLM to end an answer whose client has disconnected.
_END_S = 1.0
# Paths answered without the engine, so proofs need not wait for them.
_WITHOUT_ENGINE = {"/tokenize", "/detokenize"}
# Requests of the gateway itself.
_LOOKUPS = ("GET /v1/models", "GET /health", "GET /metrics")


class GatedChat:
    """ASGI middleware: accepts chat requests from the gateway only, and lets requests that use the
    engine pass the gate.
    """

    def __init__(
        self,
        app: App,
        gate: ChatGate,
        is_lost: Callable[[], bool],
        secret: str | None = None,
        paths: Sequence[str] = USUAL,
    ) -> None:
        """`is_lost`: returns whether the engine is dead; its unanswered requests are marked, so
        that another worker may answer. `secret`: the gateway's; None accepts any client. `paths`:
        paths that are served (openai_paths.passed_on); vLLM's server has others, which change or
        end the engine.
        """
        self._app = app
        self._gate = gate
        self._is_lost = is_lost
        self._secret = None if secret is None else secret.encode()
        self._paths = (*paths, *_LOOKUPS)
        self._answers: set[_Answer] = set()  # in progress
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop of the answers
        gate.on_exclusive = self._end_answers_soon

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # a WebSocket, which vLLM has for some paths
            return await send({"type": "websocket.close", "code": 1008})
        if not self._is_gateway(scope):
            return await send_error(
                send, 401, "Chat is served by the node's API, not by its workers."
            )
        if not is_among(self._paths, scope["method"], scope["path"]):
            return await send_error(send, 404, "A worker serves nothing but chat.")
        if scope["method"] != "POST" or scope["path"] in _WITHOUT_ENGINE:
            return await self._app(scope, receive, send)
        told = dict(scope["headers"])
        for header, known in ((GATEWAY_CLIENT_HEADER, CLIENT), (GATEWAY_SALT_HEADER, SALT)):
            known.set(told.get(header.encode(), b"").decode("latin-1"))
        if not self._gate.enter_chat():
            return await _refuse(send)
        self._loop = asyncio.get_running_loop()
        before = self._is_lost()

        def instead() -> Awaitable[None] | None:
            """Replaces an answer that begins after the engine's end, because it is vLLM's error."""
            return _lost(send, before) if self._is_lost() else None

        held = Held(send, instead)
        answer = _Answer(scope["path"], receive, held.send)
        self._answers.add(answer)
        try:
            await answer.run(self._app, scope)
        except Exception:
            if held.has_begun or not self._is_lost():
                raise
            await _lost(send, before)
        finally:
            self._answers.discard(answer)
            self._gate.leave_chat()

    def _end_answers_soon(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_answers)

    def _end_answers(self) -> None:
        for answer in self._answers:
            answer.end()

    def _is_gateway(self, scope: Scope) -> bool:
        if self._secret is None:
            return True
        given = dict(scope["headers"]).get(GATEWAY_SECRET_HEADER.encode(), b"")
        return hmac.compare_digest(given, self._secret)


class _Answer:
    """An answer in progress, which a round may end; vLLM sees this as a disconnect of the
    client.
    """

    def __init__(self, path: str, receive: Receive, send: Send) -> None:
        self._path = path
        self._receive = receive
        self._send = send
        self._ended = asyncio.Event()
        self._headers: Sequence[tuple[bytes, bytes]] = ()
        self._has_begun = self._is_over = False

    @property
    def _is_stream(self) -> bool:
        return dict(self._headers).get(b"content-type", b"").startswith(b"text/event-stream")

    def end(self) -> None:
        """Ends the answer soon, unless its last part is being sent."""
        if not self._is_over and (self._is_stream or not self._has_begun):
            self._ended.set()

    async def run(self, app: App, scope: Scope) -> None:
        """Forwards the answer.

        If it is ended early, sends the reason instead of it or after its last part.
        """
        work = asyncio.ensure_future(app(scope, self._heard, self._unless_ended))
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.is_set():
                await asyncio.wait({work}, timeout=_END_S)
        finally:
            ended.cancel()
            work.cancel()
            await asyncio.wait({work})
        if not self._ended.is_set():
            work.result()
        elif self._has_begun:
            await self._send({"type": "http.response.body", "body": _event(self._path)})
        else:
            await _refuse(self._send)

    async def _heard(self) -> MutableMapping[str, Any]:
        """Returns the client's next message, or a disconnect once the answer is ended."""
        message = asyncio.ensure_future(self._receive())
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({message, ended}, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if self._ended.is_set() else message.result()
        finally:
            message.cancel()
            ended.cancel()

    async def _unless_ended(self, message: MutableMapping[str, Any]) -> None:
        if self._ended.is_set():
            return
        if message["type"] == "http.response.start":
            self._headers = message["headers"]
        else:
            self._has_begun, self._is_over = True, not message.get("more_body")
        await self._send(message)


def _event(path: str) -> bytes:
    """Returns the last event of a stream that a round ended."""
    return error_event(shaped(path, 503, error_body(503, _ACTIVE)))


async def _refuse(send: Send) -> None:
    await send_error(send, 503, _ACTIVE, (b"retry-after", str(RETRY_AFTER_S).encode()))


async def _lost(send: Send, before: bool) -> None:
    """Sends 503 for a lost engine. `before`: whether the request came after the engine's end."""
    await send_error(
        send,
        503,
        "The engine of this worker was lost; try again.",
        (ENGINE_LOST_HEADER.encode(), b"0" if before else b"1"),
    )
