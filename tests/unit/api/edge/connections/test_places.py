"""Some clients lose their connections when there are more clients than places."""

import select
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from api.edge.connections import ENDLESS, Limits, Places, connections_for, limited
from tests.peers.slow_clients import (
    CONNECTIONS,
    GET,
    LIMITS,
    PATIENCE_S,
    POST,
    Connect,
    app,
    one_answer,
    rest,
    running,
    standstill,
    status,
)
from tests.stacks.served import port_of

STREAM = f"GET {ENDLESS} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
WAITS = b"GET /waits HTTP/1.1\r\nHost: x\r\n\r\n"


def are_open(connections: Iterable[socket.socket]) -> bool:
    """Whether none has anything to read, an end neither."""
    return not select.select(list(connections), [], [], 0)[0]


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
        assert status(one_answer(asking)) == 200
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
    assert status(one_answer(slow)) == 200


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
