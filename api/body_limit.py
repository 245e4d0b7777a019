"""Refuses bodies over a limit, before or while they are read, so that nobody fills the API's memory."""

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """Middleware: 413 at once for a Content-Length over `max_bytes`; for a chunked body as soon as it has sent more."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._detail = f"The body is larger than {max_bytes} bytes (POC_MAX_BODY_BYTES); split the request."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            answer = JSONResponse({"detail": self._detail}, 413, headers={"Connection": "close"})
            await answer(scope, receive, send)
            return

        n_received = 0

        async def counted() -> Message:
            nonlocal n_received
            message = await receive()
            n_received += len(message.get("body", b""))
            if n_received > self._max_bytes:
                raise HTTPException(413, self._detail, headers={"Connection": "close"})
            return message

        await self._app(scope, counted, send)
