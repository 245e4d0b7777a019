"""Sends streamed answers and keep-alives to clients, and finds errors that begin a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message, Send

from poc_core.serving.openai_errors import error_event, shaped

Headers = list[tuple[bytes, bytes]]

# Seconds of silence after which the client of a stream gets an empty line, because proxies close
# connections that are silent for 60 s. An invalid request is refused earlier, with its own status.
KEEP_ALIVE_S = 15.0
# An empty line between events has no effect. A comment would: the network node parses each
# non-empty line of a stream as JSON, and would drop the complete answer.
_NOTHING = b"\n"
_HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
# Events that vLLM sends before its engine has received the request.
_EARLY = {"response.created", "response.queued", "response.in_progress"}


async def first_events(chunks: AsyncIterator[bytes]) -> bytes:
    """Reads and returns a stream up to the first event that shows whether the answer failed."""
    head = b""
    while _decisive(head) is None:
        chunk = await anext(chunks, b"")
        head += chunk
        if not chunk:
            break
    return head


def failure(path: str, head: bytes) -> tuple[int, Any] | None:
    """Returns the error's HTTP status and JSON if a stream begins with an error, else None."""
    event = _decisive(head)
    if event is None:
        return None
    try:
        body = json.loads(event[1])
    except (ValueError, RecursionError):
        return None
    error = body.get("error") if isinstance(body, dict) else None
    if event[0] == "error" and not isinstance(error, dict):
        error = body
    if not isinstance(error, dict):
        return None
    status = error.get("code")
    if not isinstance(status, int) or not 400 <= status < 600:
        status = 500
    return status, shaped(path, status, {"error": error})


def _decisive(head: bytes) -> tuple[str, bytes] | None:
    """Returns (name, data) of the first event that shows whether the answer failed, or None."""
    for event in head.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        name, data = "", b""
        for line in event.split(b"\n"):
            field, _, value = line.partition(b":")
            if field == b"event":
                name = value.strip().decode(errors="replace")
            elif field == b"data":
                data += value.strip()
        if data and name not in _EARLY:
            return name, data
    return None


class Sending:
    """An answer that two tasks send: one forwards a worker's bytes, the other sends keep-alives."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._last = b"\n\n"  # last two bytes sent
        self._one_at_a_time = asyncio.Lock()
        self.has_begun = False

    async def begin(self, status: int, headers: Headers) -> None:
        async with self._one_at_a_time:
            await self._begin(status, headers)

    async def _begin(self, status: int, headers: Headers) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def go_on(self, chunk: bytes) -> None:
        async with self._one_at_a_time:
            self._sent_at = self._loop.time()
            self._last = (self._last + chunk[-2:])[-2:]
            await self._send(_part(chunk, more=True))

    async def end(self, body: bytes = b"") -> None:
        async with self._one_at_a_time:
            self._last = b""  # no empty line after the end
            await self._send(_part(body, more=False))

    async def fail(self, status: int, error: Any, headers: Headers) -> None:
        """Ends an answer with an error: a JSON body, or an SSE event if the answer has begun."""
        if self.has_begun:
            await self.end(error_event(error))
            return
        body = json.dumps(error).encode()
        length = (b"content-length", str(len(body)).encode())
        await self.begin(status, [(b"content-type", b"application/json"), length, *headers])
        await self.end(body)

    async def keep_alive(self, every_s: float) -> None:
        """Sends an empty line after every `every_s` seconds of silence, until cancelled.

        Never sends an empty line inside an event. If no response head was sent yet, sends it first.
        """
        while True:
            left = self._sent_at + every_s - self._loop.time()
            if left > 0:
                await asyncio.sleep(left)
                continue
            async with self._one_at_a_time:
                self._sent_at = self._loop.time()
                if self._last == b"\n\n":
                    await self._begin(200, _HEADERS)
                    await self._send(_part(_NOTHING, more=True))


def _part(body: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
