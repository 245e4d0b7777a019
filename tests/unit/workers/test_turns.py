"""A worker's turns: what is next, a round before jobs, and when another one is published."""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis import Redis

from poc_core.records import JobStatus, RoundRecord, RoundState
from poc_core.settings import parse_chat_policy
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from poc_core.state.work import WorkStore
from tests.harness.samples import (
    MODEL,
    SPEC,
    Clock,
    free_lost,
    known,
    new_job,
    pending,
    result_body,
    round_config,
    work_of,
    worker_record,
)
from tests.harness.waiting import wait_until
from tests.peers.fake_engine import FakeEngine, value
from workers.chat_gate import ChatGate, Starvation
from workers.proofs import Proofs
from workers.queue.wake import Wake
from workers.work import Turns, Work

RELEASE = Path(__file__).parents[2] / "data" / "releases" / "2026-11-26.json"


class Queue:
    """Stands in for the worker's own queue, and its model's."""

    def __init__(self) -> None:
        self.waiting = 0
        self.passed_on = 0

    def another(self) -> None:
        self.passed_on += 1

    def myself(self) -> None:
        self.waiting += 1

    def waits(self) -> bool:
        return self.waiting > 0


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def queue() -> Queue:
    return Queue()


Make = Callable[..., Turns]
TURN_S = 60.0


class FirstSlice:
    """What the engine computes first: a turn's time passes within it, and it lasts until it is to
    end.
    """

    def __init__(self, engine: FakeEngine, time: Clock) -> None:
        self._time = time
        self._may_end = threading.Event()
        self.then: Callable[[], object] = lambda: None
        engine.events[0] = self._happens

    def _happens(self) -> None:
        self.then()
        self._time.now += TURN_S
        assert self._may_end.wait(60)

    def ends(self) -> None:
        self._may_end.set()


@pytest.fixture
def first_slice(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[FirstSlice]:
    time = Clock()
    monkeypatch.setattr("workers.work.time", SimpleNamespace(monotonic=time))
    found = FirstSlice(engine, time)
    yield found
    found.ends()


@pytest.fixture
def make(
    engine: FakeEngine, jobs: JobStore, workers: WorkerRegistry, queue: Queue
) -> Iterator[Make]:
    started: list[Proofs] = []

    def made(gate: ChatGate | None = None) -> Turns:
        proofs = Proofs(engine, gate)
        started.append(proofs)
        store = work_of(jobs, "w1")
        urgent = Work(proofs, store, urgent=True)
        work = Work(proofs, store, pass_on=queue.another)
        return Turns(MODEL, work, urgent, cast(Wake, queue), TURN_S)

    workers.heartbeat(worker_record("w1"))
    yield made
    for proofs in started:
        proofs.stop()


@pytest.fixture
def turns(make: Make) -> Turns:
    return make()


def a_round(rounds: RoundStore, **config: Any) -> RoundRecord:
    return known(rounds.read(rounds.store(round_config(**config), RoundState.GENERATING)))


def status(jobs: JobStore, job_id: str) -> JobStatus:
    record = known(jobs.read(job_id))
    return record.status


def test_a_turn_computes_all_that_there_is_and_says_what(
    turns: Turns, jobs: JobStore, queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    plain = jobs.create(new_job([0, 1, 2]))
    claimed = {nonce: str(value(SPEC, nonce)) for nonce in (7, 8)}
    validation = jobs.create(new_job([7, 8], claimed=claimed))
    said = turns.take()
    assert said == f"{MODEL}: 2 nonces of validation {validation}, 3 nonces of job {plain}"
    assert any(
        re.fullmatch(re.escape(said) + r" in \d{1,3}\.\d s", line) for line in caplog.messages
    )
    assert [status(jobs, job_id) for job_id in (plain, validation)] == [JobStatus.COMPLETED] * 2
    assert (turns.take(), queue.waiting) == (f"{MODEL}: nothing to compute", 0)


def test_what_a_turn_says_is_short_however_many_jobs_it_served(
    turns: Turns, jobs: JobStore
) -> None:
    for nonce in range(25):
        jobs.create(new_job([nonce]))
    said = turns.take()
    assert said.endswith(", 15 nonces of 15 more")
    assert len(said) < 1000


def test_a_round_comes_before_jobs_which_go_on_in_the_same_turn(
    turns: Turns, jobs: JobStore, rounds: RoundStore, engine: FakeEngine
) -> None:
    job_id = jobs.create(new_job([1000]))
    record = a_round(rounds)
    engine.events[3] = lambda: rounds.switch(record, RoundState.STOPPED)
    said = turns.take()
    assert status(jobs, job_id) is JobStatus.COMPLETED
    assert engine.begun[-1] == [1000]
    assert f"nonces of round {record.round_id}, 1 nonces of job {job_id}" in said


def test_what_is_held_of_jobs_is_completed_before_a_round_begins(
    turns: Turns,
    jobs: JobStore,
    rounds: RoundStore,
    engine: FakeEngine,
    queue: Queue,
    first_slice: FirstSlice,
) -> None:
    job_id = jobs.create(new_job([1000]))
    assert turns.take() == f"{MODEL}: no nonces finished yet"
    assert (queue.waiting, status(jobs, job_id)) == (1, JobStatus.RUNNING)
    record = a_round(rounds)
    behind = jobs.create(new_job([1001]))
    found: list[JobStatus] = []

    def round_begins() -> None:
        found.extend(status(jobs, one) for one in (job_id, behind))
        rounds.switch(record, RoundState.STOPPED)

    engine.events[1] = round_begins
    first_slice.ends()
    turns.take()
    assert found == [JobStatus.COMPLETED, JobStatus.QUEUED]
    assert engine.begun[0] == [1000]
    assert 0 in engine.begun[1]  # of the round
    assert status(jobs, behind) is JobStatus.COMPLETED


def test_a_round_that_ended_between_two_turns_is_given_back_and_chat_let_in(
    make: Make,
    rounds: RoundStore,
    redis: Redis,
    engine: FakeEngine,
    queue: Queue,
    first_slice: FirstSlice,
) -> None:
    gate = ChatGate(parse_chat_policy("exclusive"), engine.unfinished_chat, Starvation())
    turns = make(gate)
    record = a_round(rounds)
    turns.take()
    assert queue.waiting == 1
    assert not gate.enter_chat()
    rounds.switch(record, RoundState.STOPPED)
    first_slice.ends()
    queue.waiting = 0  # the message is lost
    turns.look()
    assert queue.waiting == 1
    turns.take()
    assert gate.enter_chat()
    while redis.hlen(f"poc:round:{record.round_id}:leases"):
        turns.take()


def test_a_second_turn_does_nothing_alongside_the_first(
    turns: Turns, rounds: RoundStore, engine: FakeEngine, queue: Queue
) -> None:
    record = a_round(rounds)
    first = threading.Thread(target=turns.take)
    first.start()
    wait_until(lambda: bool(engine.begun))
    assert turns.take() == ""
    turns.look()
    assert queue.waiting == 0
    rounds.switch(record, RoundState.STOPPED)
    first.join(60)


def test_a_turn_that_raises_leaves_the_way_free_for_the_next(
    turns: Turns, jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = jobs.create(new_job([0]))
    with monkeypatch.context() as patch:
        patch.setattr(WorkStore, "lease", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            turns.take()
    turns.take()
    assert status(jobs, job_id) is JobStatus.COMPLETED


def test_a_worker_that_is_to_end_publishes_no_further_turn_and_holds_nothing(
    turns: Turns, jobs: JobStore, queue: Queue, first_slice: FirstSlice
) -> None:
    job_ids = [jobs.create(new_job([nonce], model=MODEL)) for nonce in range(3)]
    first_slice.then = turns.leave
    first_slice.ends()
    turns.take()
    turns.end()
    assert queue.waiting == 0
    held = {status(jobs, job_id) for job_id in job_ids}
    assert JobStatus.RUNNING not in held


def test_what_is_held_between_two_turns_is_given_back_at_the_end(
    turns: Turns, jobs: JobStore, first_slice: FirstSlice
) -> None:
    job_id = jobs.create(new_job([0, 1]))
    turns.take()
    assert pending(jobs, job_id) == []
    turns.end()
    assert pending(jobs, job_id) == [0]


# Without messages.


def test_a_worker_looks_for_jobs_by_itself_and_waits_for_one_message(
    turns: Turns, jobs: JobStore, queue: Queue
) -> None:
    turns.look()
    assert queue.waiting == 0
    jobs.create(new_job([1]))
    turns.look()
    turns.look()
    assert queue.waiting == 1


def test_a_worker_whose_message_was_lost_goes_on_with_the_batches_that_it_holds(
    turns: Turns, jobs: JobStore, queue: Queue, first_slice: FirstSlice
) -> None:
    job_id = jobs.create(new_job([0, 1]))
    turns.take()
    queue.waiting = 0  # Redis lost it
    assert pending(jobs, job_id) == []
    turns.look()
    assert queue.waiting == 1


def test_a_worker_looks_for_its_models_round_by_itself(
    turns: Turns, rounds: RoundStore, queue: Queue
) -> None:
    record = a_round(rounds, model="other")
    turns.look()
    assert queue.waiting == 0
    rounds.switch(record, RoundState.STOPPED)
    a_round(rounds)
    turns.look()
    assert queue.waiting == 1


def test_two_workers_share_a_job_that_one_message_told_of(
    make: Make, jobs: JobStore, engine: FakeEngine, queue: Queue
) -> None:
    """The other one looked by itself."""
    first, second = make(), make()
    job_id = jobs.create(new_job(list(range(400)), batch_size=1))
    engine.layer_s = 0.01
    threads = [threading.Thread(target=one.take) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert status(jobs, job_id) is JobStatus.COMPLETED
    assert sorted(nonce for nonces in engine.begun for nonce in nonces) == list(range(400))


def test_a_job_that_waits_for_chat_wakes_another_worker_and_keeps_the_turn_until_chat_ends(
    make: Make, jobs: JobStore, engine: FakeEngine, queue: Queue
) -> None:
    gate = ChatGate(parse_chat_policy("yield"), engine.unfinished_chat, Starvation())
    turns = make(gate)
    engine.chat = 1
    job_id = jobs.create(new_job([0]))
    thread = threading.Thread(target=turns.take)
    thread.start()
    wait_until(lambda: (record := jobs.read(job_id)) and record.waiting_for == "chat")
    assert status(jobs, job_id) is JobStatus.QUEUED
    assert queue.passed_on == 1  # this one may have taken the only message
    engine.chat = 0
    thread.join(60)
    assert status(jobs, job_id) is JobStatus.COMPLETED


# What an earlier release left, see tests/data/releases.


def restored(redis: Redis) -> dict[str, Any]:
    """Jobs, a round and an outbox as the release before this kind of message wrote them."""
    left: dict[str, Any] = json.loads(RELEASE.read_text(encoding="utf-8"))
    writers: dict[str, Callable[[str, Any], object]] = {
        "string": redis.set,
        "hash": lambda key, value: redis.hset(key, mapping=value),
        "set": lambda key, value: redis.sadd(key, *value),
        "zset": lambda key, value: redis.zadd(key, value),
        "list": lambda key, value: redis.rpush(key, *value),
    }
    for key, one in left["keys"].items():
        writers[one["type"]](key, one["value"])
        redis.expire(key, one["ttl"])
    return left


def test_jobs_and_a_round_of_an_earlier_release_are_computed_to_their_ends(
    make: Make,
    jobs: JobStore,
    rounds: RoundStore,
    workers: WorkerRegistry,
    redis: Redis,
    clock: Clock,
    engine: FakeEngine,
) -> None:
    clock.now += 10
    left = restored(redis)
    workers.heartbeat(worker_record("alive"), "2:2")  # which computes its second lease still
    record = known(rounds.read(left["round"]))
    turns = make()
    engine.events[2] = lambda: rounds.switch(record, RoundState.STOPPED)
    assert f"of round {record.round_id}" in turns.take()
    assert engine.begun[0] == [4, 5, 6, 7]  # what a dead worker had of it
    assert jobs.next_in_line(MODEL) is None  # until somebody has looked over all jobs
    assert [found.broken for found in work_of(jobs).stuck(MODEL)] == [[]]
    turns.look()
    turns.take()
    assert status(jobs, left["validation"]) is JobStatus.COMPLETED
    assert pending(jobs, left["plain"]) == []
    assert status(jobs, left["plain"]) is JobStatus.RUNNING  # the other worker has a batch
    workers.remove("alive")
    free_lost(jobs)
    turns.take()
    answer = json.loads(result_body(jobs, left["plain"]) or b"")
    assert [(one["nonce"], one["vector_b64"]) for one in answer["artifacts"]] == [
        (nonce, value(SPEC, nonce)) for nonce in range(10)
    ]
    assert jobs.queued_nonces() == 0
    assert redis.llen(f"poc:outbox:{record.round_id}:entries") >= 3  # the first was there
