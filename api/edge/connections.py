"""Limits the number of connections, their time and their memory. uvicorn has no such limits.

Disconnects slow and silent clients. If there are too many connections, the client with the most
connections loses one, so that no client can keep others out by holding connections open.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from api.edge.shares import Holdings, of_address
from api.edge.version_segment import without_version
from poc_core.serving.openai_errors import shaped

# Seconds from the start of a connection, or of a later request on it, to the end of the headers.
HEADERS_S = 10.0
# Most bytes and most headers of a request: each header needs about 150 bytes of memory besides its
# text. Browsers and proxies send some KiB, in a few dozen headers.
HEADER_BYTES = 64 * 1024
MOST_HEADERS = 200
_TOO_LARGE = f"The headers are larger than {HEADER_BYTES} bytes."
# Seconds that a connection without a request stays open. Clients close theirs earlier (httpx 5,
# aiohttp 15, nginx 60), because a request fails on a connection that is being closed.
IDLE_S = 75
# Most connections open at the same time; fewer if the process can open too few files.
MAX_CONNECTIONS = 4096
# Seconds for a complete request, and for its client to accept the next 64 KiB of the answer.
REQUEST_S = 60.0
# Seconds between two checks of all connections.
_LOOK_S = 0.5
# Seconds of silence after which a connection moves from Places.fresh to Places.late.
_FRESH_S = 1.0
# Share of MAX_CONNECTIONS that is reserved for new connections. Answers in progress cannot use it.
_NEWCOMERS = 1 / 16
# Last parts of the paths of health probes. Their answers do not count as answers in progress.
PROBES = ("/livez", "/health", "/readyz")
# Bytes of an answer that a client must accept within Limits.request_s.
_PROGRESS_BYTES = 64 * 1024
# Bytes of a body that are buffered before the request's handler starts.
_HELD_BYTES = 8 * 1024
# Most bytes that are read at once, before and after the request's handler starts.
_FIRST_READ_BYTES, _MOST_READ_BYTES = 16 * 1024, 256 * 1024
# Most pipelined requests of one connection; each takes kilobytes of memory.
_MAX_PIPELINED = 16
# Open files for everything except connections: Redis, logs, libraries.
_OTHER_FILES = 96
# Last part of the path of the one answer that never ends by itself.
ENDLESS = "/console/events"
# A chat request also has a connection to its worker.
_FILES_PER_CONNECTION = 2


@dataclass(frozen=True)
class Limits:
    connections: int
    request_s: float = REQUEST_S
    headers_s: float = HEADERS_S
    idle_s: int = IDLE_S

    @property
    def answers(self) -> int:
        """The maximum number of answers in progress, without answers to health probes."""
        return self.connections - max(2, int(self.connections * _NEWCOMERS))


class Places:
    """The open connections of one server in three groups: `fresh` and `late` connections wait for
    their clients (`late`: for over 1 s), `answers` wait for the app.

    If there are too many connections, the client with the most connections in `late` (in `fresh` if
    `late` is empty) loses its oldest one there. If there are too many answers in progress, the
    client with the most answers loses its youngest answer.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        # A connection in `fresh` or `late` waits for its client to send or accept something; in
        # `late` if the client has taken more than _FRESH_S. One in `answers` waits for the app.
        self.late: Holdings[_Limited] = Holdings()
        self.fresh: Holdings[_Limited] = Holdings()
        self.answers: Holdings[_Limited] = Holdings()
        self._all: dict[_Limited, None] = {}
        self._look: asyncio.TimerHandle | None = None

    def enter(self, connection: "_Limited") -> None:
        self._all[connection] = None
        self.put(connection, self.fresh)
        if len(self.late) + len(self.fresh) + len(self.answers) > self.limits.connections:
            (self.late or self.fresh).oldest().make_room()
        if self._look is None:
            self._look = connection.loop.call_later(_LOOK_S, self._check, connection.loop)

    def leave(self, connection: "_Limited") -> None:
        self._all.pop(connection, None)
        self.put(connection, None)

    def put(self, connection: "_Limited", where: "Holdings[_Limited] | None") -> None:
        """Moves a connection to the group `where`, or out of its group if `where` is None.

        If too many answers are then in progress, closes the connection of one of these answers.
        """
        if connection.place is not None:
            connection.place.remove(connection.owner, connection)
        connection.place, connection.placed_at = where, connection.loop.time()
        if where is not None:
            where.add(connection.owner, connection)
        if len(self.answers) > self.limits.answers:
            self.answers.youngest().make_room()

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        # One timer for all connections: thousands of timers would delay other requests.
        self._look = loop.call_later(_LOOK_S, self._check, loop) if self._all else None
        now = loop.time()
        for connection in list(self._all):
            if connection.place is self.fresh and now - connection.placed_at > _FRESH_S:
                self.put(connection, self.late)
            connection.check(now)


def connections_for(wanted: int, files: int) -> int:
    """Returns the most connections for a limit of `files` open files: between 8 and `wanted`."""
    return max(8, min(wanted, (files - _OTHER_FILES) // _FILES_PER_CONNECTION))


def limited(limits: Limits) -> type[asyncio.Protocol]:
    """Returns a protocol class with these limits, for `uvicorn.Config(http=...)` of one server."""
    of_server = {"limits": limits, "places": Places(limits)}
    inner = type("LimitedProtocol", (_Limited,), of_server)
    outer = type("InPieces", (_InPieces,), {"inner": inner, "limits": limits})
    return cast(type[asyncio.Protocol], outer)


class _InPieces(asyncio.BufferedProtocol):
    """Protocol that reads small pieces until a request's handler starts. Passes them to `inner`.

    asyncio reads 256 KiB at once, so that 1,000 waiting requests would hold 130 MB of bodies.
    """

    # shared by all connections: the bytes are copied at once
    _memory = memoryview(bytearray(_MOST_READ_BYTES))

    inner: "ClassVar[type[_Limited]]"

    def __init__(self, **given: Any) -> None:
        self._protocol = protocol = self.inner(**given)
        told = ("connection_made", "connection_lost", "eof_received")
        for name in (*told, "pause_writing", "resume_writing"):
            setattr(self, name, getattr(protocol, name))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory if self._protocol.has_begun else self._memory[:_FIRST_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._protocol.data_received(bytes(self._memory[:nbytes]))


class _Limited(HttpToolsProtocol):
    limits: ClassVar[Limits]
    places: ClassVar[Places]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = self.limits.idle_s
        self.url = b""  # the request's URL, once its first line has been read
        self.owner = ""  # the client whose connections include this one
        self.place: Holdings[_Limited] | None = None
        self.placed_at = 0.0
        # when the time limit for the client's request began; None while no request arrives
        self._since: float | None = None
        self._headers_done = False
        self._offers_upgrade = False  # whether the headers offer another protocol
        self._excess: tuple[int, str] | None = None  # status and text for too many headers
        # starts the request's handler; None if the handler has started
        self._starts: Callable[[], None] | None = None
        # the request that is answered, or was last; pipelined requests wait behind it
        self._answered: RequestResponseCycle | None = None
        self._ended_one = False  # whether the last bytes read included a request's end
        self._n_header_bytes = 0
        # bytes of an answer that the client has not accepted yet, and when these were counted
        self._left: tuple[int, float] | None = None

    # Called by asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # The address of the peer itself, because a client could forge an address in a header.
        self.owner = of_address(self.client[0]) if self.client else ""
        self._since = self.loop.time()
        self.places.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.leave(self)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._end_receiving()

    def data_received(self, data: bytes) -> None:
        if not self._headers_done and self._since is None:  # the first bytes of a further request
            self._since = self.loop.time()
            if self.place is self.places.late:
                self.places.put(self, self.places.fresh)
        self._ended_one = False
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except HttpParserError:
            msg = "Invalid HTTP request received."
            self.logger.warning(msg)
            self.send_400_response(msg)
        if self._headers_done or self._ended_one or self.transport.is_closing():
            return  # the bytes belonged to a body, at least in part
        self._n_header_bytes += len(data)
        if self._n_header_bytes > HEADER_BYTES:
            self._refuse(431, _TOO_LARGE)

    def pause_writing(self) -> None:
        self._left = (self.transport.get_write_buffer_size(), self.loop.time())
        self._wait_for_client()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._left = None
        if self._since is None and not self.cycle.response_complete:
            self._wait_for_answer()
        super().resume_writing()

    def shutdown(self) -> None:
        super().shutdown()
        if (
            self._answered is not None
            and not self._answered.response_complete
            and self._answered.scope["path"].endswith(ENDLESS)
        ):
            self.transport.close()  # otherwise the server would wait for an endless answer

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._excess or (400, msg)))

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._headers_done = False
        self._n_header_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._headers_done:
            return  # a trailer after the body does not change the request
        if len(self.headers) >= MOST_HEADERS:
            self._exceeds(f"A request may have {MOST_HEADERS} headers.")
        # The parser leaves the whitespace behind a value (RFC 9110, 5.5).
        super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._headers_done = True
        if (
            len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            > HEADER_BYTES
        ):
            self._exceeds(_TOO_LARGE)
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests wait for their answers")  # stops the parser
        self._offers_upgrade = self.parser.should_upgrade() and any(
            name == b"upgrade" for name, _ in self.headers
        )
        if self._offers_upgrade:
            return  # the request begins again without the offer (_parse)
        self._since = self.loop.time()
        super().on_headers_complete()
        if self.pipeline:
            # uvicorn has paused reading. But then nothing notices that the client disconnects.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if len(self.cycle.body) + len(body) > _HELD_BYTES:
            if self.pipeline:
                raise ValueError("a body is too large to wait behind an answer")  # stops the parser
            self._start()
        super().on_body(body)
        if len(self.cycle.body) > _HELD_BYTES and not self.cycle.response_complete:
            self.flow.pause_reading()  # until the app asks for more

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._start()
        self._ended_one = True
        self._since = None
        if self.cycle.response_complete:
            self._wait_for_client()
        else:
            self._wait_for_answer()
        self._headers_done = False
        self._n_header_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # a pipelined request follows, or the connection is closed
        if not self.cycle.response_complete or self not in self.connections:
            return
        self._wait_for_client()  # idle
        if self.scope is self.cycle.scope:  # the next request has not begun, and may never begin
            self.scope = self.cycle.scope = {}  # type: ignore[typeddict-item]
            self.headers, self.url = [], b""

    # Our own methods.

    @property
    def has_begun(self) -> bool:
        """Returns True if a request's handler has started before the request's body is complete."""
        return self._headers_done and self._starts is None

    def make_room(self) -> None:
        """Closes this connection in favour of another. A client that awaits an answer gets 503."""
        # Removed at once: otherwise many new connections would all choose this one to close.
        waits_for_answer = self.place is self.places.answers
        self.places.put(self, None)
        self.connections.discard(self)
        if waits_for_answer and not self.cycle.response_started:
            self._refuse(503, "The node is full, and you have the most requests in progress.")
        else:
            self.transport.abort()

    def check(self, now: float) -> None:
        """Closes this connection if its client sends a request or accepts an answer too slowly."""
        if self._takes_too_long(now):
            self.transport.abort()
        elif self._since is not None and not self.transport.is_closing():
            allowed_s = self.limits.request_s if self._headers_done else self.limits.headers_s
            if now - self._since > allowed_s:
                self._refuse(408, f"The request was not complete within {allowed_s:g} s.")

    def _parse(self, data: bytes) -> None:
        """Parses received bytes. Raises HttpParserError if the bytes are not HTTP.

        Java's HTTP client offers h2c in each request. The parser ends such a request after its
        headers, without the body, so the headers are parsed again without the offer.
        """
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            if self._offers_upgrade:  # otherwise the method is CONNECT
                left = [header for header in self.headers if header[0] != b"upgrade"]
                head = b"%s %s HTTP/%s\r\n%s\r\n" % (
                    self.parser.get_method(),
                    self.url,
                    self.parser.get_http_version().encode(),
                    b"".join(b"%s: %s\r\n" % header for header in left),
                )
                # A parser refuses everything after a request that closes the connection.
                self.parser = HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._parse(head + data[upgrade.args[0] :])

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Delays the request's handler until the body, or more than 8 KiB of it, has arrived.

        A handler that waits for its body takes ten times the memory of the headers alone. A client
        that expects 100 sends its body only after the handler has started.
        """
        self._answered = cycle
        if self._headers_done and cycle is self.cycle and not cycle.waiting_for_100_continue:
            self._starts = partial(super()._start_asgi_task, cycle, app)
        else:
            super()._start_asgi_task(cycle, app)

    def _start(self) -> None:
        if self._starts is not None:
            self._starts()
            self._starts = None

    def _wait_for_client(self) -> None:
        if self.place is not None:  # None: this connection is closed to make room
            self.places.put(self, self.places.fresh)

    def _wait_for_answer(self) -> None:
        if self.place in (None, self.places.answers):
            return
        is_probe = self.cycle.scope["path"].endswith(PROBES)
        self.places.put(self, self.places.fresh if is_probe else self.places.answers)

    def _takes_too_long(self, now: float) -> bool:
        """Returns True if the client accepts its answer slower than 64 KiB per `request_s`."""
        left = self.transport.get_write_buffer_size()
        if self._left is None:
            # A connection being closed stays open until its remaining bytes are accepted.
            if left and self.transport.is_closing():
                self._left = (left, now)
            return False
        before, since = self._left
        if left <= before - _PROGRESS_BYTES:
            self._left = (left, now)
            return False
        return now - since > self.limits.request_s

    def _exceeds(self, detail: str) -> None:
        """Refuses the request (431): stops the parser, which then calls send_400_response."""
        self._excess = 431, detail
        raise ValueError(detail)

    def _path(self) -> str:
        raw = self.url.partition(b"?")[0]
        return unquote((without_version(raw) or raw).decode("latin-1"))

    def _refuse(self, status: int, detail: str) -> None:
        under_way = bool(self.pipeline) or (
            self.cycle is not None
            and self.cycle.response_started
            and not self.cycle.response_complete
        )
        if not under_way:
            body = json.dumps(shaped(self._path(), status, {"detail": detail})).encode()
            length = str(len(body)).encode()
            head = (
                b"content-type: application/json\r\ncontent-length: "
                + length
                + (b"\r\nretry-after: 5" if status == 503 else b"")
                + b"\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head + body)
        self._end_receiving()
        self.transport.close()

    def _end_receiving(self) -> None:
        """Notifies the app, which may still read the body or wait for a disconnect, that no message
        follows. uvicorn notifies the app only for the connection's last request.
        """
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()
