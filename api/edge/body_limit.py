"""Refuses bodies over a limit, before or while they are read, to protect the API's memory."""

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import unavailable

# Largest bodies that all requests together may hold at the same time.
_LARGEST_AT_ONCE = 4
# Bytes of a body that always find room.
_SMALL_BYTES = 64 * 1024
# Scope key: called once a body is done with, if that is long before the answer.
BODY_DONE = "proofline.body_done"


class BodyLimit:
    """Middleware: 413 for a body over `max_bytes`, 503 while the bodies under way fill the room."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._detail = (
            f"The body is larger than {max_bytes} bytes (POC_MAX_BODY_BYTES); split the request."
        )
        self._held = 0  # bytes, of all requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            answer = JSONResponse({"detail": self._detail}, 413, headers={"Connection": "close"})
            await answer(scope, receive, send)
            return

        n_received = held = 0

        async def counted() -> Message:
            nonlocal n_received, held
            message = await receive()
            size = len(message.get("body", b""))
            n_received += size
            if n_received > self._max_bytes:
                raise HTTPException(413, self._detail, headers={"Connection": "close"})
            if n_received > _SMALL_BYTES and self._held + size > _LARGEST_AT_ONCE * self._max_bytes:
                raise unavailable(
                    "The node reads as many large bodies as it has memory for; send it again soon."
                )
            self._held += size
            held += size
            return message

        def done() -> None:
            nonlocal held
            self._held -= held
            held = 0

        try:
            await self._app({**scope, BODY_DONE: done}, counted, send)
        finally:
            done()
