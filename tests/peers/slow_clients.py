"""A server with few connections, and clients that hold them."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.edge.connections import ENDLESS, Limits, limited
from tests.stacks.served import served

CONNECTIONS = 8
LIMITS = Limits(CONNECTIONS)  # patient: a busy machine's clients are late by seconds
# More than the kernel takes for a client that reads nothing.
LARGE = 32 * 1024 * 1024
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
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


def one_answer(connection: socket.socket) -> bytes:
    """An answer with its body, which may come in pieces, on a connection that stays open."""
    found, n_missing = b"", 1
    while n_missing > 0 and (part := connection.recv(10_000)):
        found += part
        head, ended, body = found.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
        n_missing = (int(length[1]) if length else 0) - len(body) if ended else 1
    return found


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
