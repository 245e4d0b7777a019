"""Silent and slow clients are disconnected in time; idle connections use no memory."""

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, cast

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.edge.connections import (
    ENDLESS,
    HEADER_BYTES,
    MOST_HEADERS,
    Limits,
    connections_for,
    limited,
)
from poc_core.open_files import raise_file_limit
from tests.harness.waiting import wait_until
from tests.peers.slow_clients import (
    CONNECTIONS,
    GET,
    LARGE,
    LIMITS,
    PATIENCE_S,
    POST,
    Connect,
    Standstill,
    of,
    one_answer,
    rest,
    running,
    status,
)
from tests.stacks.served import port_of, served

# A request whose body is too large to wait behind an answer.
TOO_LARGE = POST.replace(b"10", b"99999") + bytes(50_000)
HASTY = Limits(CONNECTIONS, request_s=1.0, headers_s=0.5)


@pytest.fixture(scope="module")
def hasty_server() -> Iterator[uvicorn.Server]:
    with running(limits=HASTY) as server:
        yield server


@pytest.fixture
def hasty(hasty_server: uvicorn.Server) -> Iterator["Connect"]:
    """As `connect`, to a server that waits for a second at most."""
    with ExitStack() as opened:
        yield Connect(port_of(hasty_server), opened)


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
    assert b"not complete within %d s" % LIMITS.request_s in answer


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


def test_one_connection_serves_many_requests(connect: Connect) -> None:
    connection = connect()
    for _ in range(5):
        connection.sendall(GET + b"\r\n")
        assert status(one_answer(connection)) == 200
        time.sleep(0.2)


def test_an_idle_connection_is_kept_for_longer_than_clients_do(
    connect: Connect, server: uvicorn.Server
) -> None:
    """httpx keeps one for 5 s, as uvicorn would: what it then sends would meet a connection
    that is being closed.
    """
    connection = connect(GET + b"\r\n")
    assert status(one_answer(connection)) == 200
    (one,) = of(server, connection)
    wait_until(lambda: one.timeout_keep_alive_task, "the time until it is closed")
    assert one.timeout_keep_alive_task.when() > one.loop.time() + 5.5
    connection.sendall(GET + b"\r\n")
    assert status(one_answer(connection)) == 200


def test_requests_may_follow_each_other_at_once(connect: Connect) -> None:
    whole = POST + b"0123456789"
    answer = rest(connect(whole + whole + GET + b"Connection: close\r\n\r\n"))
    assert answer.count(b"HTTP/1.1 200") == 3


def test_too_many_requests_at_once_end_the_connection(connect: Connect) -> None:
    answer = rest(connect((GET + b"\r\n") * 100))
    assert answer.count(b"HTTP/1.1 200") < 100


@pytest.mark.parametrize(
    "behind",
    [b"", GET + b"\r\n", POST + bytes(10), TOO_LARGE],
    ids=["alone", "a request behind it", "one with a body", "one with a large body"],
)
def test_a_client_that_leaves_is_noticed_whatever_it_sent_behind_its_request(
    connect: Connect, server: uvicorn.Server, behind: bytes
) -> None:
    connection = connect(b"GET /waits HTTP/1.1\r\nHost: x\r\n\r\n")
    wait_until(lambda: any(one.cycle for one in of(server, connection)), "the request")
    wait_until(lambda: server.server_state.tasks, "its handler")
    connection.sendall(behind)
    if behind != TOO_LARGE:  # for which the server closes the connection
        wait_until(lambda: len(of(server, connection)[0].pipeline) == bool(behind), "what follows")
        connection.close()
    wait_until(
        lambda: not server.server_state.tasks, "the end of what the client does not wait for"
    )


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


def is_refused(port: int) -> bool:
    with suppress(ConnectionError):
        socket.create_connection(("127.0.0.1", port)).close()
        return False
    return True


def test_an_answer_that_has_an_end_is_sent_before_the_server_ends() -> None:
    begun, may_end = threading.Event(), threading.Event()

    async def answers_late(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while not may_end.is_set():
            await asyncio.sleep(0.01)
        await Response("late")(scope, receive, send)

    with ExitStack() as opened:
        opened.callback(may_end.set)
        with served(answers_late, http=limited(LIMITS), lifespan="off") as server:
            port = port_of(server)
            connection = Connect(port, opened)(GET + b"\r\n")
            assert begun.wait(PATIENCE_S)
            server.should_exit = True
            wait_until(lambda: is_refused(port), "the server's end")
            may_end.set()
            assert rest(connection).endswith(b"late")


@pytest.mark.parametrize(
    "behind",
    ["", "GET /livez HTTP/1.1\r\n", "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["alone", "with half a request behind it", "with a request behind it"],
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
        *("client", "expect_100_continue", "logger", "parser"),
    }
    of_a_request = {"headers", "scope", "url"}  # which a protocol has from the first one on
    names = HttpToolsProtocol.on_message_begin.__code__.co_names
    assert of_a_protocol <= vars(uvicorns).keys()
    assert of_a_request <= vars(uvicorns).keys() | set(names)
    cycle = {"body", "disconnected", "message_event", "response_complete", "response_started"}
    assert cycle | {"scope"} <= set(RequestResponseCycle.__init__.__code__.co_names)
