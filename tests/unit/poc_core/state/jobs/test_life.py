"""The life of a job in Redis, from its request to its result."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from poc_core.fields import MAX_NONCE
from poc_core.records import JobStatus, Lease, RoundState
from poc_core.state.jobs import JobStore
from poc_core.state.rounds import RoundStore
from poc_core.state.work import MAX_LOSSES
from tests.harness.samples import (
    MODEL,
    SPEC,
    Clock,
    complete_batch,
    known,
    lease_batch,
    leased,
    new_job,
    pending,
    release_batch,
    result_body,
    round_config,
    work_of,
)
from tests.harness.stored_jobs import Serve, compute, lease_next, read, status

pytestmark = pytest.mark.usefixtures("a_worker")


def result(jobs: JobStore, job_id: str) -> dict[str, Any]:
    body = known(result_body(jobs, job_id))
    answer: dict[str, Any] = json.loads(body)
    return answer


def vectors(jobs: JobStore, job_id: str) -> list[str]:
    assert jobs.finish(job_id)
    return [artifact["vector_b64"] for artifact in result(jobs, job_id)["artifacts"]]


def test_a_new_job_is_queued_and_knows_its_request(jobs: JobStore, clock: Clock) -> None:
    record = read(jobs, jobs.create(new_job([5, 6, 7])))
    assert (record.status, record.model, record.spec) == (JobStatus.QUEUED, MODEL, SPEC)
    assert (record.n_total, record.n_done, record.n_batches) == (3, 0, 2)
    assert (record.created_at, record.started_at) == (clock.now, None)


def test_an_unknown_job_reads_as_none(jobs: JobStore) -> None:
    assert jobs.read("0" * 32) is None
    assert result_body(jobs, "0" * 32) is None


def test_batches_hold_the_nonces_in_order_and_exactly(jobs: JobStore) -> None:
    nonces = [MAX_NONCE, 0, MAX_NONCE - 1, 2**53 + 1, 9]
    job_id = jobs.create(new_job(nonces, batch_size=2))
    found = [lease_batch(jobs, job_id, index, "w1") for index in range(3)]
    assert [nonce for lease in found if lease for nonce in lease.nonces] == nonces


@pytest.mark.parametrize(("most", "listed"), [(1, (5, 1, 0)), (3, (5, 4, 3, 1, 0))])
def test_the_newest_come_first_then_the_oldest(
    jobs: JobStore, clock: Clock, most: int, listed: tuple[int, ...]
) -> None:
    made = []
    for nonce in range(6):
        made.append(jobs.create(new_job([nonce])))
        clock.now += 1
    assert jobs.newest(most, 2) == [made[at] for at in listed]


def test_the_first_claim_sets_the_job_running(jobs: JobStore, clock: Clock) -> None:
    job_id = jobs.create(new_job([1, 2, 3]))
    clock.now += 5
    lease_batch(jobs, job_id, 0, "w1")
    clock.now += 5
    lease_batch(jobs, job_id, 1, "w1")
    record = read(jobs, job_id)
    assert (record.status, record.started_at) == (JobStatus.RUNNING, clock.now - 5)


def test_what_is_done_or_ended_is_not_leased(jobs: JobStore) -> None:
    job_id = jobs.create(new_job([1, 2, 3]))
    compute(jobs, job_id, 0)
    jobs.cancel(job_id)
    assert lease_next(jobs) == []
    assert jobs.next_in_line(MODEL) is None


def test_while_a_round_generates_its_models_batches_wait(
    jobs: JobStore, rounds: RoundStore
) -> None:
    job_id, other = jobs.create(new_job([1])), jobs.create(new_job([1], model="other"))
    record = known(rounds.read(rounds.store(round_config(), RoundState.GENERATING)))
    assert lease_batch(jobs, job_id, 0, "w1") is None
    assert not jobs.note_waiting([job_id], "chat")
    assert isinstance(lease_batch(jobs, other, 0, "w2"), Lease)
    rounds.switch(record, RoundState.VALIDATING)
    assert isinstance(lease_batch(jobs, job_id, 0, "w1"), Lease)


def test_the_result_lists_artifacts_in_the_order_of_the_request(jobs: JobStore) -> None:
    job_id = jobs.create(new_job([MAX_NONCE, 3, 1]))
    assert [compute(jobs, job_id, index) for index in (1, 0)] == [False, True]  # the last asks
    assert jobs.finish(job_id)
    assert result(jobs, job_id) == {
        "status": "completed",
        "request_id": job_id,
        "artifacts": [{"nonce": n, "vector_b64": f"v{n}"} for n in (MAX_NONCE, 3, 1)],
        "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
    }


def test_the_result_of_a_large_job_is_read_in_pieces(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poc_core.state.jobs.PIECE_BYTES", 300)
    nonces = list(range(100, 83, -1))
    job_id = jobs.create(new_job(nonces, batch_size=2))
    for index in range(9):
        compute(jobs, job_id, index)
    assert vectors(jobs, job_id) == [f"v{n}" for n in nonces]


def test_values_may_hold_commas_and_line_ends(jobs: JobStore) -> None:
    job_id = jobs.create(new_job([1, 2]))
    lease_batch(jobs, job_id, 0, "w1")
    complete_batch(jobs, job_id, 0, ["a,b", "c\nd"])
    assert vectors(jobs, job_id) == ["a,b", "c\nd"]


def test_completing_a_batch_twice_changes_nothing_and_the_last_still_asks_for_the_finish(
    jobs: JobStore,
) -> None:
    job_id = jobs.create(new_job([1, 2, 3]))
    compute(jobs, job_id, 0)
    assert not complete_batch(jobs, job_id, 0, ["other", "values"])
    counted = (read(jobs, job_id).n_done, jobs.queued_nonces(), jobs.total_processed())
    assert counted == (2, 1, 2)
    compute(jobs, job_id, 1)
    assert complete_batch(jobs, job_id, 1, ["other"])
    assert vectors(jobs, job_id) == ["v1", "v2", "v3"]


def test_values_that_do_not_match_the_batch_are_refused(jobs: JobStore) -> None:
    job_id = jobs.create(new_job([1, 2]))
    lease_batch(jobs, job_id, 0, "w1")
    for values in (["one"], ["one", "two", "three"]):
        with pytest.raises(Exception, match="another number of nonces"):
            complete_batch(jobs, job_id, 0, list(values))
    assert pending(jobs, job_id) == []


def test_a_job_is_finished_exactly_once(jobs: JobStore) -> None:
    job_id = jobs.create(new_job([1, 2, 3]))
    assert not jobs.finish(job_id)
    compute(jobs, job_id, 0)
    assert not jobs.finish(job_id)
    compute(jobs, job_id, 1)
    assert [jobs.finish(job_id), jobs.finish(job_id)] == [True, False]
    assert status(jobs, job_id) is JobStatus.COMPLETED


def test_a_job_that_was_cancelled_during_its_finish_stays_cancelled(
    jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = jobs.create(new_job([1]))
    compute(jobs, job_id, 0)

    def answer_texts(*_: Any) -> Iterator[bytes]:
        jobs.cancel(job_id)
        yield b'{"status": "completed", "request_id": "x"}'

    monkeypatch.setattr("poc_core.state.jobs.answer_texts", answer_texts)
    assert not jobs.finish(job_id)
    assert status(jobs, job_id) is JobStatus.CANCELLED


def test_excluded_nonces_are_left_out_and_listed(jobs: JobStore) -> None:
    job_id = jobs.create(new_job([1, 2]))
    lease_batch(jobs, job_id, 0, "w1")
    complete_batch(jobs, job_id, 0, [None, "v2"])
    jobs.finish(job_id)
    answer = result(jobs, job_id)
    assert answer["excluded_nonces"] == [1]
    assert answer["artifacts"] == [{"nonce": 2, "vector_b64": "v2"}]


def test_a_finished_job_leaves_only_its_hash_for_the_result_ttl(
    jobs: JobStore, redis: Redis, settings: Any
) -> None:
    job_id = jobs.create(new_job([1], claimed=None))
    compute(jobs, job_id, 0)
    jobs.finish(job_id)
    assert list(redis.scan_iter("poc:job:*")) == [f"poc:job:{job_id}".encode()]
    assert 0 < int(redis.ttl(f"poc:job:{job_id}")) <= settings.generate_result_ttl_sec
    assert jobs.active_jobs(MODEL) == []


def test_every_key_has_a_ttl_at_every_step(jobs: JobStore, redis: Redis) -> None:
    def assert_all_expire() -> None:
        assert [key for key in redis.scan_iter("*") if int(redis.ttl(key)) < 0] == []

    job_id = jobs.create(new_job([1, 2, 3], claimed={1: "a", 2: "b", 3: "c"}))
    assert_all_expire()
    lease_batch(jobs, job_id, 0, "w1")
    assert_all_expire()
    release_batch(jobs, job_id, 0, "w1", lost_engine=True)
    assert_all_expire()
    compute(jobs, job_id, 1)
    assert_all_expire()
    last = leased(lease_batch(jobs, job_id, 0, "w1"))
    assert lease_next(jobs) == []  # the line is empty
    work_of(jobs).release(last)
    assert_all_expire()
    jobs.recount()
    jobs.fail(job_id, "broken")
    assert_all_expire()


def test_what_is_completed_after_the_end_is_dropped(jobs: JobStore, redis: Redis) -> None:
    job_id = jobs.create(new_job([1]))
    lease_batch(jobs, job_id, 0, "w1")
    jobs.cancel(job_id)
    assert not complete_batch(jobs, job_id, 0, ["late"])
    assert jobs.total_processed() == 0
    assert not redis.exists(f"poc:job:{job_id}:values")


def test_a_failed_job_says_why(jobs: JobStore) -> None:
    job_id = jobs.create(new_job([1]))
    assert jobs.fail(job_id, "the engine said no")
    record = read(jobs, job_id)
    assert (record.status, record.error) == (JobStatus.FAILED, "the engine said no")


def test_a_released_batch_waits_again_and_only_its_holder_can_release_it(
    jobs: JobStore, serve: Serve
) -> None:
    serve("w2")
    job_id = jobs.create(new_job([1, 2, 3]))
    lease_batch(jobs, job_id, 0, "w1")
    assert not release_batch(jobs, job_id, 0, "w2")
    assert pending(jobs, job_id) == [1]
    assert release_batch(jobs, job_id, 0, "w1")
    assert pending(jobs, job_id) == [0, 1]
    assert isinstance(lease_batch(jobs, job_id, 0, "w2"), Lease)


def test_a_batch_that_loses_three_engines_fails_its_job(jobs: JobStore) -> None:
    job_id = jobs.create(new_job([1, 2, 3]))
    for worker in ("w1", "w11"):
        for _ in range(MAX_LOSSES):  # a worker counts once, however often it tries
            lease_batch(jobs, job_id, 1, worker)
            assert release_batch(jobs, job_id, 1, worker, lost_engine=True)
    lease_batch(jobs, job_id, 1, "1")
    assert not release_batch(jobs, job_id, 1, "1", lost_engine=True)
    record = read(jobs, job_id)
    assert record.status is JobStatus.FAILED
    assert "Batch 1 was given up after 3 workers" in str(record.error)
    assert jobs.queued_nonces() == 0


def test_releasing_without_a_lost_engine_never_fails_a_job(jobs: JobStore) -> None:
    job_id = jobs.create(new_job([1]))
    for _ in range(2 * MAX_LOSSES):
        lease_batch(jobs, job_id, 0, "w1")
        assert release_batch(jobs, job_id, 0, "w1")
