"""Refusals of requests to vLLM's server that use the engine."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from poc_core.serving.openai_errors import error_event
from workers.vllm.chat.asgi import App, Held, Receive, Scope, Send, error_of, send_error
from workers.vllm.chat.errors import BadRequest, Failed, Refused, refusals
from workers.vllm.chat.fields import TOLD, Told

logger = logging.getLogger(__name__)

# Exceptions that vLLM's server treats as client errors.
_CLIENTS = {"VLLMClientError", "ValueError", "TypeError", "OverflowError"}


class ChatRequests:
    """ASGI middleware around vLLM's server, which parses the bodies (ChatPipeline.read)."""

    def __init__(
        self, app: App, ids_for_all: bool, is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        """`ids_for_all`: logprobs name tokens by their ids even without the network's fields.

        `is_lost`: returns whether the engine is dead.
        """
        self._app = app
        self._plain = Told(ids=ids_for_all)
        self._is_lost = is_lost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        refused = refusals()
        TOLD.set(self._plain)

        def instead() -> Awaitable[None] | None:
            return _refuse(send, refused[0]) if refused else None

        answer = Held(send, instead)
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:  # raised by vLLM's server again after it has answered
            if not answer.is_stream or self._is_lost():
                if not refused:
                    raise
                return None
            # The client would take a stream that ends without an error for a lost engine.
            if not refused:
                logger.exception("a stream broke off")
            await _break_off(answer, send, refused[0] if refused else _as_refused(error))


async def _refuse(send: Send, error: Refused) -> None:
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    await send_error(send, error.status, str(error), *headers, param=error.param)


async def _break_off(answer: Held, send: Send, error: Refused) -> None:
    """Ends an answer with an error: by its status if nothing was sent yet, else as an event."""
    if not answer.has_begun:
        await _refuse(send, error)
        return
    event = error_event(error_of(error.status, str(error), error.param))
    await answer.send({"type": "http.response.body", "body": event, "more_body": False})


def _as_refused(error: Exception) -> Refused:
    """Converts an exception to the status that vLLM's server uses outside of streams."""
    if {one.__name__ for one in type(error).__mro__} & _CLIENTS:
        return BadRequest(str(error), getattr(error, "parameter", None))
    return Failed("The worker could not compute this request; its log has the reason.")
