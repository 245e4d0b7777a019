"""Housekeeping of a worker that has nothing else to do: what others left behind in Redis, and an engine that dies."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest
from kombu.exceptions import OperationalError
from redis import Redis

from poc_core.records import JobStatus, ModelInfo, RoundState
from poc_core.settings import Settings
from poc_core.state import JobStore, RoundStore, WorkerRegistry
from tests.samples import MODEL, new_job, round_config, worker_record
from workers.engines.base import EngineLostError
from workers.housekeeping import Housekeeper
from workers.queue.job_queue import JobQueue, StepQueue


class Messages:
    """The model's queue: batches published, as (job id, batch)."""

    def __init__(self) -> None:
        self.published: list[tuple[str, int]] = []
        self.others_wait = False
        self.broker_is_away = False

    def publish(self, job_id: str, batch_indexes: Iterable[int]) -> None:
        if self.broker_is_away:
            raise OperationalError("away")
        self.published += [(job_id, index) for index in batch_indexes]

    def is_empty(self) -> bool:
        return not self.others_wait and not self.published


class NoSteps:
    def publish(self, round_id: str) -> None: ...

    def is_empty(self) -> bool:
        return False


class IdleWorker:
    """What housekeeping sees of a loaded engine, and of rounds on it."""

    is_in_step = False

    def __init__(self) -> None:
        self.engine = self
        self.info = ModelInfo(MODEL, 128, 4, 1024, max_batch_tokens=8192, dtype="float32")
        self.dead = False
        self.ended_by: list[str] = []

    def check(self) -> None:
        if self.dead:
            raise EngineLostError("the engine died")

    def exit_without_engine(self, error: EngineLostError) -> None:
        self.dead = False  # the process would end here
        self.ended_by.append(str(error))

    def chat_stats(self) -> dict[str, Any]:
        return {"chat_active": 3}

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.fixture
def messages() -> Messages:
    return Messages()


@pytest.fixture
def worker() -> IdleWorker:
    return IdleWorker()


@pytest.fixture
def housekeeper(
    jobs: JobStore, workers: WorkerRegistry, rounds: RoundStore, messages: Messages
) -> Iterator[Housekeeper]:
    settings = Settings(heartbeat_s=0.01, reap_interval_s=0.01)
    queue, steps = cast(JobQueue, messages), cast(StepQueue, NoSteps())
    keeper = Housekeeper(worker_record("w1", state="starting"), workers, jobs, queue, rounds, steps, settings)
    keeper.start()
    yield keeper
    keeper.stop()


@pytest.fixture
def reap(housekeeper: Housekeeper, worker: IdleWorker) -> Callable[[], None]:
    """From now on the worker is ready and looks for stuck jobs."""
    return lambda: housekeeper.ready(cast(Any, worker), cast(Any, worker), None)


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_a_dead_workers_batch_is_queued_again(
    jobs: JobStore, messages: Messages, reap: Callable[[], None], workers: WorkerRegistry
) -> None:
    messages.others_wait = True
    workers.heartbeat(worker_record("w2"))
    job_id = jobs.create(new_job([1, 2, 3]))
    jobs.claim(job_id, 1, "w2")
    reap()
    time.sleep(0.1)
    assert messages.published == []
    workers.remove("w2")
    wait_until(lambda: messages.published == [(job_id, 1)])


def test_batches_whose_messages_were_lost_are_queued_again(
    jobs: JobStore, messages: Messages, reap: Callable[[], None], workers: WorkerRegistry
) -> None:
    workers.heartbeat(worker_record("w2"))
    job_id = jobs.create(new_job([1, 2, 3, 4, 5]))
    jobs.claim(job_id, 1, "w2")
    reap()
    wait_until(lambda: messages.published == [(job_id, 0), (job_id, 2)])


def test_nothing_is_queued_again_while_messages_wait(
    jobs: JobStore, messages: Messages, reap: Callable[[], None]
) -> None:
    messages.others_wait = True
    jobs.create(new_job([1, 2, 3]))
    reap()
    time.sleep(0.1)
    assert messages.published == []


def test_nothing_is_queued_again_while_a_round_runs(
    jobs: JobStore, messages: Messages, rounds: RoundStore, reap: Callable[[], None]
) -> None:
    job_id = jobs.create(new_job([1]))
    rounds.store(round_config(), RoundState.GENERATING)
    reap()
    time.sleep(0.1)
    assert messages.published == []
    current = rounds.current()
    assert current is not None
    rounds.switch(current, RoundState.STOPPED)
    wait_until(lambda: messages.published == [(job_id, 0)])


def test_a_job_whose_last_worker_died_before_the_finish_is_finished(
    jobs: JobStore, workers: WorkerRegistry, reap: Callable[[], None]
) -> None:
    workers.heartbeat(worker_record("w2"))
    job_id = jobs.create(new_job([1]))
    jobs.claim(job_id, 0, "w2")
    assert jobs.complete(job_id, 0, ["v1"])
    reap()
    wait_until(lambda: (record := jobs.read(job_id)) and record.status is JobStatus.COMPLETED)


def test_nonces_of_an_expired_job_are_forgotten(jobs: JobStore, redis: Redis, reap: Callable[[], None]) -> None:
    job_id = jobs.create(new_job([1, 2, 3]))
    redis.delete(f"poc:job:{job_id}")
    assert jobs.queued_nonces() == 3
    reap()
    wait_until(lambda: jobs.queued_nonces() == 0)


def test_jobs_of_other_models_are_left_to_their_workers(
    jobs: JobStore, messages: Messages, reap: Callable[[], None]
) -> None:
    jobs.create(new_job([1], model="other"))
    reap()
    time.sleep(0.1)
    assert messages.published == []


def test_a_worker_that_loads_or_drains_looks_for_no_jobs(
    housekeeper: Housekeeper, jobs: JobStore, messages: Messages, reap: Callable[[], None]
) -> None:
    jobs.create(new_job([1]))
    time.sleep(0.1)
    housekeeper.drain()
    reap()
    time.sleep(0.1)
    assert messages.published == []


def test_an_idle_worker_whose_engine_died_ends(worker: IdleWorker, reap: Callable[[], None]) -> None:
    reap()
    time.sleep(0.05)
    assert worker.ended_by == []
    worker.dead = True
    wait_until(lambda: worker.ended_by == ["the engine died"])


def test_heartbeats_say_what_the_worker_is_and_counts(
    housekeeper: Housekeeper, workers: WorkerRegistry, reap: Callable[[], None], worker: IdleWorker
) -> None:
    assert [record.state for record in workers.live()] == ["starting"]
    reap()
    wait_until(lambda: workers.live()[0].stats == {"chat_active": 3})
    (record,) = workers.live()
    assert (record.state, record.info) == ("ready", worker.info)
    housekeeper.stop()
    assert workers.live() == []


def test_the_heart_beats_on_by_itself(housekeeper: Housekeeper, workers: WorkerRegistry, redis: Redis) -> None:
    redis.delete("poc:worker:w1")
    wait_until(lambda: workers.is_alive("w1"))


def test_a_broker_that_is_away_is_asked_again(jobs: JobStore, messages: Messages, reap: Callable[[], None]) -> None:
    job_id = jobs.create(new_job([1]))
    messages.broker_is_away = True
    reap()
    time.sleep(0.1)
    messages.broker_is_away = False
    wait_until(lambda: messages.published == [(job_id, 0)])
