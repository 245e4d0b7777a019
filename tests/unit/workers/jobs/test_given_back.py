"""A worker returns or drops batches; its heartbeats list batches in progress."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import JsonValue
from redis import Redis
from redis.exceptions import ConnectionError

from poc_core.records import JobStatus, Lease, RoundState
from poc_core.state import scripts
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from poc_core.state.work import WorkStore
from tests.harness.job_turns import (
    InBackground,
    MakeRunner,
    artifacts,
    chat_comes,
    chat_ends,
    expected,
    read,
)
from tests.harness.samples import (
    complete_batch,
    lease_batch,
    new_job,
    pending,
    round_config,
    worker_record,
)
from tests.harness.waiting import wait_until
from tests.peers.fake_engine import FakeEngine, break_down
from workers.work import Work


@pytest.mark.parametrize("by_round", [True, False], ids=["for a round", "for the worker's end"])
@pytest.mark.parametrize("between_slices", [False, True], ids=["not begun", "between two slices"])
def test_batches_that_wait_for_chat_are_given_back(
    runner: Work,
    jobs: JobStore,
    rounds: RoundStore,
    engine: FakeEngine,
    by_round: bool,
    between_slices: bool,
) -> None:
    if between_slices:
        engine.events[1] = lambda: chat_comes(engine)
    else:
        chat_comes(engine)
    job_id = jobs.create(new_job([0, 1, 2, 3], batch_size=2))
    with InBackground(runner):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        if by_round:
            rounds.store(round_config(), RoundState.GENERATING)
            wait_until(lambda: runner._round is not None)  # noqa: SLF001
            wait_until(lambda: pending(jobs, job_id) == [0, 1])
        runner.leaving.set()
    assert pending(jobs, job_id) == [0, 1]  # free, for whoever asks next
    wait_until(lambda: engine.is_idle)
    assert len(engine.ticks) <= 2  # of 4
    if not between_slices:
        assert read(jobs, job_id).status is JobStatus.QUEUED
        assert engine.begun == []


def test_a_worker_that_is_to_end_finishes_a_batch_that_need_not_wait(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.events[1] = runner.leaving.set
    job_id = jobs.create(new_job([0, 1, 2], batch_size=3))
    runner.run()
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_a_cancelled_job_is_not_waited_with(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    chat_comes(engine)
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(runner):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        jobs.cancel(job_id)
    chat_ends(engine)
    assert engine.begun == []


@pytest.mark.parametrize(
    ("policy", "n_nonces", "cancelled_in"),
    [("yield", 2, 0), (None, 900, 1)],
    ids=["slices", "parts"],
)
def test_a_cancelled_job_frees_the_engine_before_its_last_slice(
    make_runner: MakeRunner,
    jobs: JobStore,
    engine: FakeEngine,
    policy: str | None,
    n_nonces: int,
    cancelled_in: int,
) -> None:
    runner = make_runner(policy)
    given_up = threading.Event()
    job_id = jobs.create(new_job(list(range(n_nonces)), batch_size=n_nonces))
    engine.said_s = 1.0  # so that layers go one by one
    engine.events[cancelled_in] = lambda: jobs.cancel(job_id)
    engine.events[cancelled_in + 1] = lambda: given_up.wait(60)
    runner.run()
    given_up.set()
    wait_until(lambda: engine.is_idle)
    assert len(engine.ticks) <= cancelled_in + 2  # of 4 and more


def test_jobs_that_were_merged_with_a_cancelled_one_are_computed(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.layer_s = 0.03
    cancelled, other = jobs.create(new_job([0, 1])), jobs.create(new_job([2, 3]))
    engine.events[0] = lambda: jobs.cancel(cancelled)
    runner.run()
    assert artifacts(jobs, other) == expected([2, 3])
    assert read(jobs, cancelled).status is JobStatus.CANCELLED


# What the worker's heartbeats tell of leases.


def test_a_batch_is_in_hand_before_it_is_claimed_until_it_is_done(
    runner: Work, jobs: JobStore, store: WorkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, completed = [], []
    together, complete = scripts.together, store.complete

    def in_hand() -> tuple[int, list[int]]:
        n_asked, _, numbers = store.hand.summary().partition(":")
        return int(n_asked), [int(number) for number in numbers.split()]

    def ask(*args: Any) -> Any:
        requests.append(in_hand())
        return together(*args)

    def finish(lease: Lease, values: Sequence[JsonValue]) -> bool:
        completed.append((lease.number, in_hand()[1]))
        return complete(lease, values)

    monkeypatch.setattr(scripts, "together", ask)
    monkeypatch.setattr(store, "complete", finish)
    jobs.create(new_job([0, 1, 2]))
    runner.run()
    assert len(requests) >= len(completed) == 2  # batches of nonces 0 and 1, and of 2
    assert all(n_asked in numbers for n_asked, numbers in requests)
    assert all(number in numbers for number, numbers in completed)
    assert in_hand()[1] == []


def test_a_batch_that_could_not_be_given_back_is_not_in_hand(
    runner: Work,
    jobs: JobStore,
    engine: FakeEngine,
    store: WorkStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*_args: object, **_named: object) -> bool:
        raise ConnectionError("away")

    monkeypatch.setattr(store, "release", away)
    engine.events[0] = break_down
    job_id = jobs.create(new_job([0, 1]))
    runner.run()
    assert pending(jobs, job_id) == []  # as Redis believes
    assert store.hand.summary().endswith(":")


def test_what_redis_forgot_that_it_was_claimed_is_taken_once_all_the_same(
    runner: Work, jobs: JobStore, engine: FakeEngine, redis: Redis, workers: WorkerRegistry
) -> None:
    workers.heartbeat(worker_record("w2"))
    job_id = jobs.create(new_job([0, 1, 2]))

    def forget() -> None:
        redis.delete(f"poc:job:{job_id}:leases")
        redis.hdel(f"poc:job:{job_id}", "next")
        assert isinstance(lease_batch(jobs, job_id, 0, "w2"), Lease)  # whoever asks next

    engine.events[1] = forget
    runner.run()
    assert artifacts(jobs, job_id) == expected([0, 1, 2])
    assert not complete_batch(jobs, job_id, 0, ["x", "x"])
    assert (jobs.total_processed(), jobs.queued_nonces()) == (3, 0)
