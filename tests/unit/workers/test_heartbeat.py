"""A worker's heartbeats, also where something changes while one is under way."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from poc_core.gpus import Gpu, MachineGpus
from poc_core.records import ModelInfo, WorkerRecord
from poc_core.state.registry import WorkerRegistry
from poc_core.state.work import HeldLeases
from tests.harness.samples import MODEL, worker_record
from tests.harness.waiting import wait_until
from workers.heartbeat import Heartbeat
from workers.proofs import Proofs

# Seconds between heartbeats: of tests that wait for the next one, and of those where none comes.
SOON, NEVER = 0.01, 1000.0


class LoadedEngine:
    """What a heartbeat asks of proofs, and of the engine that computes them."""

    chat_paths = ("POST /v1/score",)

    def __init__(self) -> None:
        self.engine = self
        self.info = ModelInfo(MODEL, 128, 4, 1024, max_batch_tokens=8192, dtype="float32")
        self.slices = self.chat_active = 0

    def chat_stats(self) -> dict[str, Any]:
        return {"slices": self.slices, "chat_active": self.chat_active}


@pytest.fixture
def loaded() -> LoadedEngine:
    return LoadedEngine()


@pytest.fixture
def proofs(loaded: LoadedEngine) -> Proofs:
    return cast(Proofs, loaded)


@pytest.fixture
def hand() -> HeldLeases:
    return HeldLeases()


@pytest.fixture
def start(workers: WorkerRegistry, hand: HeldLeases) -> Iterator[Callable[[float], Heartbeat]]:
    started: list[Heartbeat] = []

    def start(interval_s: float) -> Heartbeat:
        started.append(Heartbeat(worker_record("w1", state="starting"), workers, hand, interval_s))
        started[-1].start()
        return started[-1]

    yield start
    for heartbeat in started:
        heartbeat.stop()


Start = Callable[[float], Heartbeat]


def told(workers: WorkerRegistry) -> WorkerRecord:
    (record,) = workers.live()
    return record


def test_a_worker_is_known_from_its_start_on(start: Start, workers: WorkerRegistry) -> None:
    start(NEVER)
    assert (told(workers).state, told(workers).info) == ("starting", None)


def test_a_worker_that_is_ready_says_at_once_what_it_serves(
    start: Start, workers: WorkerRegistry, proofs: Proofs, loaded: LoadedEngine
) -> None:
    start(NEVER).ready(proofs, 5005)
    record = told(workers)
    assert (record.state, record.port, record.info) == ("ready", 5005, loaded.info)
    assert record.chat_paths == ("POST /v1/score",)


def test_each_heartbeat_counts_anew(
    start: Start, workers: WorkerRegistry, proofs: Proofs, loaded: LoadedEngine
) -> None:
    start(SOON).ready(proofs, None)
    loaded.slices = 7
    wait_until(lambda: told(workers).stats == {"slices": 7, "chat_active": 0})


def test_ready_is_not_lost_in_a_heartbeat_under_way(
    start: Start, workers: WorkerRegistry, proofs: Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = start(NEVER)
    stores, answered, store = threading.Event(), threading.Event(), workers.heartbeat

    def slow_at_first(*told: Any) -> None:
        if not stores.is_set():
            stores.set()
            answered.wait(60)
        store(*told)

    monkeypatch.setattr(workers, "heartbeat", slow_at_first)
    under_way = threading.Thread(target=heartbeat.beat)
    under_way.start()
    assert stores.wait(60)
    ready = threading.Thread(target=heartbeat.ready, args=(proofs, 5005))
    ready.start()
    ready.join(0.5)  # where it waits for the one under way, it goes on in a moment
    answered.set()
    for thread in (under_way, ready):
        thread.join(60)
    assert (told(workers).state, told(workers).port) == ("ready", 5005)
    heartbeat.beat()
    assert (told(workers).state, told(workers).port) == ("ready", 5005)


@pytest.mark.parametrize("is_ready", [False, True], ids=["loading", "ready"])
def test_a_worker_that_drains_says_so_before_its_next_heartbeat(
    start: Start, workers: WorkerRegistry, proofs: Proofs, is_ready: bool
) -> None:
    heartbeat = start(NEVER)
    if is_ready:
        heartbeat.ready(proofs, 5005)
    heartbeat.drain()
    assert heartbeat.is_draining
    wait_until(lambda: told(workers).state == "draining")


def test_the_end_of_all_chats_is_reported_before_the_next_heartbeat(
    start: Start, workers: WorkerRegistry, loaded: LoadedEngine, proofs: Proofs
) -> None:
    loaded.chat_active = 1
    start(NEVER).ready(proofs, 5005)
    assert told(workers).stats["chat_active"] == 1
    loaded.chat_active = 0
    wait_until(lambda: told(workers).stats["chat_active"] == 0, "a beat without chats")


def test_an_engine_that_hangs_is_said_at_once_whatever_else_the_worker_does(
    start: Start, workers: WorkerRegistry, proofs: Proofs
) -> None:
    heartbeat = start(NEVER)
    heartbeat.ready(proofs, 5005)
    heartbeat.drain()
    heartbeat.hung()
    assert told(workers).state == "hung"


def test_what_is_in_hand_is_told(start: Start, redis: Redis, hand: HeldLeases) -> None:
    heartbeat = start(NEVER)
    hand.drop(hand.ask())
    hand.ask()
    heartbeat.beat()
    assert redis.hget("poc:worker:w1", "in_hand") == b'"2:2"'


@pytest.mark.parametrize("error", [ConnectionError("away"), TypeError("a mistake")], ids=repr)
def test_a_heartbeat_that_fails_is_logged_and_not_the_last(
    start: Start,
    workers: WorkerRegistry,
    redis: Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    caplog.set_level(logging.WARNING)
    heartbeat = start(SOON)

    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(workers, "heartbeat", fails)
        heartbeat.hung()  # raises nothing: what its caller does next must come
        wait_until(lambda: "heartbeat" in caplog.text)
        redis.delete("poc:worker:w1")
    wait_until(lambda: workers.is_alive("w1"))


def test_a_worker_that_stops_is_known_no_more(start: Start, workers: WorkerRegistry) -> None:
    start(SOON).stop()
    assert workers.live() == []


def test_a_worker_that_cannot_leave_the_registry_ends_all_the_same(
    start: Start,
    workers: WorkerRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def is_away(*_: object) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(workers, "remove", is_away)
    start(NEVER).stop()
    left = "could not leave the registry (away); this worker's entry expires by itself"
    assert left in caplog.text


def test_between_two_beats_a_worker_gives_signs_of_life_and_comes_back_where_it_is_forgotten(
    start: Callable[[float], Heartbeat], workers: WorkerRegistry, redis: Redis
) -> None:
    start(NEVER)
    redis.pexpire("poc:worker:w1", 2000)
    wait_until(lambda: int(redis.pttl("poc:worker:w1")) > 2000, "a sign of life")
    workers.remove("w1")
    wait_until(lambda: workers.is_alive("w1"), "a beat in place of the sign")


def test_the_gpus_are_told_as_soon_as_they_are_read(
    start: Start, workers: WorkerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = MachineGpus(devices=[Gpu(index=0, name="H100")])
    monkeypatch.setattr("poc_core.gpus.read", lambda _host: found)
    start(SOON)
    wait_until(lambda: told(workers).gpus == found.model_dump(), "a beat with the GPUs")


def test_beats_do_not_wait_for_sensors_that_hang_also_while_the_engine_hangs(
    start: Start, workers: WorkerRegistry, proofs: Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks_gpus, answered = threading.Event(), threading.Event()

    def hangs(_: object) -> MachineGpus:
        asks_gpus.set()
        answered.wait()
        return MachineGpus()

    monkeypatch.setattr("poc_core.gpus.read", hangs)

    def live() -> None:
        heartbeat = start(NEVER)
        assert asks_gpus.wait(60)
        heartbeat.ready(proofs, 5005)
        heartbeat.hung()

    with ThreadPoolExecutor(1) as pool:
        lived = pool.submit(live)
        try:
            lived.result(60)
            assert told(workers).state == "hung"
        finally:
            answered.set()


def test_signs_of_life_do_not_wait_for_a_beat_that_hangs_also_while_the_worker_drains(
    start: Start, redis: Redis, workers: WorkerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    heartbeat = start(NEVER)
    stores, answered, store = threading.Event(), threading.Event(), workers.heartbeat

    def hangs(*told: Any) -> None:
        stores.set()
        answered.wait(60)
        store(*told)

    monkeypatch.setattr(workers, "heartbeat", hangs)
    under_way = threading.Thread(target=heartbeat.beat)
    under_way.start()
    try:
        assert stores.wait(60)
        heartbeat.drain()
        for _ in range(3):
            redis.persist("poc:worker:w1")
            wait_until(lambda: int(redis.pttl("poc:worker:w1")) > 0, "a sign of life")
    finally:
        answered.set()
        under_way.join(60)
    wait_until(lambda: told(workers).state == "draining", "a beat once the one under way has ended")
