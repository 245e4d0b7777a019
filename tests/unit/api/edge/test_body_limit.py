"""The limit on bodies, as the server underneath sees it."""

from typing import Any

import pytest
from fastapi import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from api.edge.body_limit import BodyLimit


async def reading_app(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(len(body)).encode()})


class Server:
    """Offers `n_chunks` of 10 bytes and counts how many are taken."""

    def __init__(self, n_chunks: int, **headers: str) -> None:
        self.n_chunks, self.n_taken = n_chunks, 0
        self.sent: list[Message] = []
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": raw}

    async def receive(self) -> Message:
        self.n_taken += 1
        return {
            "type": "http.request",
            "body": b"x" * 10,
            "more_body": self.n_taken < self.n_chunks,
        }

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def run(self, max_bytes: int) -> "Server":
        await BodyLimit(reading_app, max_bytes)(self.scope, self.receive, self.send)
        return self


async def test_a_body_up_to_the_limit_passes() -> None:
    server = await Server(3).run(max_bytes=30)
    assert server.sent[-1]["body"] == b"30"


async def test_a_declared_length_over_the_limit_is_refused_unread() -> None:
    server = await Server(4, content_length="40").run(max_bytes=30)
    assert server.sent[0]["status"] == 413
    assert server.n_taken == 0


async def test_reading_stops_at_the_first_chunk_over_the_limit() -> None:
    server = Server(1000)
    with pytest.raises(HTTPException) as refusal:
        await server.run(max_bytes=30)
    assert refusal.value.status_code == 413
    assert server.n_taken == 4
