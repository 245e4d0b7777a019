"""During chat, batches and validations wait or use their share of the engine."""

import threading
import time

import pytest
from fastapi.testclient import TestClient

from poc_core.records import JobStatus, Lease, RoundState
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.job_turns import (
    InBackground,
    MakeRunner,
    artifacts,
    chat_comes,
    chat_ends,
    expected,
    job_of,
    read,
    validation,
)
from tests.harness.samples import (
    OTHER_SPEC,
    Clock,
    complete_batch,
    free_lost,
    known,
    lease_batch,
    new_job,
    pending,
    round_config,
    worker_record,
)
from tests.harness.waiting import wait_until
from tests.peers.fake_engine import FakeEngine
from workers.chat_gate import Starvation
from workers.work import Work


def test_a_batch_waits_for_chat_and_completes_when_chat_ends(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    chat_comes(engine)
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(runner):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        assert read(jobs, job_id).status is JobStatus.QUEUED  # nobody has it
        assert engine.begun == []
        chat_ends(engine)
    record = read(jobs, job_id)
    assert (record.status, record.waiting_for) == (JobStatus.COMPLETED, None)


def test_a_batch_that_waits_for_chat_is_free_for_a_worker_whose_chat_is_idle(
    runner: Work, jobs: JobStore, engine: FakeEngine, workers: WorkerRegistry
) -> None:
    workers.heartbeat(worker_record("w2"))
    chat_comes(engine)
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(runner):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        assert pending(jobs, job_id) == [0]
        assert lease_batch(jobs, job_id, 0, "w2")
        complete_batch(jobs, job_id, 0, ["v0", "v1"])
        chat_ends(engine)
    assert engine.begun == []


def test_chat_that_comes_between_two_slices_is_waited_for(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.events = dict.fromkeys(range(3), lambda: chat_comes(engine))
    job_id = jobs.create(new_job([0, 1, 2], batch_size=3))
    with InBackground(runner):
        for n_ticks in (1, 2, 3):
            wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
            assert len(engine.ticks) == n_ticks
            chat_ends(engine)
            wait_until(lambda: len(engine.ticks) > n_ticks)  # noqa: B023
            wait_until(lambda: len(engine.ticks) == 4 or read(jobs, job_id).waiting_for == "chat")
    assert artifacts(jobs, job_id) == expected([0, 1, 2])


@pytest.mark.parametrize("chat_from", [None, 0], ids=["not begun", "between two slices"])
def test_the_status_says_that_a_job_waits_and_no_longer_once_it_goes_on(
    runner: Work, jobs: JobStore, engine: FakeEngine, client: TestClient, chat_from: int | None
) -> None:
    def waiting_for() -> object:
        return client.get(f"/api/v1/pow/generate/{job_id}").json().get("waiting_for")

    goes_on = threading.Event()
    engine.events[1] = lambda: goes_on.wait(60)
    if chat_from is None:
        chat_comes(engine)
    else:
        engine.events[chat_from] = lambda: chat_comes(engine)
    job_id = jobs.create(new_job([0, 1, 2, 3], batch_size=4))
    with InBackground(runner):
        wait_until(lambda: waiting_for() == "chat")
        chat_ends(engine)
        wait_until(lambda: waiting_for() is None)
        assert read(jobs, job_id).status is JobStatus.RUNNING  # its batch is not done yet
        goes_on.set()


def test_constant_chat_fails_no_job_and_in_the_end_it_completes(
    make_runner: MakeRunner, jobs: JobStore, engine: FakeEngine
) -> None:
    later_s = 0.0
    patience = Starvation(after_s=20, share=0.9)
    runner = make_runner("yield", patience, lambda: time.monotonic() + later_s)

    def time_passes() -> bool:
        nonlocal later_s
        later_s += 2
        return read(jobs, job_id).status is JobStatus.COMPLETED

    engine.said_s = 0.01
    chat_comes(engine)
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(runner):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        assert engine.ticks == []
        wait_until(time_passes, "the job's end beside chat")
    assert engine.chat == 1


def test_under_share_a_job_completes_beside_constant_chat(
    make_runner: MakeRunner, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.said_s = 0.01
    runner = make_runner("share:0.3")
    chat_comes(engine)
    job_id = jobs.create(new_job(list(range(5)), batch_size=5))
    runner.run()
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_a_validation_has_its_share_of_the_engine_beside_constant_chat_at_once(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    chat_comes(engine)
    job_id = jobs.create(validation([0, 1, 2]))
    runner.run()
    record = read(jobs, job_id)
    assert (record.status, record.waiting_for) == (JobStatus.COMPLETED, None)
    assert engine.chat == 1


def test_a_validation_passes_plain_jobs_that_wait_for_chat_between_two_slices(
    runner: Work, validations: Work, jobs: JobStore, engine: FakeEngine, clock: Clock
) -> None:
    engine.events[0] = lambda: chat_comes(engine)
    plain = jobs.create(new_job([0, 1]))
    clock.now += 1
    behind = jobs.create(job_of(OTHER_SPEC, [2, 3]))
    with InBackground(runner):
        wait_until(lambda: read(jobs, plain).waiting_for == "chat")
        urgent = jobs.create(validation([7]))
        validations.run()
        assert read(jobs, urgent).status is JobStatus.COMPLETED
        # The one whose stage it needs ended first; the one that waited is waiting still.
        assert engine.begun == [[0, 1], [7]]
        chat_ends(engine)
    assert read(jobs, behind).status is JobStatus.COMPLETED


def test_validations_are_computed_alone_beside_chat(
    runner: Work, validations: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    chat_comes(engine)
    plain = jobs.create(new_job([0, 1]))
    ids = [jobs.create(validation(nonces, 1)) for nonces in ([5, 6, 7], [5])]
    validations.run()
    statuses = [read(jobs, job_id).status for job_id in (plain, *ids)]
    assert statuses == [JobStatus.QUEUED, JobStatus.COMPLETED, JobStatus.COMPLETED]
    assert [sorted(nonces) for nonces in engine.begun] == [[5, 5, 6, 7]]


def test_what_a_dead_worker_had_of_a_validation_is_taken_up(
    runner: Work, validations: Work, jobs: JobStore, workers: WorkerRegistry
) -> None:
    workers.heartbeat(worker_record("w2"))
    job_id = jobs.create(validation([0, 1, 2]))
    assert isinstance(lease_batch(jobs, job_id, 0, "w2"), Lease)
    validations.run()
    assert read(jobs, job_id).n_done == 1  # the other worker lives
    workers.remove("w2")
    free_lost(jobs)
    validations.run()
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_validations_wait_for_a_rounds_end(
    runner: Work, validations: Work, jobs: JobStore, rounds: RoundStore, engine: FakeEngine
) -> None:
    job_id = jobs.create(validation([0]))
    round_id = rounds.store(round_config(), RoundState.GENERATING)
    validations.run()
    assert engine.begun == []
    record = known(rounds.read(round_id))
    rounds.switch(record, RoundState.STOPPED)
    validations.run()
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_a_worker_that_is_to_end_takes_no_further_validation(
    runner: Work, validations: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    jobs.create(validation([0]))
    validations.leaving.set()
    validations.run()
    assert engine.begun == []
