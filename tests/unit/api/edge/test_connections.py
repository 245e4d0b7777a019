"""Slow, silent and greedy clients on a real server, and what comes behind a body."""

import asyncio
import json
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Literal, cast
from unittest.mock import Mock

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.edge.connections import (
    ENDLESS,
    HEADER_BYTES,
    MOST_HEADERS,
    Limits,
    Places,
    connections_for,
    limited,
)
from poc_core.open_files import raise_file_limit
from tests.harness.waiting import wait_until
from tests.stacks.served import port_of, served

CONNECTIONS = 8
LIMITS = Limits(CONNECTIONS)  # patient: a busy machine's clients are late by seconds
HASTY = Limits(CONNECTIONS, request_s=1.0, headers_s=0.5)
# More than the kernel takes for a client that reads nothing.
LARGE = 32 * 1024 * 1024
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
STREAM = f"GET {ENDLESS} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
WAITS = b"GET /waits HTTP/1.1\r\nHost: x\r\n\r\n"
PATIENCE_S = 60.0


class Standstill:
    """Of the server's event loop, while it answers GET /stands."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def last(self) -> None:
        self.begun.set()
        self.over.wait(PATIENCE_S)


standstill = Standstill()


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return None
    request = Request(scope, receive)
    if scope["path"] == "/large":
        return await Response(b"x" * LARGE)(scope, receive, send)
    if scope["path"].endswith(ENDLESS):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        return None
    if scope["path"] == "/parts":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for left in range(LARGE // 2**20, -1, -1):
            await send({"type": "http.response.body", "body": bytes(2**20), "more_body": left > 0})
        return None
    if scope["path"] == "/waits":  # an answer that has not begun
        await request.body()
        while (await receive())["type"] != "http.disconnect":
            pass
        return None
    if scope["path"] == "/stands":
        standstill.last()
    if scope["path"] == "/slow":
        time_out = await request.is_disconnected()
        return await Response(str(time_out))(scope, receive, send)
    body = await request.body()
    names = ",".join(name.decode() for name, _ in scope["headers"])
    return await Response(body or b"ok", headers={"x-names": names})(scope, receive, send)


@contextmanager
def running(
    loop: Literal["auto", "asyncio"] = "auto", limits: Limits = LIMITS
) -> Iterator[uvicorn.Server]:
    with served(
        app,
        loop=loop,
        http=limited(limits),
        ws="none",
        lifespan="off",
        limit_concurrency=CONNECTIONS + 2,  # as `proofline api` has it
    ) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[uvicorn.Server]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def hasty_server() -> Iterator[uvicorn.Server]:
    with running(limits=HASTY) as server:
        yield server


@pytest.fixture
def connect(server: uvicorn.Server) -> Iterator["Connect"]:
    with ExitStack() as opened:
        yield Connect(port_of(server), opened)


@pytest.fixture
def hasty(hasty_server: uvicorn.Server) -> Iterator["Connect"]:
    """As `connect`, to a server that waits for a second at most."""
    with ExitStack() as opened:
        yield Connect(port_of(hasty_server), opened)


class Connect:
    """A client's socket: connect(b"what it sends first")."""

    def __init__(self, port: int, opened: ExitStack) -> None:
        self._port, self._opened = port, opened

    def __call__(self, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        connection = self._opened.enter_context(socket.socket())
        # Else some kernels take a large answer whole for a client that reads nothing.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.settimeout(PATIENCE_S)
        connection.bind((source, 0))
        connection.connect(("127.0.0.1", self._port))
        connection.sendall(sent)
        return connection


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            found += part
    return found


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def of(server: uvicorn.Server, client: socket.socket) -> list[Any]:
    """What the server has of a client's connection."""
    own = client.getsockname()
    connections = list(server.server_state.connections)
    return [one for one in connections if getattr(one, "client", None) == own]


def are_open(connections: Iterable[socket.socket]) -> bool:
    """Whether none has anything to read, an end neither."""
    return not select.select(list(connections), [], [], 0)[0]


def test_a_silent_connection_is_closed(hasty: Connect) -> None:
    began = time.monotonic()
    assert status(rest(hasty())) == 408
    assert time.monotonic() - began > 0.4


def test_headers_that_come_byte_by_byte_are_cut_off(hasty: Connect) -> None:
    connection = hasty(GET)
    answer = b""
    connection.settimeout(0.1)
    until = time.monotonic() + PATIENCE_S
    while not answer and time.monotonic() < until:
        with suppress(OSError):
            connection.sendall(b"x")
        with suppress(TimeoutError):
            answer = connection.recv(1000)
    assert status(answer) == 408


def time_passes(server: uvicorn.Server, client: socket.socket, seconds: float) -> None:
    """For a client of which the server has read a path and no more than that comes."""
    wait_until(lambda: any(one.url for one in of(server, client)), "what it sent")
    (one,) = of(server, client)
    one.loop.call_soon_threadsafe(lambda: one.check(one.loop.time() + seconds))


def test_half_a_body_is_cut_off_and_said_why(connect: Connect, server: uvicorn.Server) -> None:
    connection = connect(POST + b"half")
    time_passes(server, connection, LIMITS.request_s / 2)
    time_passes(server, connection, LIMITS.request_s + 1)
    answer = rest(connection)
    assert status(answer) == 408
    assert b"not whole within %d s" % LIMITS.request_s in answer


CHAT = b"POST /v3.0.16/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (CHAT, 408),
        (CHAT + b"Content-Length: 10\r\n\r\nhalf", 408),
        (CHAT + b"x: " + b"x" * (HEADER_BYTES + 1), 431),
        (CHAT + b"x: y\r\n" * (MOST_HEADERS + 1) + b"\r\n", 431),
        (CHAT + b"no header\r\n\r\n", 400),
    ],
)
def test_refusals_on_a_models_paths_are_openais(
    connect: Connect, server: uvicorn.Server, sent: bytes, wanted: int
) -> None:
    connection = connect(sent)
    if wanted == 408:
        time_passes(server, connection, LIMITS.request_s + 1)
    answer = rest(connection)
    assert status(answer) == wanted
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], bool(error["message"])) == (wanted, True)


def test_an_answer_that_nobody_takes_is_given_up() -> None:
    with running(limits=Limits(CONNECTIONS, request_s=1.0)) as server, ExitStack() as opened:
        connection = Connect(port_of(server), opened)(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1) == b"H"  # it has begun
        wait_until(lambda: not server.server_state.connections, "its end")
        assert len(rest(connection)) < LARGE


def test_one_that_is_taken_slowly_arrives_whole() -> None:
    limits = Limits(CONNECTIONS, request_s=3.0)  # a busy machine's client may be late by seconds
    with running(limits=limits) as server, ExitStack() as opened:
        connection = Connect(port_of(server), opened)(
            b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        taken, began = 0, time.monotonic()
        while part := connection.recv(1 << 17):
            taken += len(part)
            if time.monotonic() - began <= limits.request_s:
                time.sleep(0.02)
        assert taken > LARGE
        assert time.monotonic() - began > limits.request_s


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param(b"x: " + b"y" * HEADER_BYTES, id="one"),
        pytest.param(b"".join(b"x%d: y\r\n" % i for i in range(12_000)), id="many"),
        pytest.param(b"".join(b"x%d: y\r\n" % i for i in range(12_000)) + b"\r\n", id="whole"),
        pytest.param(b"x:\r\n" * MOST_HEADERS + b"\r\n", id="one too many"),
    ],
)
def test_headers_have_a_limit(connect: Connect, headers: bytes) -> None:
    answer = rest(connect(GET + headers))
    assert status(answer) == 431
    assert "headers" in json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\r\n\r\n", GET + b"no header\r\n\r\n"])
def test_what_is_no_http_is_refused_in_json(connect: Connect, sent: bytes) -> None:
    answer = rest(connect(sent))
    assert status(answer) == 400
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {
        "detail": "Invalid HTTP request received."
    }


def test_as_many_headers_as_may_be_are_taken(connect: Connect) -> None:
    headers = b"x:\r\n" * (MOST_HEADERS - 2) + b"Connection: close\r\n\r\n"
    assert status(rest(connect(GET + headers))) == 200


def test_a_path_is_no_larger_than_headers(connect: Connect) -> None:
    long = b"GET /" + b"x" * HEADER_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    assert status(rest(connect(long))) == 431


def test_an_idle_connection_keeps_nothing_of_what_it_asked(
    connect: Connect, server: uvicorn.Server
) -> None:
    connection = connect(GET + b"x-long: " + b"y" * 60_000 + b"\r\n\r\n")
    assert status(connection.recv(10_000)) == 200
    (idle,) = of(server, connection)
    wait_until(
        lambda: [idle.headers, idle.url, idle.scope, idle.cycle.scope] == [[], b"", {}, {}],
        "nothing kept",
    )


def test_what_has_come_of_the_next_request_is_kept(connect: Connect) -> None:
    connection = connect(GET + b"\r\n" + GET + b"x-second: y\r\n")
    assert status(connection.recv(10_000)) == 200
    connection.sendall(b"Connection: close\r\n\r\n")
    answer = rest(connection)
    assert b"200 OK" in answer
    assert b"x-second" in answer


CLOSES = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


@pytest.mark.parametrize("n_bytes", [10, HEADER_BYTES + 1, 8 * 1024 * 1024])
def test_a_body_is_no_header_however_large(connect: Connect, n_bytes: int) -> None:
    answer = rest(connect(CLOSES + b"Content-Length: %d\r\n\r\n" % n_bytes + b"x" * n_bytes))
    assert status(answer) == 200
    assert answer.endswith(b"x" * n_bytes)


def test_a_trailer_is_no_header(connect: Connect) -> None:
    chunked = CLOSES + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = rest(connect(chunked + b"2\r\nhi\r\n0\r\nAuthorization: Bearer x\r\n\r\n"))
    assert status(answer) == 200
    assert b"authorization" not in answer.lower()
    assert answer.endswith(b"hi")


def test_a_request_costs_nothing_but_its_headers_until_its_body_is_there(
    connect: Connect, server: uvicorn.Server
) -> None:
    connection = connect(POST + b"0")
    wait_until(
        lambda: any(one.cycle and one.cycle.body for one in of(server, connection)), "a byte of it"
    )
    assert not server.server_state.tasks
    connection.sendall(b"123456789")
    assert status(connection.recv(10_000)) == 200


def test_a_large_body_is_looked_at_before_it_is_whole(
    connect: Connect, server: uvicorn.Server
) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    connection = connect(head + bytes(50_000))
    wait_until(lambda: bool(server.server_state.tasks), "its request")
    connection.sendall(bytes(50_000))
    assert status(connection.recv(10_000)) == 200


@pytest.mark.parametrize("loop", ["auto", "asyncio"])
def test_little_of_a_body_is_read_before_it_is_asked_for(loop: Literal["auto", "asyncio"]) -> None:
    turn = threading.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        while not turn.is_set():
            await asyncio.sleep(0.01)
        await app(scope, receive, send)

    with (
        served(waits, loop=loop, http=limited(LIMITS), lifespan="off") as server,
        ExitStack() as opened,
    ):
        opened.callback(turn.set)
        connection = Connect(port_of(server), opened)(
            CLOSES + b"Content-Length: 1000000\r\n\r\n" + bytes(500_000)
        )
        wait_until(lambda: bool(server.server_state.tasks), "its request")
        (one,) = server.server_state.connections
        wait_until(lambda: one.flow.read_paused)  # type: ignore[union-attr]
        assert 0 < len(one.cycle.body) <= 16 * 1024  # type: ignore[union-attr]
        turn.set()
        connection.sendall(bytes(500_000))
        assert rest(connection).endswith(bytes(1_000_000))


def test_a_client_that_waits_to_be_told_sends_its_body_then(connect: Connect) -> None:
    connection = connect(POST.removesuffix(b"\r\n") + b"Expect: 100-continue\r\n\r\n")
    assert status(connection.recv(10_000)) == 100
    connection.sendall(b"0123456789")
    assert status(connection.recv(10_000)) == 200


def test_silent_connections_make_room_for_those_that_ask(
    connect: Connect, server: uvicorn.Server
) -> None:
    silent = [connect() for _ in range(3 * CONNECTIONS)]
    answer = rest(connect(GET + b"Connection: close\r\n\r\n"))
    assert status(answer) == 200
    assert len(server.server_state.connections) <= CONNECTIONS
    assert rest(silent[0]) == b""  # the one that waited longest


def test_those_that_come_at_once_make_room_too() -> None:
    """asyncio's own loop, as in the API's image, takes them all before it sees the end of the
    first that made room.
    """
    standstill.begun.clear()
    standstill.over.clear()
    with running("asyncio") as server, ExitStack() as opened:
        opened.callback(standstill.over.set)
        connect = Connect(port_of(server), opened)
        asking = connect(b"GET /stands HTTP/1.1\r\nHost: x\r\n\r\n")
        assert standstill.begun.wait(PATIENCE_S)
        crowd = [connect() for _ in range(8 * CONNECTIONS)]
        standstill.over.set()
        assert status(asking.recv(10_000)) == 200
        assert status(rest(connect(GET + b"Connection: close\r\n\r\n"))) == 200
        assert len(server.server_state.connections) <= CONNECTIONS
        assert rest(crowd[0]) == b""


def test_those_that_take_nothing_make_room_too(connect: Connect) -> None:
    for _ in range(CONNECTIONS):
        assert connect(b"GET /parts HTTP/1.1\r\nHost: x\r\n\r\n").recv(1) == b"H"
    assert status(rest(connect(GET + b"Connection: close\r\n\r\n"))) == 200


@pytest.mark.promise(
    "a client with very many connections or open answers",
    "blocks neither new clients nor health probes, but may use connections that nobody else needs",
)
def test_who_holds_all_places_by_open_answers_keeps_no_newcomer_out(connect: Connect) -> None:
    streams = [connect(STREAM, "127.0.0.2") for _ in range(3 * CONNECTIONS)]
    for _ in range(20):
        assert status(rest(connect(GET + b"Connection: close\r\n\r\n"))) == 200
        streams.append(connect(STREAM, "127.0.0.2"))


def test_newcomers_from_many_addresses_are_served_beside_each_other(connect: Connect) -> None:
    for number in range(3 * CONNECTIONS):
        connect(STREAM, f"127.0.0.{2 + number}")
        assert status(rest(connect(GET + b"Connection: close\r\n\r\n"))) == 200


@pytest.mark.promise(
    "a client with very many connections or open answers",
    "blocks neither new clients nor health probes, but may use connections that nobody else needs",
)
def test_a_probe_is_answered_where_its_own_address_has_all_answers(connect: Connect) -> None:
    streams = [connect(STREAM) for _ in range(LIMITS.answers)]
    for stream in streams:
        assert stream.recv(1) == b"H"
    for _ in range(5):
        assert status(rest(connect(GET + b"Connection: close\r\n\r\n"))) == 200
    for stream in streams:
        stream.setblocking(False)
        assert b"first" in stream.recv(10_000)
    assert are_open(streams)  # they go on


def test_one_address_has_all_answers_while_nobody_else_asks(connect: Connect) -> None:
    waiting = [connect(WAITS) for _ in range(LIMITS.answers)]
    assert status(rest(connect(WAITS))) == 503
    assert are_open(waiting)


def test_of_those_with_most_answers_the_youngest_gives_way_to_others(connect: Connect) -> None:
    waiting = [connect(WAITS, "127.0.0.2") for _ in range(LIMITS.answers)]
    other = connect(WAITS, "127.0.0.3")
    assert b"retry-after" in rest(waiting.pop())
    assert are_open([*waiting, other])


def test_a_body_on_its_way_outlives_those_of_who_sends_more_at_a_time(connect: Connect) -> None:
    slow = connect(POST + b"half", "127.0.0.3")
    for _ in range(3 * CONNECTIONS):
        connect(POST + b"half", "127.0.0.2")
    slow.sendall(b" of it")
    assert status(slow.recv(10_000)) == 200


class Loop:
    """A clock, and what is to be called later."""

    def __init__(self) -> None:
        self.now = 0.0
        self.later: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.now

    def call_later(self, _: float, callback: Callable[..., None], *args: Any) -> None:
        self.later = partial(callback, *args)


class Held:
    """A connection, as its places see it."""

    def __init__(self, places: Places, loop: Loop, owner: str) -> None:
        self._places, self.loop, self.owner = places, loop, owner
        self.place, self.placed_at, self.is_open = None, 0.0, True
        places.enter(cast(Any, self))

    def make_room(self) -> None:
        self.is_open = False
        self._places.put(cast(Any, self), None)

    def check(self, now: float) -> None:
        """It is never late by itself."""


def test_a_burst_from_one_address_outlives_silent_clients_at_many() -> None:
    places, loop = Places(Limits(80)), Loop()
    silent = [Held(places, loop, f"silent {number}") for number in range(80)]
    loop.now = 2.0
    loop.later()
    burst = [Held(places, loop, "burst") for _ in range(60)]
    assert all(connection.is_open for connection in burst)
    assert [connection.is_open for connection in silent] == [False] * 60 + [True] * 20


@pytest.mark.promise(
    "a client with very many connections or open answers",
    "blocks neither new clients nor health probes, but may use connections that nobody else needs",
)
def test_one_address_has_1500_chats_under_way_and_keeps_them_beside_others() -> None:
    """As the network's API process may: all of a node's chats come from it."""
    places, loop = Places(Limits(connections_for(4096, 65_536))), Loop()
    network = [Held(places, loop, "network") for _ in range(1500)]
    for chat in network:
        places.put(cast(Any, chat), places.answers)
    for number in range(2000):
        other = Held(places, loop, f"other {number % 100}")
        places.put(cast(Any, other), places.answers)
    assert all(chat.is_open for chat in network)


def test_one_that_asks_outlives_those_who_ask_more_at_a_time() -> None:
    places, loop = Places(Limits(80)), Loop()
    asking = Held(places, loop, "asking")
    greedy = [Held(places, loop, f"greedy {number % 4}") for number in range(200)]
    assert asking.is_open
    assert sum(connection.is_open for connection in greedy) == 79


async def test_one_that_made_room_has_no_place_again() -> None:
    """Nor when its transport, which is not gone yet, still calls it."""
    outer = cast(Any, limited(Limits(80)))
    config = uvicorn.Config(cast(Any, app), log_config=None)
    config.load()
    connection = outer.inner(config=config, server_state=ServerState(), app_state={})
    connection.connection_made(Mock(get_extra_info=Mock(return_value=None)))
    assert connection.place is connection.places.fresh
    connection.make_room()
    connection.pause_writing()
    assert connection.place is None
    assert len(connection.places.fresh) == 0
    connection.connection_lost(None)


def test_one_connection_serves_many_requests(connect: Connect) -> None:
    connection = connect()
    for _ in range(5):
        connection.sendall(GET + b"\r\n")
        assert status(connection.recv(10_000)) == 200
        time.sleep(0.2)


def test_an_idle_connection_is_kept_for_longer_than_clients_do(
    connect: Connect, server: uvicorn.Server
) -> None:
    """httpx keeps one for 5 s, as uvicorn would: what it then sends would meet a connection
    that is being closed.
    """
    connection = connect(GET + b"\r\n")
    assert status(connection.recv(10_000)) == 200
    (one,) = of(server, connection)
    wait_until(lambda: one.timeout_keep_alive_task, "the time until it is closed")
    assert one.timeout_keep_alive_task.when() > one.loop.time() + 5.5
    connection.sendall(GET + b"\r\n")
    assert status(connection.recv(10_000)) == 200


def test_requests_may_follow_each_other_at_once(connect: Connect) -> None:
    whole = POST + b"0123456789"
    answer = rest(connect(whole + whole + GET + b"Connection: close\r\n\r\n"))
    assert answer.count(b"HTTP/1.1 200") == 3


def test_too_many_requests_at_once_end_the_connection(connect: Connect) -> None:
    answer = rest(connect((GET + b"\r\n") * 100))
    assert answer.count(b"HTTP/1.1 200") < 100


@pytest.mark.parametrize(("files", "connections"), [(256, 80), (65_536, 4096), (100, 8)])
def test_a_process_holds_no_more_than_it_may_open(files: int, connections: int) -> None:
    assert connections_for(4096, files) == connections


def test_a_process_may_open_as_many_files_as_it_is_let() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        assert raise_file_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    "behind", ["", "GET /livez HTTP/1.1\r\n"], ids=["alone", "with half a request behind it"]
)
def test_a_stream_without_an_end_does_not_keep_the_server_from_its_own(behind: str) -> None:
    with ExitStack() as opened:
        with running() as server:
            connection = Connect(port_of(server), opened)(
                f"GET /api/v1{ENDLESS} HTTP/1.1\r\nHost: x\r\n\r\n{behind}".encode()
            )
            answer = b""
            while b"first" not in answer:
                answer += connection.recv(1000)
        # The stream broke off, which tells the page to ask again.
        assert b"0\r\n\r\n" not in rest(connection)


async def test_what_is_used_of_uvicorn_is_where_it_was() -> None:
    """pyproject.toml allows one minor version: read connections.py again before another one."""
    assert uvicorn.__version__.startswith("0.54.")
    config = uvicorn.Config(cast(Any, Standstill()), log_config=None)
    uvicorns = HttpToolsProtocol(config, ServerState(), {})
    overridden = {
        *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"),
        *("on_message_begin", "on_header", "on_headers_complete", "on_message_complete"),
        *("on_response_complete", "shutdown", "on_body", "_start_asgi_task"),
    }
    assert overridden | {"_unset_keepalive_if_required"} <= vars(HttpToolsProtocol).keys()
    of_a_protocol = {
        *("connections", "cycle", "loop", "pipeline", "transport", "timeout_keep_alive"),
        *("client", "expect_100_continue"),
    }
    of_a_request = {"headers", "scope", "url"}  # which a protocol has from the first one on
    names = HttpToolsProtocol.on_message_begin.__code__.co_names
    assert of_a_protocol <= vars(uvicorns).keys()
    assert of_a_request <= vars(uvicorns).keys() | set(names)
    cycle = {"body", "disconnected", "message_event", "response_complete", "response_started"}
    assert cycle | {"scope"} <= set(RequestResponseCycle.__init__.__code__.co_names)
