"""One reader for all live pages, from the first to the last, tells each what has changed."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable

import pytest
from pydantic import JsonValue

from api.console.live import Live, Sections

DEADLINE_S = 30.0


class Node:
    """What is read, and how often and by how many at a time it is."""

    def __init__(self) -> None:
        self.sections: dict[str, JsonValue] = {"round": None, "jobs": []}
        self.n_begun = 0
        self.n_read = 0
        self.most_at_once = 0
        self.error: Exception | None = None
        self._lock = threading.Lock()

    def begin(self) -> Callable[[], Sections]:
        self.n_begun += 1
        return self.read

    def read(self) -> Sections:
        assert self._lock.acquire(blocking=False), "two read at the same time"
        try:
            self.n_read += 1
            if self.error is not None:
                raise self.error
            return dict(self.sections)
        finally:
            self._lock.release()


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def live() -> Live:
    return Live(pause_s=0.01)


async def next_of(stream: AsyncGenerator[bytes]) -> dict[str, JsonValue]:
    event = await asyncio.wait_for(anext(stream), DEADLINE_S)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    found: dict[str, JsonValue] = json.loads(event.removeprefix(b"data: "))
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_first_event_has_all_sections_and_later_ones_what_has_changed(
    live: Live, node: Node
) -> None:
    stream = live.follow(node.begin)
    assert await next_of(stream) == {"round": None, "jobs": []}
    node.sections["round"] = {"state": "GENERATING"}
    assert await next_of(stream) == {"round": {"state": "GENERATING"}}
    await stream.aclose()


async def test_fifty_pages_have_one_reader(live: Live, node: Node) -> None:
    streams = [live.follow(node.begin) for _ in range(50)]
    assert [await next_of(stream) for stream in streams] == [node.sections] * 50
    node.sections["jobs"] = [1]
    assert [await next_of(stream) for stream in streams] == [{"jobs": [1]}] * 50
    assert (live.followers, node.n_begun) == (50, 1)
    for stream in streams:
        await stream.aclose()


async def test_the_reader_ends_when_the_last_page_leaves(live: Live, node: Node) -> None:
    first, second = live.follow(node.begin), live.follow(node.begin)
    await next_of(first)
    await next_of(second)
    await first.aclose()
    seen = node.n_read
    await until(lambda: node.n_read > seen)  # it goes on for the second
    await second.aclose()
    await until(lambda: not live.is_reading)
    assert live.followers == 0


async def test_nobody_reads_before_the_first_page_comes(live: Live, node: Node) -> None:
    live.follow(node.begin)  # asked for, and not yet listened to
    await asyncio.sleep(0)
    assert (live.is_reading, node.n_read) == (False, 0)


async def test_a_page_that_comes_after_the_last_has_left_sees_nothing_old(
    live: Live, node: Node
) -> None:
    stream = live.follow(node.begin)
    await next_of(stream)
    await stream.aclose()
    await until(lambda: not live.is_reading)
    node.sections = {"round": {"state": "STOPPED"}}
    stream = live.follow(node.begin)
    assert await next_of(stream) == {"round": {"state": "STOPPED"}}
    assert node.n_begun == 2
    await stream.aclose()


async def test_a_page_that_comes_while_the_reader_ends_keeps_it(node: Node) -> None:
    live = Live(pause_s=DEADLINE_S)
    first = live.follow(node.begin)
    await next_of(first)
    await first.aclose()
    second = live.follow(node.begin)
    await anext(second)  # no task of its own: before the reader has noticed
    assert (live.is_reading, node.n_begun) == (True, 1)
    await second.aclose()


async def test_a_reading_that_gets_no_thread_is_told_and_the_next_goes_on(
    live: Live, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_thread(_: object) -> None:
        raise RuntimeError("can't start new thread")

    stream = live.follow(node.begin)
    with monkeypatch.context() as patch:
        patch.setattr("anyio.to_thread.run_sync", no_thread)
        assert "RuntimeError" in str((await next_of(stream))["problem"])
    assert await next_of(stream) == node.sections
    await stream.aclose()


async def test_a_slow_page_misses_readings_and_no_change(live: Live, node: Node) -> None:
    stream = live.follow(node.begin)
    await next_of(stream)
    node.sections["jobs"] = [1]
    seen = node.n_read
    await until(lambda: node.n_read > seen + 1)
    node.sections["round"] = {"state": "IDLE"}
    seen = node.n_read
    await until(lambda: node.n_read > seen + 1)
    assert await next_of(stream) == {"jobs": [1], "round": {"state": "IDLE"}}
    await stream.aclose()


async def test_a_page_has_to_ask_again_after_a_while(node: Node) -> None:
    stream = Live(pause_s=0.01, longest_s=1.0).follow(node.begin)
    node.sections["now"] = 0
    async with asyncio.timeout(DEADLINE_S):
        n_events = 0
        async for _ in stream:
            node.sections["now"] = n_events = n_events + 1
    assert n_events >= 1


async def test_an_error_of_ours_is_told_and_the_next_reading_tried(live: Live, node: Node) -> None:
    node.error = ValueError("secret")
    stream = live.follow(node.begin)
    told = await next_of(stream)
    assert "ValueError" in str(told["problem"])
    assert "secret" not in str(told)
    node.sections["problem"] = None
    node.error = None
    assert await next_of(stream) == node.sections
    await stream.aclose()


async def test_a_reading_that_is_no_json_is_told_and_ends_no_page(live: Live, node: Node) -> None:
    stream = live.follow(node.begin)
    await next_of(stream)
    node.sections["jobs"] = {1, 2}  # type: ignore[assignment]  # a mistake of ours
    assert "TypeError" in str((await next_of(stream))["problem"])
    node.sections["jobs"] = [1]
    assert await next_of(stream) == {"jobs": [1]}
    await stream.aclose()
