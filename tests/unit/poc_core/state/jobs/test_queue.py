"""The queue has limits and counts; a stop removes jobs from the queue."""

from dataclasses import replace
from typing import Any

import pytest
from redis import Redis
from redis.client import Pipeline

from poc_core.errors import AnswerTooLargeError, QueueFullError
from poc_core.queues import model_queue
from poc_core.records import JobStatus, NewJob
from poc_core.schemes.contract import contract_of
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.overview import Overviews
from tests.harness.samples import MODEL, REQUEST, SPEC, Clock, new_job
from tests.harness.stored_jobs import compute, status

pytestmark = pytest.mark.usefixtures("a_worker")


def test_an_upload_that_breaks_off_expires(
    jobs: JobStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks_off(pipe: Pipeline) -> None:
        del pipe.command_stack[3:]
        execute(pipe)
        raise ConnectionError

    monkeypatch.setattr("poc_core.state.jobs._UPLOAD_CHUNK", 2)
    before = set(redis.scan_iter("*"))
    with monkeypatch.context() as patch:
        execute = Pipeline.execute
        patch.setattr(Pipeline, "execute", breaks_off)
        with pytest.raises(ConnectionError):
            jobs.create(new_job(list(range(12))))
    (uploaded,) = set(redis.scan_iter("*")) - before
    assert redis.ttl(uploaded) > 0


@pytest.mark.parametrize("is_a_race", [False, True])
def test_a_job_that_does_not_fit_into_the_queue_leaves_nothing(
    jobs: JobStore, redis: Redis, monkeypatch: pytest.MonkeyPatch, is_a_race: bool
) -> None:
    jobs.create(new_job(list(range(900))))
    before = set(redis.scan_iter("*"))
    with monkeypatch.context() as patch:
        if is_a_race:  # the other request came after this one had looked
            patch.setattr(jobs, "queued_nonces", lambda: 0)
        with pytest.raises(QueueFullError, match=r"900 nonces wait already.*at most 100 now"):
            jobs.create(new_job(list(range(101))))
    assert set(redis.scan_iter("*")) == before
    jobs.create(new_job(list(range(100))))
    assert jobs.queued_nonces() == 1000


def test_more_nonces_than_may_ever_wait_must_be_split(jobs: JobStore) -> None:
    with pytest.raises(QueueFullError, match="split the request"):
        jobs.create(new_job(list(range(1001))))


def test_a_count_of_waiting_nonces_below_zero_makes_no_room(jobs: JobStore, redis: Redis) -> None:
    redis.set("poc:queued_nonces", -5)  # as a Redis that forgot what was added
    jobs.create(new_job([1, 2]))
    assert jobs.queued_nonces() == 2


def test_more_jobs_than_may_wait_are_refused_and_leave_nothing(
    redis: Redis, clock: Clock, settings: Settings
) -> None:
    jobs = JobStore(redis, settings.model_copy(update={"max_queued_nonces": 10}), clock)
    first, _ = jobs.create(new_job([1])), jobs.create(new_job([2], model="other"))
    before = set(redis.scan_iter("*"))
    with pytest.raises(QueueFullError, match=r"2 jobs have not ended.*POC_MAX_QUEUED_NONCES"):
        jobs.create(new_job([3]))
    assert set(redis.scan_iter("*")) == before
    jobs.cancel(first)
    jobs.create(new_job([3]))


def test_an_answer_that_would_be_too_large_is_refused_before_anything_is_stored(
    redis: Redis, clock: Clock, settings: Settings
) -> None:
    roomy = settings.model_copy(update={"max_queued_nonces": 100_000})
    jobs = JobStore(redis, roomy, clock)
    spec = SPEC.model_copy(update={"options": {"k_dim": 4096, "stronger_rng": False}})
    each = contract_of(spec.scheme).bytes_per_artifact(spec)
    most = settings.max_result_bytes // each
    assert 12_000 < most < 12_500
    with pytest.raises(AnswerTooLargeError, match=rf"POC_MAX_RESULT_BYTES.*at most {most} nonces"):
        jobs.create(NewJob(MODEL, spec, REQUEST, list(range(50_000)), 32))
    assert list(redis.scan_iter("poc:*job*")) == []
    exact = roomy.model_copy(update={"max_result_bytes": most * each})
    JobStore(redis, exact, clock).create(NewJob(MODEL, spec, REQUEST, list(range(most)), 32))


def test_computing_and_cancelling_make_room_in_the_queue(jobs: JobStore) -> None:
    jobs.create(new_job([10]))
    job_id = jobs.create(new_job([1, 2, 3]))
    compute(jobs, job_id, 0)
    assert jobs.queued_nonces() == 2
    assert jobs.cancel(job_id)
    assert (status(jobs, job_id), jobs.queued_nonces()) == (JobStatus.CANCELLED, 1)
    assert not jobs.cancel(job_id)


def test_stop_cancels_queued_jobs_of_all_models_but_none_that_is_under_way_waited_for_or_completed(
    jobs: JobStore,
) -> None:
    completed, running, queued = (jobs.create(new_job([n, n + 1, n + 2])) for n in (0, 10, 20))
    other = jobs.create(new_job([1], model="other"))
    waited_for = jobs.create(replace(new_job([30]), inline=True))
    for index in (0, 1):
        compute(jobs, completed, index)
    jobs.finish(completed)
    compute(jobs, running, 0)
    assert jobs.cancel_queued() == 2
    assert status(jobs, completed) is JobStatus.COMPLETED
    assert {status(jobs, job_id) for job_id in (queued, other)} == {JobStatus.CANCELLED}
    assert status(jobs, running) is JobStatus.RUNNING
    assert status(jobs, waited_for) is JobStatus.QUEUED
    assert jobs.queued_nonces() == 2


def test_stop_leaves_no_messages_of_stopped_jobs(
    jobs: JobStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poc_core.state.jobs._CHUNK", 10)
    for nonce in range(35):
        redis.rpush(model_queue(MODEL), jobs.create(new_job([nonce])))
    redis.rpush(model_queue("other"), "of nobody's job")
    assert jobs.cancel_queued() == 35
    assert (redis.llen(model_queue(MODEL)), redis.llen(model_queue("other"))) == (0, 1)
    assert (jobs.active_jobs(MODEL), jobs.queued_nonces()) == ([], 0)


def test_stop_finds_all_that_are_queued_among_those_that_stay(
    jobs: JobStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poc_core.state.jobs._CHUNK", 4)
    all_of_them = [jobs.create(replace(new_job([n]), inline=n % 3 == 0)) for n in range(24)]
    waited_for = all_of_them[::3]
    redis.rpush(model_queue(MODEL), *waited_for)
    assert jobs.cancel_queued() == 16
    assert set(jobs.active_jobs(MODEL)) == set(waited_for)
    assert (jobs.cancel_queued(), redis.llen(model_queue(MODEL))) == (0, 0)
    redis.rpush(model_queue(MODEL), *waited_for)
    assert (jobs.cancel_queued(), redis.llen(model_queue(MODEL))) == (0, 8)


def test_stop_misses_no_queued_job_where_others_end_meanwhile(
    jobs: JobStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poc_core.state.jobs._CHUNK", 4)
    cancel: Any = jobs._cancel  # noqa: SLF001

    def then_ends(*args: Any) -> Any:
        found = cancel(*args)
        if status(jobs, running) is JobStatus.RUNNING:
            compute(jobs, running, 1)
            jobs.finish(running)
        return found

    running = jobs.create(new_job([0, 1, 2]))
    for nonce in range(8):
        clock.now += 1
        jobs.create(new_job([nonce]))
    compute(jobs, running, 0)
    monkeypatch.setattr(jobs, "_cancel", then_ends)
    assert jobs.cancel_queued() == 8
    assert (status(jobs, running), jobs.active_jobs(MODEL)) == (JobStatus.COMPLETED, [])


def test_stop_ends_also_beside_a_record_that_cannot_be_read(jobs: JobStore, redis: Redis) -> None:
    broken, whole, expired = (jobs.create(new_job([n])) for n in range(3))
    redis.delete(f"poc:job:{broken}", f"poc:job:{expired}")
    redis.set(f"poc:job:{broken}", "no hash", ex=100)
    assert jobs.cancel_queued() == 1
    assert (status(jobs, whole), jobs.active_jobs(MODEL)) == (JobStatus.CANCELLED, [])


def test_recounting_forgets_expired_jobs(jobs: JobStore, redis: Redis) -> None:
    expired, alive = jobs.create(new_job([1, 2, 3])), jobs.create(new_job([4, 5]))
    redis.delete(f"poc:job:{expired}")
    assert jobs.queued_nonces() == 5
    assert jobs.recount() == 2
    assert jobs.queued_nonces() == 2
    assert jobs.active_jobs(MODEL) == [alive]


def test_recounting_passes_over_a_record_that_cannot_be_read(jobs: JobStore, redis: Redis) -> None:
    broken, empty, alive = (jobs.create(new_job([n, n + 1])) for n in (0, 10, 20))
    redis.delete(f"poc:job:{broken}")
    redis.set(f"poc:job:{broken}", "no hash", ex=100)
    redis.hdel(f"poc:job:{empty}", "n_total")
    assert jobs.recount() == 2
    assert alive in jobs.active_jobs(MODEL)


def test_the_rate_is_that_of_the_last_ten_seconds(
    jobs: JobStore, clock: Clock, redis: Redis
) -> None:
    job_id = jobs.create(new_job(list(range(100)), batch_size=20))
    compute(jobs, job_id, 0)
    clock.now += 9
    compute(jobs, job_id, 1)
    clock.now += 1
    assert (Overviews(redis, clock).read().nonces_per_second, jobs.total_processed()) == (4.0, 40)
    clock.now += 1
    assert Overviews(redis, clock).read().nonces_per_second == 2.0
    clock.now += 9
    assert (Overviews(redis, clock).read().nonces_per_second, jobs.total_processed()) == (0.0, 40)
