"""The workers that chat may be sent to, and when Redis is asked for them."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from api.chat import chat_workers as module
from api.chat.chat_workers import ChatWorkers
from poc_core.records import WorkerRecord
from poc_core.settings import Settings
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import Clock, known, worker_record
from tests.harness.waiting import wait_until

CACHE_S = 0.25


class Registry(WorkerRegistry):
    """Counts how often it is asked, and may hold an answer back or fail."""

    def __init__(self, redis: Redis, settings: Settings) -> None:
        super().__init__(redis, settings)
        self.asked = 0
        self.error: Exception | None = None
        self.answered = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def ready(self, model: str | None = None) -> list[WorkerRecord]:
        self.asked += 1
        ready = super().ready(model)
        self.answered.set()
        assert self.may_answer.wait(60)
        if self.error is not None:
            raise self.error
        return ready

    def serve(self, worker_id: str, port: int | None = 1, **changes: Any) -> WorkerRecord:
        record = replace(worker_record(worker_id), port=port, **changes)
        self.heartbeat(record)
        return record


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is waited for, however busy this machine is."""
    monkeypatch.setattr(module, "_PATIENCE_S", 60.0)


@pytest.fixture
def registry(redis: Redis, settings: Settings) -> Registry:
    return Registry(redis, settings)


@pytest.fixture
def chat_workers(registry: Registry, clock: Clock) -> ChatWorkers:
    return ChatWorkers(registry, CACHE_S, clock)


async def test_are_those_that_are_ready_and_serve_chat(
    registry: Registry, chat_workers: ChatWorkers
) -> None:
    chatting = registry.serve("w1")
    registry.serve("w2", port=None)
    registry.serve("w3", state="starting")
    registry.serve("w4", state="draining")
    assert await chat_workers.remembered() == [chatting]


async def test_are_none_of_a_model_that_was_stopped_while_it_loaded(
    registry: Registry, clock: Clock
) -> None:
    chatting = registry.serve("w1", host_id="h1")
    registry.serve("w2", host_id="h2")
    chat_workers = ChatWorkers(registry, CACHE_S, clock, keeping=lambda: {"h2"})
    assert await chat_workers.remembered() == [chatting]


async def test_are_read_once_within_the_cache_time(
    registry: Registry, chat_workers: ChatWorkers, clock: Clock
) -> None:
    first = registry.serve("w1")
    for _ in range(100):
        assert await chat_workers.remembered() == [first]
    assert registry.asked == 1
    second = registry.serve("w2")
    clock.now += CACHE_S / 2
    assert await chat_workers.remembered() == [first]
    clock.now += CACHE_S
    assert await chat_workers.remembered() == [first, second]
    assert registry.asked == 2


async def test_are_read_anew_before_a_client_is_refused(
    registry: Registry, chat_workers: ChatWorkers, clock: Clock
) -> None:
    assert await chat_workers.remembered() == []
    worker = registry.serve("w1")
    clock.now += 0.001
    assert await chat_workers.now() == [worker]
    assert await chat_workers.remembered() == [worker]


async def test_without_a_cache_are_read_for_each_request(registry: Registry) -> None:
    uncached = ChatWorkers(registry, 0)
    await uncached.remembered()
    await uncached.remembered()
    assert registry.asked == 2


async def test_one_that_is_lost_is_not_remembered(
    registry: Registry, chat_workers: ChatWorkers, clock: Clock
) -> None:
    lost, other = registry.serve("w1"), registry.serve("w2")
    assert await chat_workers.remembered() == [lost, other]
    clock.now += CACHE_S / 2
    chat_workers.lost(lost.id)
    assert await chat_workers.remembered() == [other]
    clock.now += CACHE_S  # Redis still holds it: it may have answered others, and is tried again
    assert await chat_workers.remembered() == [lost, other]


async def test_one_that_is_lost_while_redis_is_read_is_not_remembered(
    registry: Registry, chat_workers: ChatWorkers
) -> None:
    lost, other = registry.serve("w1"), registry.serve("w2")
    registry.may_answer.clear()
    reading = asyncio.create_task(chat_workers.remembered())
    await asyncio.to_thread(registry.answered.wait, 60)
    chat_workers.lost(lost.id)
    registry.may_answer.set()
    assert await reading == [other]
    assert await chat_workers.remembered() == [other]


async def test_requests_that_come_together_share_one_reading(
    registry: Registry, chat_workers: ChatWorkers
) -> None:
    worker = registry.serve("w1")
    registry.may_answer.clear()
    requests = [asyncio.create_task(chat_workers.remembered()) for _ in range(10)]
    await asyncio.to_thread(registry.answered.wait, 60)
    requests[0].cancel()  # its client hung up
    registry.may_answer.set()
    found = await asyncio.gather(*requests, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [[worker]] * 9
    assert registry.asked == 1


@pytest.mark.parametrize("n_turns", range(8))
async def test_a_request_that_is_cancelled_as_the_reading_ends_is_cancelled(
    registry: Registry, chat_workers: ChatWorkers, clock: Clock, n_turns: int
) -> None:
    registry.serve("w1")
    await chat_workers.remembered()
    clock.now += 1
    registry.may_answer.clear()
    registry.answered.clear()
    request = asyncio.create_task(chat_workers.remembered())
    await asyncio.to_thread(registry.answered.wait, 60)
    reading = known(chat_workers._reading)
    registry.may_answer.set()
    await reading
    for _ in range(n_turns):
        await asyncio.sleep(0)
    if request.cancel():  # its client hung up before the request had its workers
        with pytest.raises(asyncio.CancelledError):
            await request
    assert request.cancelled() or n_turns > 0


async def test_a_redis_that_is_away_is_everybodys_error_and_not_remembered(
    registry: Registry, chat_workers: ChatWorkers
) -> None:
    worker = registry.serve("w1")
    registry.error = ConnectionError("away")
    found = await asyncio.gather(
        *(chat_workers.remembered() for _ in range(3)), return_exceptions=True
    )
    assert found == [registry.error] * 3
    registry.error = None
    assert await chat_workers.remembered() == [worker]


@pytest.mark.parametrize("error", [ConnectionError("away"), ResponseError("BUSY with a script")])
async def test_while_redis_is_away_those_that_it_named_last_serve_for_a_minute(
    registry: Registry, chat_workers: ChatWorkers, clock: Clock, error: RedisError
) -> None:
    gone, worker = registry.serve("w1"), registry.serve("w2")
    assert await chat_workers.remembered() == [gone, worker]
    registry.error = error
    clock.now += 50
    chat_workers.lost(gone.id)
    assert await chat_workers.remembered() == [worker]
    assert await chat_workers.is_ready(worker.id)
    with pytest.raises(type(error)):  # before a client is told that nobody serves its model
        await chat_workers.now()
    clock.now += 50
    with pytest.raises(type(error)):
        await chat_workers.remembered()


async def test_a_redis_that_says_nothing_holds_no_request_up_and_is_away_after_a_minute(
    registry: Registry, chat_workers: ChatWorkers, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.1)
    worker = registry.serve("w1")
    assert await chat_workers.remembered() == [worker]
    registry.may_answer.clear()
    clock.now += 1
    try:
        assert await chat_workers.remembered() == [worker]
        await asyncio.to_thread(wait_until, lambda: registry.asked == 2, "a question to Redis")
        clock.now += 100
        with pytest.raises(TimeoutError):  # Redis' own, for which the API answers 503
            await chat_workers.remembered()
        assert not await chat_workers.is_ready(worker.id)
    finally:
        registry.may_answer.set()
