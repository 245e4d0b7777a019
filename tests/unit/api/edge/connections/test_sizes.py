"""Headers, bodies and the memory for them have limits."""

import asyncio
import json
import threading
from contextlib import ExitStack
from typing import Literal

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from api.edge.connections import HEADER_BYTES, MOST_HEADERS, limited
from tests.harness.waiting import wait_until
from tests.peers.slow_clients import GET, LIMITS, POST, Connect, app, of, one_answer, rest, status
from tests.stacks.served import port_of, served


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


def test_64_kib_of_headers_are_taken(connect: Connect) -> None:
    first = GET + b"x: "
    connection = connect(first + b"y" * (64 * 1024 - len(first)))
    connection.sendall(b"\r\nConnection: close\r\n\r\n")
    assert status(rest(connection)) == 200


def test_a_path_is_no_larger_than_headers(connect: Connect) -> None:
    long = b"GET /" + b"x" * HEADER_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    assert status(rest(connect(long))) == 431


def test_an_idle_connection_keeps_nothing_of_what_it_asked(
    connect: Connect, server: uvicorn.Server
) -> None:
    connection = connect(GET + b"x-long: " + b"y" * 60_000 + b"\r\n\r\n")
    assert status(one_answer(connection)) == 200
    (idle,) = of(server, connection)
    wait_until(
        lambda: [idle.headers, idle.url, idle.scope, idle.cycle.scope] == [[], b"", {}, {}],
        "nothing kept",
    )


def test_what_has_come_of_the_next_request_is_kept(connect: Connect) -> None:
    connection = connect(GET + b"\r\n" + GET + b"x-second: y\r\n")
    assert status(one_answer(connection)) == 200
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


JAVAS = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize("n_bytes", [0, 10, 1024 * 1024])
@pytest.mark.parametrize("upgrade", [JAVAS, JAVAS.replace(b"h2c", b"websocket")])
def test_a_body_is_read_although_the_client_offers_another_protocol(
    connect: Connect, upgrade: bytes, n_bytes: int
) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\n" + upgrade + b"X-Last: 1\r\n"
    sent = head + b"Content-Length: %d\r\n\r\n" % n_bytes + b"x" * n_bytes
    answer = rest(connect(sent + CLOSES + b"Content-Length: 4\r\n\r\nlast"))
    first, _, second = answer.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1 ")
    assert first == (b"x" * n_bytes or b"ok")
    assert b"host,connection,http2-settings,x-last,content-length\r\n" in answer
    assert second.startswith(b"200")
    assert second.endswith(b"last")


def test_a_chunked_body_behind_an_offer_may_come_byte_by_byte(connect: Connect) -> None:
    connection = connect()
    for byte in CLOSES.replace(b"close", b"close, Upgrade") + JAVAS[JAVAS.index(b"Upgrade: ") :]:
        connection.sendall(bytes([byte]))
    for byte in b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n":
        connection.sendall(bytes([byte]))
    answer = rest(connection)
    assert status(answer) == 200
    assert answer.endswith(b"\r\n\r\nabcde")


def test_an_offer_does_not_raise_the_limit_of_headers(connect: Connect) -> None:
    answer = rest(connect(GET + JAVAS + b"x: " + b"y" * HEADER_BYTES + b"\r\n\r\n"))
    assert status(answer) == 431


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
    wait_until(lambda: not server.server_state.tasks, "no request under way")
    connection.sendall(b"123456789")
    assert status(one_answer(connection)) == 200


def test_a_large_body_is_looked_at_before_it_is_whole(
    connect: Connect, server: uvicorn.Server
) -> None:
    wait_until(lambda: not server.server_state.tasks, "no request under way")
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    connection = connect(head + bytes(50_000))
    wait_until(lambda: bool(server.server_state.tasks), "its request")
    connection.sendall(bytes(50_000))
    assert status(one_answer(connection)) == 200


def test_a_body_that_comes_in_pieces_is_looked_at_before_it_is_whole(
    connect: Connect, server: uvicorn.Server
) -> None:
    wait_until(lambda: not server.server_state.tasks, "no request under way")
    connection = connect(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 18000\r\n\r\n")
    connection.sendall(bytes(6000))
    wait_until(
        lambda: any(one.cycle and one.cycle.body for one in of(server, connection)), "a piece"
    )
    assert not server.server_state.tasks
    connection.sendall(bytes(6000))
    wait_until(lambda: bool(server.server_state.tasks), "its request")
    connection.sendall(bytes(6000))
    assert status(one_answer(connection)) == 200


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


@pytest.mark.parametrize("blank", [b"", b" "])
def test_a_client_that_waits_to_be_told_sends_its_body_then(connect: Connect, blank: bytes) -> None:
    connection = connect(POST.removesuffix(b"\r\n") + b"Expect: 100-continue%s\r\n\r\n" % blank)
    assert status(one_answer(connection)) == 100
    connection.sendall(b"0123456789")
    assert status(one_answer(connection)) == 200


def test_a_client_that_waits_behind_an_answer_is_told_after_it(connect: Connect) -> None:
    waits = POST.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
    connection = connect(GET + b"\r\n" + waits)
    answer = b""
    while b"HTTP/1.1 100" not in answer:
        answer += connection.recv(10_000)
    connection.sendall(b"0123456789")
    assert status(answer) == 200
    assert rest(connection).endswith(b"0123456789")
