"""Who comes in when: by turns of clients, whatever came before."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from api.edge.entrance import Entrance, FairServer

GREEDY, MODEST = "127.0.0.2", "127.0.0.3"


class Noting(asyncio.Protocol):
    """Says whose connection has come in."""

    def __init__(self, came: list[str]) -> None:
        self._came = came

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._came.append(transport.get_extra_info("peername")[0])


@contextmanager
def door() -> Iterator[tuple[socket.socket, int]]:
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        yield listening, listening.getsockname()[1]


@contextmanager
def knocks(port: int, address: str, n: int) -> Iterator[None]:
    with contextlib.ExitStack() as exits:
        for _ in range(n):
            one = socket.create_connection(("127.0.0.1", port), 30, (address, 0))
            exits.enter_context(contextlib.closing(one))
        yield


async def until(came: list[str], n: int) -> None:
    async with asyncio.timeout(30):
        while len(came) < n:
            await asyncio.sleep(0.01)


async def test_who_comes_last_is_in_before_what_waits_of_another() -> None:
    came: list[str] = []
    with door() as (listening, port), knocks(port, GREEDY, 300), knocks(port, MODEST, 1):
        entrance = Entrance(listening, 1000, lambda: Noting(came))
        await until(came, 301)
        entrance.close()
    assert came.index(MODEST) < 150
    assert came.count(GREEDY) == 300


async def test_all_come_in_however_few_may_wait() -> None:
    came: list[str] = []
    with door() as (listening, port), knocks(port, GREEDY, 100):
        entrance = Entrance(listening, 3, lambda: Noting(came))
        await until(came, 100)
        entrance.close()


async def test_who_waits_at_the_end_is_sent_away() -> None:
    with door() as (listening, port), knocks(port, GREEDY, 100):
        entrance = Entrance(listening, 1000, lambda: Noting([]))
        await asyncio.sleep(0)
        entrance.close()
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 5)


async def test_without_a_further_file_it_waits_for_one() -> None:
    came: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with door() as (listening, port), knocks(port, GREEDY, 20):
        with open(os.devnull) as lowest:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 2, limits[1]))
        try:
            entrance = Entrance(listening, 1000, lambda: Noting(came))
            await asyncio.sleep(0.3)
            held = len(came)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await until(came, 20)
        entrance.close()
        assert 0 < held < 20


async def app(scope: Scope, _receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(scope["client"][0]).encode()})


async def test_a_server_answers_who_has_come_in_and_ends() -> None:
    with door() as (listening, port):
        config = uvicorn.Config(app, log_level="warning", lifespan="off")
        server = FairServer(config, 10)
        serving = asyncio.create_task(server.serve([listening]))
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 30)
        assert answer.startswith(b"HTTP/1.1 200")
        writer.close()
        assert b"127.0.0.1" in answer
        server.should_exit = True
        await asyncio.wait_for(serving, 30)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
