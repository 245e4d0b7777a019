"""How long and how much a connection may take before its request is whole; uvicorn has no limit.

Slow and silent clients are cut off, and where there are too many the one that waits longest makes
room; so nobody who holds connections open keeps others out.
"""

import asyncio
import resource
from dataclasses import dataclass
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

# Seconds from the connection's beginning, or a request's first byte, to the end of its headers.
HEADERS_S = 10.0
# Bytes and number of a request's headers: each takes some 150 bytes more. Browsers and proxies send
# some KiB, in a few dozen.
HEADER_BYTES = 64 * 1024
MOST_HEADERS = 200
# Seconds that a connection without a request stays open: longer than clients keep theirs (httpx 5,
# aiohttp 15, nginx 60), as a request on a connection being closed fails.
IDLE_S = 75
# Connections held at a time, fewer where the process may open fewer files.
MAX_CONNECTIONS = 4096
# Seconds for a whole request, and for the next 64 KiB of its answer.
REQUEST_S = 60.0
# Seconds between two looks at a connection.
_LOOK_S = 0.5
# Bytes of an answer that a client has to take within Limits.request_s.
_PROGRESS_BYTES = 64 * 1024
# Requests of one connection that may wait for the answer before: each takes kilobytes.
_MAX_PIPELINED = 16
# Open files for all but connections: Redis, logs, libraries.
_OTHER_FILES = 96
# End of the path of an answer that goes on for as long as its client listens.
ENDLESS = "/console/events"
# A chat request holds one to its worker too.
_FILES_PER_CONNECTION = 2


@dataclass(frozen=True)
class Limits:
    connections: int
    request_s: float = REQUEST_S
    headers_s: float = HEADERS_S
    idle_s: int = IDLE_S


def raise_file_limit() -> int:
    """Lets this process open as many files as it may, and returns that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 2**31


def connections_for(wanted: int, files: int) -> int:
    """How many connections a process holds that may open `files` files."""
    return max(8, min(wanted, (files - _OTHER_FILES) // _FILES_PER_CONNECTION))


def limited(limits: Limits) -> type[HttpToolsProtocol]:
    """A protocol class for `uvicorn.Config(http=...)` of one server with these limits."""
    return type("LimitedProtocol", (_Limited,), {"limits": limits, "unfinished": {}})


class _Limited(HttpToolsProtocol):
    limits: ClassVar[Limits]
    # Connections whose client is to send or take something, the longest waiting first.
    unfinished: "ClassVar[dict[_Limited, None]]"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = self.limits.idle_s
        self._look: asyncio.TimerHandle | None = None
        self._since: float | None = None  # from when the client has to hurry; None: it need not
        self._headers_done = False
        self._ended_one = False  # whether a request ended within the bytes that came last
        self._n_header_bytes = 0
        # bytes of an answer that a client does not take, and since when
        self._left: tuple[int, float] | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_client()
        if len(self.connections) > self.limits.connections:
            self._make_room()
        self._look = self.loop.call_later(_LOOK_S, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        self.unfinished.pop(self, None)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._headers_done and self._since is None:  # the first bytes of another request
            self._since = self.loop.time()
        self._ended_one = False
        super().data_received(data)
        if self._headers_done or self._ended_one or self.transport.is_closing():
            return  # these bytes were a body's, at least in part
        self._n_header_bytes += len(data)
        if self._n_header_bytes > HEADER_BYTES:
            self._refuse(431, f"The headers are larger than {HEADER_BYTES} bytes.")

    def pause_writing(self) -> None:
        self._left = (self.transport.get_write_buffer_size(), self.loop.time())
        self.unfinished[self] = None
        super().pause_writing()

    def resume_writing(self) -> None:
        self._left = None
        if self._since is None and not self.cycle.response_complete:
            self.unfinished.pop(self, None)
        super().resume_writing()

    def shutdown(self) -> None:
        super().shutdown()
        if (
            self.cycle is not None
            and not self.cycle.response_complete
            and self.cycle.scope["path"].endswith(ENDLESS)
        ):
            self.transport.close()  # else the server would wait for an end that does not come

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._headers_done = False
        self._n_header_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headers_done:
            return  # a trailer: what comes behind the body says nothing about the request
        if len(self.headers) >= MOST_HEADERS:
            raise ValueError("too many headers")  # the parser stops, and the client gets 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_done = True
        if (
            len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            > HEADER_BYTES
        ):
            raise ValueError("the headers are too large")
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests wait for their answers")
        self._since = self.loop.time()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._ended_one = True
        self._since = None
        self.unfinished.pop(self, None)
        self._headers_done = False
        self._n_header_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # another request waited, or it is gone
        if not self.cycle.response_complete or self not in self.connections:
            return
        # idle: the first to make room, after those that are idle for longer
        self.unfinished[self] = None
        if self.scope is self.cycle.scope:  # the next request has not begun, and may never
            self.scope = self.cycle.scope = {}  # type: ignore[typeddict-item]
            self.headers, self.url = [], b""

    # Our own.

    def _wait_for_client(self) -> None:
        self._since = self.loop.time()
        self.unfinished[self] = None

    def _make_room(self) -> None:
        oldest = next(iter(self.unfinished))
        # At once, before the event loop reports it lost: of many that come together each must find
        # another one, and until then it would count among those that make requests be refused.
        del self.unfinished[oldest]
        self.connections.discard(oldest)
        oldest.transport.abort()

    def _check(self) -> None:
        now = self.loop.time()
        self._look = self.loop.call_later(_LOOK_S, self._check)
        if self._takes_too_long(now):
            self.transport.abort()
        elif self._since is not None and not self.transport.is_closing():
            allowed_s = self.limits.request_s if self._headers_done else self.limits.headers_s
            if now - self._since > allowed_s:
                self._refuse(408, f"The request was not whole within {allowed_s:g} s.")

    def _takes_too_long(self, now: float) -> bool:
        """Whether the client has taken too little of its answer for too long."""
        left = self.transport.get_write_buffer_size()
        if self._left is None:
            # A closed connection with bytes left stays open until they are taken.
            if left and self.transport.is_closing():
                self._left = (left, now)
            return False
        before, since = self._left
        if left <= before - _PROGRESS_BYTES:
            self._left = (left, now)
            return False
        return now - since > self.limits.request_s

    def _refuse(self, status: int, detail: str) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = b'{"detail":"' + detail.encode() + b'"}'
            length = str(len(body)).encode()
            head = (
                b"content-type: application/json\r\ncontent-length: "
                + length
                + b"\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head + body)
        if self.cycle is not None:
            self.cycle.disconnected = True  # who still reads its body learns that no more comes
            self.cycle.message_event.set()
        self.transport.close()
