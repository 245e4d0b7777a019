"""Rewrites errors on OpenAI's and Anthropic's paths to the JSON format of these two APIs.

For other formats, the packages `openai` and `anthropic` show only the status of an error.
"""

import asyncio
import json
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import CLOSES, MISTAKE, RETRY_AFTER_S
from poc_core.serving.openai_errors import said_by, shaped
from poc_core.serving.openai_paths import is_clients_path

# Largest error that is buffered and reshaped, in bytes.
_MOST_BYTES = 1 << 20
_ENDS = {"detail": f"The node is being stopped; try again in {RETRY_AFTER_S} s."}


class ErrorShapes:
    """Middleware that rewrites JSON errors as OpenAI or (on /v1/messages) Anthropic errors.

    Answers that have not begun when the server ends are 503; the server's own answer would be 500.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope["path"], send)
        try:
            await self._app(scope, receive, answer.send)
        except asyncio.CancelledError:  # at its end the server cancels what takes too long
            if answer.has_begun:
                raise
            said = shaped(scope["path"], 503, _ENDS)
            headers = {"Retry-After": str(RETRY_AFTER_S), **CLOSES}
            await JSONResponse(said, 503, headers)(scope, receive, send)
        except Exception:  # the server logs the exception
            if answer.reshapes and not answer.has_begun:
                said = shaped(scope["path"], 500, MISTAKE)
                await JSONResponse(said, 500, CLOSES)(scope, receive, send)
            raise


@dataclass
class _Answer:
    """Sends an answer to a client. If it is an error, buffers its body and rewrites it."""

    _path: str
    _send: Send
    _head: Message = field(default_factory=dict)
    _body: bytes | None = None  # the part of an error's body received so far
    has_begun: bool = False

    @property
    def reshapes(self) -> bool:
        return is_clients_path(self._path)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            kind = MutableHeaders(raw=list(message["headers"])).get("content-type", "")
            if self.reshapes and message["status"] >= 400 and kind.startswith("application/json"):
                self._body = b""
                return
        elif self._body is not None:
            self._body += message.get("body", b"")
            if message.get("more_body", False) and len(self._body) < _MOST_BYTES:
                return
            said = said_by(self._body)
            right = shaped(self._path, self._head["status"], said)
            body = self._body if right == said else json.dumps(right).encode()
            self._body = None
            headers = MutableHeaders(raw=list(self._head["headers"]))
            headers["content-length"] = str(len(body))
            await self._send({**self._head, "headers": headers.raw})
            message = {"type": "http.response.body", "body": body}
        self.has_begun = True
        await self._send(message)
