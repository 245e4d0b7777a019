"""A worker's chat port on a real server: who shows the gateway's secret, and who does not."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn

from poc_core.records import GATEWAY_SECRET_HEADER
from workers.vllm.chat import gated_chat
from workers.vllm.chat.gated_chat import guarded

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
OWN = {GATEWAY_SECRET_HEADER: "s3cret"}


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


class Served:
    """The server, and connections to it that end with the test."""

    def __init__(self, port: int, exits: ExitStack) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._exits = exits

    async def opened(self, said: bytes) -> socket.socket:
        connection = self._exits.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(connection, said)
        return connection

    async def end_of(self, connection: socket.socket) -> bytes:
        """What the server says until it closes the connection."""
        told, loop = b"", asyncio.get_running_loop()
        with suppress(ConnectionResetError):
            while part := await asyncio.wait_for(loop.sock_recv(connection, 4096), 30):
                told += part
        return told


@asynccontextmanager
async def served(most: int | None = None) -> AsyncIterator[Served]:
    with ExitStack() as exits:
        listener = exits.enter_context(socket.create_server(("127.0.0.1", 0)))
        config = uvicorn.Config(
            app,
            http=guarded("s3cret", most),
            lifespan="off",
            log_level="warning",
            timeout_keep_alive=3600,  # else uvicorn itself ends an answered connection
        )
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield Served(listener.getsockname()[1], exits)
        server.should_exit = True
        await task


@pytest.mark.promise(
    "a stranger at a worker's chat port",
    "is disconnected after 10 seconds and cannot block the API",
)
@pytest.mark.parametrize(
    "said",
    [b"", b"POST /v1", HALF, HALF + b"x-wrong: 1\r\n\r\nhalf a body"],
    ids=["silent", "half a line", "half of the headers", "half of a body"],
)
async def test_who_shows_no_secret_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_chat, "SECONDS", 0.1)
    async with served() as server:
        await server.end_of(await server.opened(said))  # it ends


async def test_the_wrong_secret_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_chat, "SECONDS", 0.1)
    wrong = f"GET / HTTP/1.1\r\nHost: x\r\n{GATEWAY_SECRET_HEADER}: s3cre\r\n\r\n".encode()
    async with served() as server:
        assert b"ok" in await server.end_of(await server.opened(wrong))  # and then it ends


async def test_the_gateways_connection_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_chat, "SECONDS", 1.0)
    async with served() as server, httpx.AsyncClient(base_url=server.url) as client:
        first = await client.get("/", headers=OWN)
        stream = first.extensions["network_stream"]
        await server.end_of(await server.opened(HALF))  # as long as a stranger may stay
        second = await client.get("/", headers=OWN)
        assert second.extensions["network_stream"] is stream


async def test_a_busy_gateway_may_send_two_seconds_after_it_connected() -> None:
    request = f"GET / HTTP/1.1\r\nHost: x\r\n{GATEWAY_SECRET_HEADER}: s3cret\r\n\r\n".encode()
    async with served() as server:
        connection = await server.opened(b"")
        await asyncio.sleep(2)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, request)
        assert b" 200 OK" in await loop.sock_recv(connection, 4096)


@pytest.mark.promise(
    "a stranger at a worker's chat port",
    "is disconnected after 10 seconds and cannot block the API",
)
async def test_many_half_requests_make_room_for_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only after 10 seconds: until then they would hold all files."""
    monkeypatch.setattr(gated_chat, "SECONDS", 60)
    async with served(most=50) as server:
        half = [await server.opened(HALF) for _ in range(200)]
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/", headers=OWN)).status_code == 200
        for connection in half[:140]:
            await server.end_of(connection)
        with pytest.raises(BlockingIOError):
            half[-1].recv(1)  # it may stay
