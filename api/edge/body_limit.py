"""Limits the size of each request body, and the memory of all request bodies together.

If a new part of a body does not fit into that memory, another incomplete body is dropped: a stalled
body if there is one, else the slowest body of the client that holds the most memory. If that client
sent the new part itself, the new part's body is refused.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.edge.shares import client_of
from api.errors import unavailable

# How many bodies of the largest size fit into the memory of all bodies.
_LARGEST_AT_ONCE = 4
# The first bytes of each body, which are accepted even if the memory is full.
_SMALL_BYTES = 64 * 1024
# Seconds without a byte after which a body counts as stalled.
_STALLED_S = 2.0
# Scope key of a function that releases the body's memory long before the answer's end.
BODY_DONE = "proofline.body_done"


@dataclass(eq=False)
class _Body:
    """The state of one request body: its bytes in memory, and when its last bytes arrived."""

    client: str
    begun_at: float  # by BodyLimit's clock, in seconds
    moved_at: float
    n_bytes: int = 0
    gave_way: bool = False
    # the timeout of the wait for the next bytes; None while the request does not wait
    waits: asyncio.Timeout | None = None

    def speed(self, now: float) -> float:
        return self.n_bytes / max(now - self.begun_at, 1e-3)


class Room:
    """Accounts for the memory of all request bodies. Drops incomplete bodies if it is full."""

    def __init__(self, n_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._n_bytes = n_bytes
        self._clock = clock
        self._held: Counter[str] = Counter()  # bytes, by client
        self._total = 0
        # bodies that are still being received; complete bodies are in use and cannot be dropped
        self._coming: dict[_Body, None] = {}

    def begin(self, client: str) -> _Body:
        now = self._clock()
        return _Body(client, now, now)

    def add(self, body: _Body, n_bytes: int, is_last: bool) -> bool:
        """Reserves memory for `n_bytes` more of a body. If the memory is full, drops other bodies.

        Returns False if there is not enough memory even then. `is_last`: no more bytes follow.
        """
        while (
            n_bytes
            and body.n_bytes + n_bytes > _SMALL_BYTES
            and self._total + n_bytes > self._n_bytes
        ):
            slow = self._slow(body)
            if slow is None:
                return False
            self.end(slow)
            slow.gave_way = True
            if slow.waits is not None:
                slow.waits.reschedule(0)
        self._held[body.client] += n_bytes
        self._total += n_bytes
        body.n_bytes += n_bytes
        body.moved_at = self._clock()
        if is_last:
            self._coming.pop(body, None)
        else:
            self._coming[body] = None
        return True

    def end(self, body: _Body) -> None:
        self._held[body.client] -= body.n_bytes
        self._total -= body.n_bytes
        if not self._held[body.client]:
            del self._held[body.client]
        body.n_bytes = 0
        self._coming.pop(body, None)

    def _slow(self, asking: _Body) -> _Body | None:
        """Returns the body to drop to make room for `asking`; None if `asking` must be refused."""
        now = self._clock()
        others = [body for body in self._coming if body is not asking]
        stalled = [body for body in others if now - body.moved_at > _STALLED_S]
        if stalled:
            return max(stalled, key=lambda body: (self._held[body.client], -body.moved_at))
        most = max((self._held[body.client] for body in others), default=0)
        if most <= self._held[asking.client]:
            return None
        return min(
            (body for body in others if self._held[body.client] == most),
            key=lambda body: body.speed(now),
        )


class BodyLimit:
    """Middleware that refuses a body: 413 if larger than `max_bytes`, 503 if the memory is full."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._detail = (
            f"The body is larger than {max_bytes} bytes (POC_MAX_BODY_BYTES); split the request."
        )
        self._room = Room(_LARGEST_AT_ONCE * max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        # Not int, which refuses thousands of digits, such as zeros.
        if declared.isdecimal() and float(declared) > self._max_bytes:
            answer = JSONResponse({"detail": self._detail}, 413, headers={"Connection": "close"})
            await answer(scope, receive, send)
            return

        n_received = 0
        body = self._room.begin(client_of(scope))

        async def counted() -> Message:
            nonlocal n_received
            message = await self._next(receive, body)
            size = len(message.get("body", b""))
            n_received += size
            if n_received > self._max_bytes:
                raise HTTPException(413, self._detail, headers={"Connection": "close"})
            if not self._room.add(body, size, is_last=not message.get("more_body", False)):
                raise _full()
            return message

        def done() -> None:
            self._room.end(body)

        try:
            await self._app({**scope, BODY_DONE: done}, counted, send)
        finally:
            done()

    @staticmethod
    async def _next(receive: Receive, body: _Body) -> Message:
        try:
            async with asyncio.timeout(None) as body.waits:
                message = await receive()
        except TimeoutError:
            raise _full() from None
        finally:
            body.waits = None
        if body.gave_way:
            raise _full()
        return message


def _full() -> HTTPException:
    return unavailable(
        "The node has no memory for another large body now; send the request again soon."
    )
