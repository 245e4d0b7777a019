"""ASGI middleware that registers the requests of vLLM's OpenAI server at the chat gate."""

import asyncio
import hmac
import json
import logging
import re
import resource
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from poc_core import records
from poc_core.serving import openai_errors, openai_paths
from workers.chat_gate import ChatGate
from workers.vllm.chat.errors import BadRequest, Failed, Refused, Unavailable, refusals
from workers.vllm.chat.fields import CLIENT, SALT, TOLD, RequestOptions

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Types of OpenAI errors.
_KINDS = {
    400: "BadRequestError",
    401: "invalid_api_key",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "service_unavailable",
}
# Error text for refused clients, as the network's nodes word it.
_ACTIVE = (
    "PoC generation is active; the node serves no chat meanwhile (POC_CHAT_POLICY=exclusive)."
    " Try again later."
)
# Seconds for vLLM to end an answer whose client has disconnected.
_END_S = 1.0
# Paths answered without the engine, so proofs need not wait for them.
_WITHOUT_ENGINE = {"/tokenize", "/detokenize"}
# Events of /v1/responses that vLLM sends before the engine has received the request.
_EARLY = re.compile(rb"event: response\.(created|queued|in_progress)\n")
# Exceptions that vLLM's server takes for client errors.
_CLIENTS = {"VLLMClientError", "ValueError", "TypeError", "OverflowError"}
# Requests that the gateway itself sends, without a client.
_LOOKUPS = ("GET /v1/models", "GET /health", "GET /metrics")


class GatedChat:
    """ASGI middleware that accepts only the gateway, and registers chat requests at the gate."""

    def __init__(
        self,
        app: App,
        gate: ChatGate,
        is_lost: Callable[[], bool],
        secret: str | None = None,
        paths: Sequence[str] = openai_paths.USUAL,
        ids_for_all: bool = False,
    ) -> None:
        """`is_lost()`: whether the engine is dead; another worker may then answer. `secret`: the
        gateway's secret; None accepts any client. `paths`: the only paths that are served, because
        other paths can change or end the engine. `ids_for_all`: True names tokens by id in the
        logprobs of all requests, even without the network's fields.
        """
        self._app = app
        self._gate = gate
        self._is_lost = is_lost
        self._secret = None if secret is None else secret.encode()
        self._paths = (*paths, *_LOOKUPS)
        self._plain = RequestOptions(ids=ids_for_all)
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
        if not openai_paths.is_among(self._paths, scope["method"], scope["path"]):
            return await send_error(send, 404, "A worker serves nothing but chat.")
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        told = dict(scope["headers"])
        for header, known in (
            (records.GATEWAY_CLIENT_HEADER, CLIENT),
            (records.GATEWAY_SALT_HEADER, SALT),
        ):
            known.set(told.get(header.encode(), b"").decode("latin-1"))
        TOLD.set(self._plain)
        if scope["path"] in _WITHOUT_ENGINE:
            return await self._answer(scope, receive, send, lambda: False)
        if not self._gate.enter_chat():
            return await send_refusal(send, Unavailable(_ACTIVE))
        self._loop = asyncio.get_running_loop()
        try:
            await self._answer(scope, receive, send, self._is_lost)
        finally:
            self._gate.leave_chat()

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, is_lost: Callable[[], bool]
    ) -> None:
        """Sends vLLM's answer, or an error if the request was refused or the engine was lost."""
        before, refused = is_lost(), refusals()

        def instead() -> Awaitable[None] | None:
            if is_lost():  # an answer that begins now is vLLM's error
                return _lost(send, before)
            return send_refusal(send, refused[0]) if refused else None

        answer = _Answer(scope["path"], receive, send, instead)
        if scope["path"] not in _WITHOUT_ENGINE:
            self._answers.add(answer)
        try:
            await answer.run(self._app, scope)
        except Exception as error:  # vLLM's server raises it again after its answer
            if is_lost() and not answer.has_begun:
                await _lost(send, before)
            elif answer.is_stream and not is_lost():
                # A stream that ends without an error would look like a lost engine.
                if not refused:
                    logger.exception("a stream ended early")
                await _break_off(answer, send, refused[0] if refused else _as_refused(error))
            elif not refused:
                raise
        finally:
            self._answers.discard(answer)

    def _end_answers_soon(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end_answers)

    def _end_answers(self) -> None:
        for answer in self._answers:
            answer.end()

    def _is_gateway(self, scope: Scope) -> bool:
        if self._secret is None:
            return True
        given = dict(scope["headers"]).get(records.GATEWAY_SECRET_HEADER.encode(), b"")
        return hmac.compare_digest(given, self._secret)


class _Answer:
    """An answer in progress. Its first message is held back until the body begins, or in a stream
    until the engine's first event. If a round ends the answer, vLLM sees a client disconnect.
    """

    def __init__(
        self,
        path: str,
        receive: Receive,
        send: Send,
        instead: Callable[[], Awaitable[None] | None],
    ) -> None:
        """`instead()` is called when the answer begins; it returns None or sends another answer."""
        self._path = path
        self._receive = receive
        self._send = send
        self._instead = instead
        self._ended = asyncio.Event()
        self._waiting: list[MutableMapping[str, Any]] = []
        self._is_over = self._is_replaced = False
        self.has_begun = self.is_stream = False

    def end(self) -> None:
        """Requests the early end of the answer. Has no effect while the last part is sent."""
        if not self._is_over and (self.is_stream or not self.has_begun):
            self._ended.set()

    async def run(self, app: App, scope: Scope) -> None:
        """Forwards vLLM's answer. After `end`, sends a 503, or an error event in a stream."""
        work = asyncio.ensure_future(app(scope, self._heard, self.send))
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
        elif self._is_replaced:  # the other answer is complete
            return
        elif self.has_begun:
            error = openai_errors.shaped(self._path, 503, openai_errors.error_body(503, _ACTIVE))
            event = openai_errors.error_event(error)
            await self._send({"type": "http.response.body", "body": event})
        else:
            await send_refusal(self._send, Unavailable(_ACTIVE))

    async def _heard(self) -> MutableMapping[str, Any]:
        """Returns the client's next message, or a disconnect if `end` was called."""
        message = asyncio.ensure_future(self._receive())
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({message, ended}, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if self._ended.is_set() else message.result()
        finally:
            message.cancel()
            ended.cancel()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Forwards a message of vLLM's server to the client, or holds the message back."""
        if self._ended.is_set():
            return
        self._waiting.append(message)
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.is_stream = kind.startswith(b"text/event-stream")
            return
        self._is_over = not message.get("more_body")
        if not self.has_begun:
            if not self._is_over and _EARLY.match(message.get("body", b"")):
                return
            self.has_begun = True
            other = self._instead()
            self._is_replaced = other is not None
            if other is not None:
                await other
        waiting, self._waiting = self._waiting, []
        for one in waiting if not self._is_replaced else ():
            await self._send(one)


async def _lost(send: Send, before: bool) -> None:
    """Sends 503 for a lost engine. `before`: True if it was lost before the request arrived."""
    await send_error(
        send,
        503,
        "The engine of this worker was lost; try again.",
        (records.ENGINE_LOST_HEADER.encode(), b"0" if before else b"1"),
    )


async def _break_off(answer: _Answer, send: Send, error: Refused) -> None:
    """Ends a stream with an error: as an HTTP error if nothing was sent yet, else as an event."""
    if not answer.has_begun:
        await send_refusal(send, error)
        return
    event = openai_errors.error_event(error_of(error.status, str(error), error.param))
    await answer.send({"type": "http.response.body", "body": event, "more_body": False})


def _as_refused(error: Exception) -> Refused:
    """Converts an exception to a Refused error with vLLM's HTTP status. If a stream has begun,
    Starlette raises a RuntimeError, whose cause is the original exception.
    """
    if type(error) is RuntimeError and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if {one.__name__ for one in type(error).__mro__} & _CLIENTS:
        return BadRequest(str(error), getattr(error, "parameter", None))
    return Failed("The worker could not compute this request; its log has the reason.")


def error_of(status: int, message: str, param: str | None = None) -> dict[str, object]:
    """Returns an OpenAI error body. `param`: the name of the invalid request field."""
    return openai_errors.error_body(status, message, _KINDS[status], param)


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


# Seconds for which a connection without the gateway's secret may stay open. Under many requests the
# gateway's event loop can take more than a second from the connect to the first byte.
SECONDS = 10.0


def guarded(secret: str | None, most: int | None = None) -> Any:
    """Returns an HTTP protocol class for `uvicorn.Config(http=...)`. It limits connections without
    `secret` to `most`, or to half of this process's file limit. `secret`: None means no limit.
    """
    limit = most or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    strangers: dict[HttpToolsProtocol, asyncio.TimerHandle] = {}  # the oldest first

    class Guarded(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(strangers) >= limit:
                next(iter(strangers)).let_go().abort()  # type: ignore[attr-defined]
            strangers[self] = self.loop.call_later(SECONDS, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self.let_go()
            super().connection_lost(exc)

        def on_headers_complete(self) -> None:
            # Checked here, because a busy loop answers requests after the timer.
            shown = dict(self.headers).get(records.GATEWAY_SECRET_HEADER.encode(), b"")
            if hmac.compare_digest(shown, (secret or "").encode()):
                self.let_go()
            super().on_headers_complete()

        def let_go(self) -> asyncio.Transport:
            if timer := strangers.pop(self, None):
                timer.cancel()
            return self.transport

    return Guarded if secret is not None else "auto"
