"""The limit on bodies, as the server underneath sees it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from fastapi import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from api.edge.body_limit import BodyLimit, Room


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


@pytest.mark.parametrize("zeros", ["", "0" * 5000], ids=["plain", "with zeros"])
async def test_a_declared_length_over_the_limit_is_refused_unread(zeros: str) -> None:
    server = await Server(4, content_length=f"{zeros}40").run(max_bytes=30)
    assert server.sent[0]["status"] == 413
    assert server.n_taken == 0


async def test_reading_stops_at_the_first_chunk_over_the_limit() -> None:
    server = Server(1000)
    with pytest.raises(HTTPException) as refusal:
        await server.run(max_bytes=30)
    assert refusal.value.status_code == 413
    assert server.n_taken == 4


LARGEST = 1 << 20
MOST = 4 * LARGEST


class Client:
    """Sends bodies of LARGEST bytes: all but the last byte, and that when it is told."""

    def __init__(self, limit: BodyLimit, address: str) -> None:
        self._limit, self._address = limit, address

    @asynccontextmanager
    async def sends(self) -> AsyncIterator["Sent"]:
        sent = Sent()
        scope = {"type": "http", "headers": [], "client": (self._address, 1)}
        sent.ended = asyncio.ensure_future(self._limit(scope, sent.receive, sent.send))
        await asyncio.wait(
            {sent.ended, asyncio.ensure_future(sent.waits.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        try:
            yield sent
        finally:
            sent.rest.set()
            await asyncio.gather(sent.ended, return_exceptions=True)

    async def sends_whole(self) -> int:
        """Status of the answer."""
        async with self.sends() as sent:
            sent.rest.set()
            return await sent.status()


class Sent:
    def __init__(self) -> None:
        self.rest, self.waits = asyncio.Event(), asyncio.Event()
        self.n_left = LARGEST - 1
        self.n_sent = 0
        self.ended: asyncio.Future[None]

    async def receive(self) -> Message:
        if self.n_left:
            self.n_left, n_bytes = 0, self.n_left
            return {"type": "http.request", "body": bytes(n_bytes), "more_body": True}
        self.waits.set()
        await self.rest.wait()
        return {"type": "http.request", "body": b"x", "more_body": False}

    async def send(self, message: Message) -> None:
        self.n_sent = len(message.get("body", b""))

    async def status(self) -> int:
        try:
            await self.ended
        except HTTPException as refusal:
            return refusal.status_code
        return 200


@pytest.mark.promise(
    "a client whose request bodies never end", "does not block other requests' bodies"
)
async def test_who_holds_all_memory_by_bodies_without_an_end_keeps_no_other_body_out() -> None:
    limit = BodyLimit(reading_app, LARGEST)
    async with AsyncExitStack() as stack:
        greedy = Client(limit, "127.0.0.2")
        sent = [await stack.enter_async_context(greedy.sends()) for _ in range(4)]
        for _ in range(3):
            assert await Client(limit, "127.0.0.1").sends_whole() == 200
        assert await sent[0].status() == 503
        sent[-1].rest.set()
        assert await sent[-1].status() == 200  # one was enough


@pytest.mark.promise(
    "a client whose request bodies never end", "does not block other requests' bodies"
)
async def test_one_client_has_all_memory_while_nobody_else_sends() -> None:
    limit = BodyLimit(reading_app, LARGEST)
    async with AsyncExitStack() as stack:
        only = Client(limit, "127.0.0.2")
        sent = [await stack.enter_async_context(only.sends()) for _ in range(4)]
        assert await only.sends_whole() == 503
        for one in sent:
            one.rest.set()
            assert await one.status() == 200


async def test_what_bodies_held_is_given_back() -> None:
    limit = BodyLimit(reading_app, LARGEST)
    for _ in range(12):
        assert await Client(limit, "127.0.0.2").sends_whole() == 200


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_body_of_which_nothing_more_comes_gives_way_to_those_of_its_own_client() -> None:
    clock = Clock()
    room = Room(MOST, clock)
    stalled, second = room.begin("one"), room.begin("one")
    assert room.add(stalled, MOST - 1, is_last=False)
    assert not room.add(second, LARGEST, is_last=True)
    clock.now = 3.0
    assert room.add(second, LARGEST, is_last=True)
    assert stalled.gave_way


def test_only_the_first_64_kib_of_a_body_are_taken_without_room() -> None:
    room = Room(MOST)
    assert room.add(room.begin("greedy"), MOST, is_last=True)
    body = room.begin("other")
    assert room.add(body, 40 * 1024, is_last=False)
    assert not room.add(body, 24 * 1024 + 1, is_last=False)
    assert room.add(body, 24 * 1024, is_last=False)


def test_of_those_with_the_largest_share_the_slowest_gives_way() -> None:
    clock = Clock()
    room = Room(MOST, clock)
    slow = room.begin("greedy")
    clock.now = 1.0
    fast, other = room.begin("greedy"), room.begin("other")
    assert room.add(slow, MOST // 2, is_last=False)
    assert room.add(fast, MOST // 2, is_last=False)
    assert room.add(other, LARGEST, is_last=False)
    assert (slow.gave_way, fast.gave_way) == (True, False)


def test_a_client_has_the_share_of_the_bodies_that_have_not_ended() -> None:
    room = Room(MOST)
    ended, greedy, small = room.begin("greedy"), room.begin("greedy"), room.begin("small")
    assert room.add(ended, LARGEST, is_last=False)
    assert room.add(greedy, MOST // 2, is_last=False)
    room.end(ended)
    assert room.add(small, LARGEST, is_last=False)
    assert room.add(room.begin("other"), 2 * LARGEST, is_last=False)
    assert (small.gave_way, greedy.gave_way) == (False, True)


def test_a_body_that_is_whole_never_gives_way() -> None:
    room = Room(MOST)
    assert room.add(room.begin("greedy"), MOST, is_last=True)
    assert not room.add(room.begin("other"), LARGEST, is_last=False)
