"""Requests at the same time share one reading, which is never older than the request."""

import asyncio
import threading

import pytest

from api.routes.together import Together


class Value:
    """Read slowly; counts how often."""

    def __init__(self) -> None:
        self.now = 0
        self.readings = 0
        self.began, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def read(self) -> int:
        self.readings += 1
        seen = self.now
        self.began.set()
        assert self.may_end.wait(60)
        return seen


async def test_who_comes_together_shares_a_reading() -> None:
    together, value = Together(), Value()
    assert await asyncio.gather(*(together.get("key", value.read) for _ in range(100))) == [0] * 100
    assert value.readings <= 2


async def test_who_comes_while_it_is_read_gets_the_next_reading() -> None:
    together, value = Together(), Value()
    value.may_end.clear()
    first = asyncio.create_task(together.get("key", value.read))
    await asyncio.to_thread(value.began.wait, 60)
    value.now = 1
    later = [asyncio.create_task(together.get("key", value.read)) for _ in range(10)]
    await asyncio.sleep(0)
    value.may_end.set()
    assert await first == 0
    assert await asyncio.gather(*later) == [1] * 10
    assert value.readings == 2


async def test_a_reading_that_hangs_holds_up_nobody_else() -> None:
    together, silent, other = Together(), Value(), Value()
    silent.may_end.clear()
    hanging = asyncio.create_task(together.get("silent", silent.read))
    await asyncio.to_thread(silent.began.wait, 60)
    assert await together.get("other", other.read) == 0
    assert not hanging.done()
    silent.may_end.set()
    assert await hanging == 0


async def test_keys_are_read_each_for_itself_and_so_are_their_errors() -> None:
    together = Together()

    def broken() -> int:
        raise ConnectionError("away")

    found = await asyncio.gather(
        together.get("a", lambda: 1),
        together.get("b", broken),
        together.get("c", lambda: 3),
        return_exceptions=True,
    )
    assert [found[0], found[2]] == [1, 3]
    assert isinstance(found[1], ConnectionError)


async def test_a_client_that_leaves_takes_nobody_with_it() -> None:
    together, value = Together(), Value()
    value.may_end.clear()
    leaves, stays = (asyncio.create_task(together.get("key", value.read)) for _ in range(2))
    await asyncio.to_thread(value.began.wait, 60)
    leaves.cancel()
    value.may_end.set()
    assert await stays == 0
    with pytest.raises(asyncio.CancelledError):
        await leaves


def test_it_serves_one_event_loop_after_the_other() -> None:
    together = Together()
    assert [asyncio.run(together.get("key", lambda: 5)) for _ in range(2)] == [5, 5]


async def test_a_reading_that_gets_no_thread_fails_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together, value = Together(), Value()
    with monkeypatch.context() as patch:
        patch.setattr("anyio.to_thread.run_sync", no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            await asyncio.wait_for(together.get("key", value.read), 60)
    assert await together.get("key", value.read) == 0


async def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")
