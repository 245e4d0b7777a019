"""Engines and workers that fail with a batch."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from pydantic import JsonValue
from redis import Redis
from redis.exceptions import ConnectionError

from poc_core.records import JobStatus, Lease
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.work import WorkStore
from tests.harness.job_turns import artifacts, expected, job_of, read, validation
from tests.harness.samples import OTHER_SPEC, SPEC, new_job, pending, work_of, worker_record
from tests.peers.fake_engine import FakeEngine, break_down
from workers.engines.base import EngineLostError, Tick, TickResult
from workers.proofs import ENGINE_LOST_STATUS, Proofs
from workers.work import Work


def lose() -> None:
    raise EngineLostError("The engine does not answer.")


@pytest.mark.usefixtures("exits")
def test_a_lost_engine_gives_all_claims_back(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.events[2] = lose
    first, second = jobs.create(new_job([0, 1, 2])), jobs.create(new_job([3]))
    with pytest.raises(SystemExit) as ended:
        runner.run()
    assert ended.value.code == ENGINE_LOST_STATUS
    assert [pending(jobs, job_id) for job_id in (first, second)] == [[0, 1], [0]]
    assert [read(jobs, job_id).status for job_id in (first, second)] == [JobStatus.RUNNING] * 2


@pytest.mark.usefixtures("exits")
def test_a_worker_whose_engine_is_lost_leases_nothing_more(
    runner: Work,
    validations: Work,
    jobs: JobStore,
    store: WorkStore,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the first failure and the process's end, on whichever thread."""
    release = store.release

    def meanwhile(*args: Any, **named: Any) -> bool:
        waits = release(*args, **named)
        urgent.append(jobs.create(validation([5])))
        validations.run()
        return waits

    monkeypatch.setattr(store, "release", meanwhile)
    job_id = jobs.create(new_job([0, 1]))
    urgent: list[str] = []
    engine.events[0] = lose
    with pytest.raises(SystemExit):
        runner.run()
    assert engine.begun == [[0, 1]]
    statuses = [read(jobs, one).status for one in (job_id, *urgent)]
    assert statuses == [JobStatus.RUNNING, JobStatus.QUEUED]


def test_an_engine_that_died_while_it_was_idle_is_given_nothing(
    runner: Work, jobs: JobStore, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "check", lose)
    job_id = jobs.create(new_job([0]))
    runner.run()
    assert engine.begun == []
    assert pending(jobs, job_id) == [0]


def test_a_spec_that_no_engine_can_follow_fails_every_job_that_has_it(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.refuse["block"] = "k_dim must be at most 128."
    job_ids = [jobs.create(new_job([0, 1, 2])), jobs.create(new_job([3]))]
    runner.run()
    for job_id in job_ids:
        record = read(jobs, job_id)
        assert (record.status, record.error) == (JobStatus.FAILED, "k_dim must be at most 128.")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"scheme": "later"}, "There is no proof scheme 'later'"),
        ({"scheme": "decode", "options": {"max_tokens": 1, "later": 1}}, "no option later"),
    ],
)
def test_a_spec_of_a_later_release_fails_its_job_and_delays_no_other(
    runner: Work, jobs: JobStore, redis: Redis, changed: dict[str, Any], why: str
) -> None:
    """An API process may be of a later release than its workers."""
    later, other = jobs.create(new_job([0])), jobs.create(new_job([1]))
    redis.hset(f"poc:job:{later}", "spec", SPEC.model_copy(update=changed).model_dump_json())
    for _turn in range(2):
        runner.run()
    assert why in str(read(jobs, later).error)
    assert artifacts(jobs, other) == expected([1])


def mistake() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", [break_down, mistake])
def test_an_engine_or_a_worker_that_fails_once_costs_nothing_but_time(
    runner: Work, jobs: JobStore, engine: FakeEngine, fails: Callable[[], None]
) -> None:
    engine.events[1] = fails
    job_id = jobs.create(new_job([0, 1, 2, 3]))
    runner.run()
    assert artifacts(jobs, job_id) == expected(range(4))
    assert engine.begun == [[0, 1, 2, 3], [0, 1], [2, 3]]  # what was lost once is computed alone


@pytest.mark.usefixtures("exits")
def test_an_engine_that_fails_again_and_again_is_replaced(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.events = dict.fromkeys(range(9), break_down)
    first, second = jobs.create(new_job([0])), jobs.create(job_of(OTHER_SPEC, [1]))
    with pytest.raises(SystemExit) as ended:
        runner.run()
    assert ended.value.code == ENGINE_LOST_STATUS
    assert [read(jobs, job_id).status for job_id in (first, second)] == [JobStatus.RUNNING] * 2


class Deadly(FakeEngine):
    """A batch of OTHER_SPEC loses it."""

    def tick(self, tick: Tick) -> TickResult:
        if any(one.spec == OTHER_SPEC for one in tick.begin):
            raise EngineLostError("The engine does not answer.")
        return super().tick(tick)


@pytest.mark.usefixtures("exits")
def test_a_batch_that_kills_its_workers_fails_no_other_job(
    jobs: JobStore, workers: WorkerRegistry
) -> None:
    deadly = jobs.create(job_of(OTHER_SPEC, [9]))
    others = [jobs.create(new_job([n])) for n in range(2)]
    for name in ("w1", "w2", "w3", "w4"):
        workers.heartbeat(worker_record(name))
        proofs = Proofs(Deadly())
        with suppress(SystemExit):
            Work(proofs, work_of(jobs, name)).run()
        proofs.stop()
    assert read(jobs, deadly).status == JobStatus.FAILED
    assert {read(jobs, job_id).status for job_id in others} == {JobStatus.COMPLETED}


def test_a_batch_that_cannot_be_stored_fails_its_job_and_no_other(
    runner: Work, jobs: JobStore, store: WorkStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (jobs.create(new_job([n])) for n in range(3))
    complete = store.complete

    def spoilt(lease: Lease, values: Sequence[JsonValue]) -> bool:
        if lease.owner_id == first:
            redis.delete(f"poc:job:{first}:nonces")
        return complete(lease, values)

    monkeypatch.setattr(store, "complete", spoilt)
    runner.run()
    statuses = [read(jobs, job_id).status for job_id in (first, second, third)]
    assert statuses == [JobStatus.FAILED, JobStatus.COMPLETED, JobStatus.COMPLETED]
    assert "A batch cannot be stored" in str(read(jobs, first).error)


def test_a_finish_without_redis_costs_no_other_batch(
    runner: Work, jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = jobs.create(new_job([0])), jobs.create(new_job([1]))
    finish = jobs.finish

    def away_once(job_id: str) -> bool:
        if job_id == first:
            raise ConnectionError("away")
        return finish(job_id)

    monkeypatch.setattr(jobs, "finish", away_once)
    runner.run()
    statuses = [read(jobs, job_id).status for job_id in (first, second)]
    assert statuses == [JobStatus.RUNNING, JobStatus.COMPLETED]
