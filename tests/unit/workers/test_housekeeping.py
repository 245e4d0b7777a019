"""Housekeeping of an idle worker: what others left behind in Redis, and a dying engine."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis import Redis

from poc_core.records import JobStatus, Lease, ModelInfo, RoundState
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from poc_core.state.work import WorkStore
from tests.harness.samples import (
    MODEL,
    Clock,
    complete_batch,
    known,
    lease_batch,
    new_job,
    pending,
    round_config,
    work_of,
    worker_record,
)
from tests.harness.waiting import wait_until
from tests.planted.forgetful import forgetting
from workers import housekeeping
from workers.engines.base import EngineLostError, Pulse
from workers.heartbeat import Heartbeat
from workers.housekeeping import Housekeeper, Watchdog

Keep = Callable[..., None]


class IdleWorker:
    """What housekeeping sees of a loaded engine, and of rounds on it."""

    chat_paths = ("POST /v1/score",)

    def __init__(self) -> None:
        self.engine = self.wake = self
        self.info = ModelInfo(MODEL, 128, 4, 1024, max_batch_tokens=8192, dtype="float32")
        self.dead = False
        self.beats = 0
        self.beats_a_look = 0  # by which it goes on
        self.waits = False
        self.ended_by: list[str] = []

    def check(self) -> None:
        if self.dead:
            raise EngineLostError("the engine died")

    def pulse(self) -> Pulse:
        self.beats += self.beats_a_look
        return Pulse(self.beats, self.waits)

    def exit_without_engine(self, error: EngineLostError) -> None:
        self.dead = self.waits = False  # the process would end here
        self.ended_by.append(str(error))

    def chat_stats(self) -> dict[str, Any]:
        return {"chat_active": 3}

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.fixture
def worker() -> IdleWorker:
    return IdleWorker()


@pytest.fixture
def store(jobs: JobStore) -> WorkStore:
    return work_of(jobs, "w1")


@pytest.fixture
def heartbeat(
    store: WorkStore, workers: WorkerRegistry, of_worker: Settings
) -> Iterator[Heartbeat]:
    starting = worker_record("w1", state="starting")
    beats = Heartbeat(starting, workers, store.hand, of_worker.heartbeat_s)
    beats.start()
    yield beats
    beats.stop()


@pytest.fixture
def of_worker() -> Settings:
    return Settings(engine_hung_s=30, worker_ttl_s=30)


@pytest.fixture
def keep(
    heartbeat: Heartbeat,
    store: WorkStore,
    worker: IdleWorker,
    of_worker: Settings,
    keep_house: Callable[[], None],
) -> Keep:
    """One look of a worker that is ready at what there is to do, and the beat after it."""
    begun: list[Housekeeper] = []

    def keep(chat_port: int | None = None) -> None:
        idle = cast(Any, worker)
        heartbeat.ready(idle, chat_port)
        if not begun:
            begun.append(Housekeeper(heartbeat, store, idle, idle, of_worker, chat_port))
            begun[0].start()
        keep_house()
        heartbeat.beat()

    return keep


@pytest.fixture(autouse=True)
def every_look_is_this_workers(
    monkeypatch: pytest.MonkeyPatch, keep_house: Callable[[], None], clock: Clock
) -> None:
    """Of several workers one in turn looks for stuck jobs, every few seconds; here is but one."""
    monkeypatch.setattr("poc_core.state.work._TURN", 0.0)
    monkeypatch.setattr(housekeeping, "Watchdog", partial(Watchdog, clock=clock))


def told(workers: WorkerRegistry, name: str) -> object:
    """What the only worker's last heartbeat said by that name."""
    (record,) = workers.live()
    return record.stats.get(name)


def test_a_dead_workers_batch_joins_the_line_again(
    jobs: JobStore, keep: Keep, workers: WorkerRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    workers.heartbeat(worker_record("w2"))
    job_id = jobs.create(new_job([1, 2, 3]))
    lease_batch(jobs, job_id, 1, "w2")
    keep()
    assert (pending(jobs, job_id), caplog.messages) == ([0], [])
    workers.remove("w2")
    keep()
    assert pending(jobs, job_id) == [0, 1]
    assert caplog.messages == ["1 batches are queued again: no worker has them"]


def test_a_round_that_another_followed_is_forgotten(rounds: RoundStore, keep: Keep) -> None:
    first = rounds.store(round_config(), RoundState.IDLE)
    second = rounds.store(round_config(), RoundState.IDLE)
    keep()
    assert rounds.read(first) is None
    assert rounds.read(second) is not None


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_job_whose_last_worker_died_before_the_finish_is_finished_or_fails(
    jobs: JobStore, redis: Redis, workers: WorkerRegistry, keep: Keep, is_broken: bool
) -> None:
    workers.heartbeat(worker_record("w2"))
    job_id = jobs.create(new_job([1]))
    lease_batch(jobs, job_id, 0, "w2")
    assert complete_batch(jobs, job_id, 0, ["v1"])
    if is_broken:
        redis.delete(f"poc:job:{job_id}:values")
    keep()
    record = known(jobs.read(job_id))
    assert record.status is (JobStatus.FAILED if is_broken else JobStatus.COMPLETED)
    assert ("The answer cannot be built" in str(record.error)) is is_broken


def test_stuck_jobs_are_looked_for_every_15_s_and_waiting_nonces_counted_once_a_minute(
    keep: Keep, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {1e6 + after: after for after in (0, 1, 14.9, 15, 16, 45, 60, 61, 119, 134)}
    looked, counted = list[float](), list[float]()
    monkeypatch.setattr(housekeeping, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(housekeeping, "random", SimpleNamespace(uniform=lambda *_: 1.0))
    monkeypatch.setattr(JobStore, "recount", lambda _: counted.append(times[clock.now]))
    monkeypatch.setattr(RoundStore, "forget_followed", lambda _: looked.append(times[clock.now]))
    for clock.now in times:
        keep()
    assert (looked, counted) == ([0, 15, 45, 60, 119, 134], [0, 60, 134])


def test_nonces_of_an_expired_job_are_forgotten(jobs: JobStore, redis: Redis, keep: Keep) -> None:
    job_id = jobs.create(new_job([1, 2, 3]))
    redis.delete(f"poc:job:{job_id}")
    assert jobs.queued_nonces() == 3
    keep()
    assert jobs.queued_nonces() == 0


@pytest.mark.parametrize(("model", "drains"), [(MODEL, False), (MODEL, True), ("other", False)])
def test_a_worker_looks_for_jobs_of_its_model_unless_it_drains(
    heartbeat: Heartbeat, jobs: JobStore, redis: Redis, keep: Keep, model: str, drains: bool
) -> None:
    job_id = jobs.create(new_job([1], model=model))
    redis.delete(f"poc:jobs:line:{model}")
    if drains:
        heartbeat.drain()
    keep()
    assert jobs.next_in_line(model) == (job_id if model == MODEL and not drains else None)


def test_an_idle_worker_whose_engine_died_ends(worker: IdleWorker, keep: Keep) -> None:
    keep()
    assert worker.ended_by == []
    worker.dead = True
    keep()
    assert worker.ended_by == ["the engine died"]


def test_a_worker_whose_engine_hangs_says_so_and_ends(
    worker: IdleWorker, workers: WorkerRegistry, clock: Clock, keep: Keep
) -> None:
    keep()
    worker.waits = True
    for _ in range(3):
        assert worker.ended_by == []
        clock.now += 10
        keep()
    assert "has made no step for 30 s (POC_ENGINE_HUNG_S)" in worker.ended_by[0]
    assert [record.state for record in workers.live()] == ["hung"]


def test_an_engine_that_stands_still_is_told_with_the_time_since_when(
    worker: IdleWorker, workers: WorkerRegistry, clock: Clock, keep: Keep
) -> None:
    keep()
    worker.waits = True
    began = time.time() - 1
    clock.now += 10
    keep()
    since = told(workers, "engine_still_since")
    assert isinstance(since, float)
    assert began - 10 < since < time.time() - 9
    worker.waits = False
    keep()
    assert told(workers, "engine_still_since") is None


@pytest.mark.promise(
    "a worker's chat port that does not respond", "is reported by the health check"
)
def test_a_chat_port_that_does_not_answer_is_told_until_it_does(
    workers: WorkerRegistry, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its socket takes connections from the beginning.
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as answers:
        with monkeypatch.context() as patched:
            patched.setattr(housekeeping, "_ANSWER_S", 0.2)
            keep(answers.server_port)
        assert isinstance(told(workers, "chat_mute_since"), float)
        monkeypatch.setattr(housekeeping, "_ANSWER_S", 60.0)
        thread = threading.Thread(target=answers.serve_forever)
        thread.start()
        keep()
        assert told(workers, "chat_mute_since") is None
        answers.shutdown()
        thread.join()


def test_a_worker_whose_engine_is_busy_goes_on(
    worker: IdleWorker, clock: Clock, keep: Keep
) -> None:
    worker.waits, worker.beats_a_look = True, 1
    for _ in range(9):  # three times as long as one that hangs may
        keep()
        clock.now += 10
    assert worker.ended_by == []


def test_one_bad_record_does_not_keep_other_jobs_from_being_looked_after(
    jobs: JobStore,
    redis: Redis,
    keep: Keep,
    workers: WorkerRegistry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers.heartbeat(worker_record("w2"))
    no_hash, bad_spec, left = (jobs.create(new_job([n])) for n in range(3))
    redis.delete(f"poc:job:{no_hash}")
    redis.set(f"poc:job:{no_hash}", "no hash", ex=100)
    redis.hset(f"poc:job:{bad_spec}", "spec", "{")
    redis.delete(f"poc:job:{bad_spec}:todo")
    lease_batch(jobs, left, 0, "w2")
    workers.remove("w2")
    keep()
    assert pending(jobs, left) == [0]
    assert redis.hget(f"poc:job:{bad_spec}", "status") == b"failed"
    keep()
    assert caplog.text.count(f"job {no_hash} cannot be checked") == 1


@pytest.mark.parametrize("of_worker", [Settings().model_copy(update={"worker_ttl_s": 0.05})])
def test_a_long_look_for_stuck_jobs_delays_no_heartbeat(
    store: WorkStore, redis: Redis, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, go_on = threading.Event(), threading.Event()

    def slices(_model: str) -> list[Any]:
        looking.set()
        go_on.wait(60)
        return []

    monkeypatch.setattr(store, "stuck", slices)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(keep)
        assert looking.wait(60)
        for _ in range(3):
            redis.delete("poc:worker:w1")
            wait_until(lambda: redis.exists("poc:worker:w1"))
        assert not done.done()
        go_on.set()


def test_housekeeping_outlives_a_mistake_of_its_own(
    store: WorkStore,
    jobs: JobStore,
    redis: Redis,
    keep: Keep,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_id = jobs.create(new_job([1]))
    redis.delete(f"poc:jobs:line:{MODEL}")
    slices, calls = store.stuck, []

    def fails_once(model: str) -> Iterator[Any]:
        calls.append(model)
        if len(calls) == 1:
            raise ZeroDivisionError
        return slices(model)

    monkeypatch.setattr(store, "stuck", fails_once)
    keep()
    keep()
    assert jobs.next_in_line(MODEL) == job_id


# A Redis that was killed before it had written what it had answered.


def test_a_batch_that_was_completed_before_redis_forgot_it_is_free_again_at_once(
    jobs: JobStore, redis: Redis, keep: Keep, store: WorkStore
) -> None:
    job_id = jobs.create(new_job([1, 2, 3]))
    lease = known(lease_batch(jobs, job_id, 1, "w1", store))
    keep()
    assert pending(jobs, job_id) == [0]  # it is in hand
    with forgetting(redis, "poc:job:*", "poc:jobs:active:*"):
        complete_batch(jobs, job_id, 1, ["v3"])
        store.hand.drop(lease.number)
    keep()
    assert pending(jobs, job_id) == [0, 1]
    assert isinstance(lease_batch(jobs, job_id, 1, "w1", store), Lease)
    record = known(jobs.read(job_id))
    # No loss is counted.
    assert (record.n_done, redis.exists(f"poc:job:{job_id}:attempts")) == (0, 0)


def test_a_batch_that_another_worker_has_in_hand_is_left_to_it_until_it_has_not(
    jobs: JobStore, workers: WorkerRegistry, keep: Keep
) -> None:
    other = work_of(jobs, "w2")
    workers.heartbeat(worker_record("w2"), other.hand.summary())
    job_id = jobs.create(new_job([1, 2, 3]))
    forgotten = known(lease_batch(jobs, job_id, 0, "w2", other))
    lease_batch(jobs, job_id, 1, "w2", other)
    keep()
    workers.heartbeat(worker_record("w2"), other.hand.summary())
    keep()
    assert pending(jobs, job_id) == []
    other.hand.drop(forgotten.number)
    keep()
    assert pending(jobs, job_id) == []  # it has not said so yet
    workers.heartbeat(worker_record("w2"), other.hand.summary())
    keep()
    for _ in range(2):
        assert pending(jobs, job_id) == [0]
        keep()


def test_a_job_that_redis_forgot_to_be_finished_is_finished_again(
    jobs: JobStore, redis: Redis, keep: Keep, store: WorkStore
) -> None:
    job_id = jobs.create(new_job([1]))
    lease_batch(jobs, job_id, 0, "w1", store)
    complete_batch(jobs, job_id, 0, ["v1"])
    with forgetting(redis, "poc:job:*", "poc:jobs:active:*"):
        assert jobs.finish(job_id)
    keep()
    assert known(jobs.read(job_id)).status is JobStatus.COMPLETED
    assert jobs.total_processed() == 1
