"""The life of a job in Redis."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from poc_core.arithmetic.nonces import MAX_NONCE
from poc_core.errors import AnswerTooLargeError, QueueFullError
from poc_core.queues import model_queue
from poc_core.records import JobRecord, JobStatus, Lease, NewJob, Refusal, RoundState
from poc_core.schemes.contract import contract_of
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.overview import Overviews
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from poc_core.state.work import MAX_LOSSES
from tests.harness.samples import (
    MODEL,
    REQUEST,
    SPEC,
    Clock,
    complete_batch,
    free_lost,
    known,
    lease_batch,
    leased,
    new_job,
    pending,
    release_batch,
    result_body,
    round_config,
    work_of,
    worker_record,
)

pytestmark = pytest.mark.usefixtures("a_worker")

Serve = Callable[..., Any]


def compute(jobs: JobStore, job_id: str, index: int, worker: str = "w1") -> bool:
    lease = leased(lease_batch(jobs, job_id, index, worker))
    return complete_batch(jobs, job_id, index, [f"v{nonce}" for nonce in lease.nonces])


def result(jobs: JobStore, job_id: str) -> dict[str, Any]:
    body = known(result_body(jobs, job_id))
    answer: dict[str, Any] = json.loads(body)
    return answer


def read(jobs: JobStore, job_id: str) -> JobRecord:
    return known(jobs.read(job_id))


def status(jobs: JobStore, job_id: str) -> JobStatus:
    return read(jobs, job_id).status


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
    jobs.recount()
    jobs.fail(job_id, "broken")
    assert_all_expire()


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


def test_what_is_completed_after_the_end_is_dropped(jobs: JobStore, redis: Redis) -> None:
    job_id = jobs.create(new_job([1]))
    lease_batch(jobs, job_id, 0, "w1")
    jobs.cancel(job_id)
    assert not complete_batch(jobs, job_id, 0, ["late"])
    assert jobs.total_processed() == 0
    assert not redis.exists(f"poc:job:{job_id}:values")


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


def test_stop_ends_also_beside_a_record_that_cannot_be_read(jobs: JobStore, redis: Redis) -> None:
    broken, whole, expired = (jobs.create(new_job([n])) for n in range(3))
    redis.delete(f"poc:job:{broken}", f"poc:job:{expired}")
    redis.set(f"poc:job:{broken}", "no hash", ex=100)
    assert jobs.cancel_queued() == 1
    assert (status(jobs, whole), jobs.active_jobs(MODEL)) == (JobStatus.CANCELLED, [])


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


# The line.


def lease_next(
    jobs: JobStore, room: int = 0, worker: str = "w1", only_validations: bool = False
) -> list[Lease]:
    """What a worker gets that has room for further nonces beside the next batch."""
    work = work_of(jobs, worker)
    found = work.lease(MODEL, only_validations)
    if isinstance(found, Refusal):
        return []
    return [*found, *(more for lease in found for more in work.lease_more(lease, room))]


def places(leases: list[Lease]) -> list[tuple[str, int]]:
    return [(lease.owner_id, lease.place) for lease in leases]


def validation(nonces: list[int]) -> NewJob:
    return new_job(nonces, claimed=dict.fromkeys(nonces, "AAAA"))


def test_batches_are_leased_in_their_order_with_as_many_more_as_there_is_room_for(
    jobs: JobStore,
) -> None:
    job_id = jobs.create(new_job(list(range(11))))
    assert places(lease_next(jobs)) == [(job_id, 0)]
    found = lease_next(jobs, room=5)
    # 2 nonces each: a fourth batch would be one too many.
    assert places(found) == [(job_id, 1), (job_id, 2), (job_id, 3)]
    assert [lease.nonces for lease in found] == [[2, 3], [4, 5], [6, 7]]
    assert [(lease.model, lease.spec) for lease in found] == [(MODEL, SPEC)] * 3
    assert pending(jobs, job_id) == [4, 5]
    # The last batch is smaller, and fits where a whole one would not.
    assert places(lease_next(jobs, room=1)) == [(job_id, 4), (job_id, 5)]
    assert lease_next(jobs) == []


@pytest.mark.parametrize("room", [0, -3])
def test_a_worker_without_room_gets_nothing_more(jobs: JobStore, room: int) -> None:
    jobs.create(new_job([0, 1, 2, 3]))
    jobs.create(new_job([0, 1, 2, 3]))
    assert len(lease_next(jobs, room)) == 1


def test_what_came_back_is_leased_before_what_was_never_leased(
    jobs: JobStore, serve: Serve, workers: WorkerRegistry
) -> None:
    serve("w2")
    job_id = jobs.create(new_job(list(range(12))))
    for worker in ("w1", "w2", "w1"):
        lease_next(jobs, worker=worker)
    release_batch(jobs, job_id, 2, "w1")
    workers.remove("w2")
    assert places(lease_next(jobs)) == [(job_id, 2)]
    free_lost(jobs)
    assert places(lease_next(jobs, room=2)) == [(job_id, 1)]  # alone: it cost a worker
    assert places(lease_next(jobs, room=100)) == [(job_id, index) for index in (3, 4, 5)]


def test_what_was_done_after_it_had_come_back_is_not_leased_again(jobs: JobStore) -> None:
    job_id = jobs.create(new_job([0, 1, 2, 3]))
    lease_next(jobs)
    release_batch(jobs, job_id, 0, "w1")
    complete_batch(jobs, job_id, 0, ["v0", "v1"])
    assert places(lease_next(jobs, room=100)) == [(job_id, 1)]


def test_a_batch_that_engines_were_lost_on_is_computed_alone(jobs: JobStore, clock: Clock) -> None:
    job_id = jobs.create(new_job([0, 1, 2, 3, 4, 5, 6]))
    lease_next(jobs, room=2)
    release_batch(jobs, job_id, 1, "w1", lost_engine=True)
    clock.now += 1
    other = jobs.create(new_job([7]))
    assert places(lease_next(jobs, room=100)) == [(job_id, 1)]
    release_batch(jobs, job_id, 1, "w1")
    (lease,) = lease_next(jobs, worker="w2")
    assert (lease.place, lease.alone) == (1, True)
    release_batch(jobs, job_id, 1, "w2", lost_engine=True)
    first = known(lease_batch(jobs, other, 0, "w1"))
    assert work_of(jobs).lease_more(first, 100) == []  # nor is it taken along


def test_room_that_a_job_leaves_goes_to_later_jobs_of_the_same_spec(
    jobs: JobStore, clock: Clock
) -> None:
    job_ids = []
    for n in (0, 10, 20):
        job_ids.append(jobs.create(new_job([n, n + 1, n + 2])))
        clock.now += 5
    first, second, third = job_ids
    assert places(lease_next(jobs, room=4)) == [
        *[(first, 0), (first, 1)],
        *[(second, 0), (second, 1)],
    ]
    assert [status(jobs, job_id) for job_id in (first, second)] == [JobStatus.RUNNING] * 2
    assert read(jobs, second).started_at == clock.now
    assert status(jobs, third) is JobStatus.QUEUED


def test_validations_come_first_and_are_not_mixed_with_other_jobs(
    jobs: JobStore, clock: Clock
) -> None:
    plain = jobs.create(new_job([0, 1, 2, 3]))
    clock.now += 1
    urgent = [jobs.create(validation([n])) for n in (5, 6)]
    found = lease_next(jobs, room=100)
    assert set(places(found)) == {(job_id, 0) for job_id in urgent}
    assert all(lease.urgent for lease in found)
    assert lease_next(jobs, only_validations=True) == []
    found = lease_next(jobs, room=100)
    assert (places(found), found[0].urgent) == ([(plain, 0), (plain, 1)], False)


@pytest.mark.parametrize(("n_nonces", "seconds"), [(900, 90), (10_000, 600)])
def test_small_jobs_pass_a_large_one_that_is_not_much_older(
    redis: Redis, clock: Clock, n_nonces: int, seconds: int
) -> None:
    jobs = JobStore(redis, Settings(max_queued_nonces=20_000), clock)
    large = jobs.create(NewJob(MODEL, SPEC, REQUEST, list(range(n_nonces)), n_nonces // 2))
    clock.now += seconds - 10
    early = jobs.create(new_job([1]))
    clock.now += 20
    late = jobs.create(new_job([1]))
    found = [places(lease_next(jobs)) for _ in range(4)]
    assert found == [[(early, 0)], [(large, 0)], [(large, 1)], [(late, 0)]]


def test_a_record_that_cannot_be_read_leaves_the_line_and_hides_no_other(
    jobs: JobStore, redis: Redis, clock: Clock
) -> None:
    ids = []
    for nonce in range(4):
        ids.append(jobs.create(new_job([nonce])))
        clock.now += 1
    redis.delete(*(f"poc:job:{job_id}" for job_id in ids[:2]))
    redis.set(f"poc:job:{ids[0]}", "no hash", ex=100)
    redis.hset(f"poc:job:{ids[2]}", "n_batches", "many")
    assert places(lease_next(jobs)) == [(ids[3], 0)]


def test_a_job_of_an_earlier_release_joins_the_line(
    jobs: JobStore, redis: Redis, serve: Serve
) -> None:
    """As release 59 left it: batches done, leased, given back and waiting; no cursor, no line."""
    serve("w2")
    job_id = jobs.create(new_job(list(range(10))))
    compute(jobs, job_id, 1)
    lease_batch(jobs, job_id, 3, "w2")
    redis.delete(f"poc:jobs:line:{MODEL}", f"poc:job:{job_id}:free")
    redis.hdel(f"poc:job:{job_id}", "next")
    redis.zadd(f"poc:jobs:validations:{MODEL}", {job_id: 1})
    assert lease_next(jobs) == []
    assert [one.broken for one in work_of(jobs).stuck(MODEL)] == [[]]
    assert places(lease_next(jobs, room=100)) == [(job_id, 0), (job_id, 2), (job_id, 4)]
    assert redis.ttl(f"poc:jobs:line:{MODEL}") != -1


def test_a_batch_that_an_earlier_release_gave_back_is_found(jobs: JobStore, redis: Redis) -> None:
    """Its workers know no line; they serve the same jobs while a node is upgraded."""
    job_id = jobs.create(new_job(list(range(4))))
    lease_next(jobs, room=100)
    redis.hdel(f"poc:job:{job_id}:leases", "0")
    assert lease_next(jobs) == []
    list(work_of(jobs).stuck(MODEL))
    assert places(lease_next(jobs, room=100)) == [(job_id, 0)]


def test_jobs_of_another_spec_or_model_or_that_ended_are_left_alone(
    jobs: JobStore, clock: Clock
) -> None:
    other_spec = SPEC.model_copy(update={"block_hash": "other"})
    mine = jobs.create(new_job([0]))
    clock.now += 1
    other = jobs.create(NewJob(MODEL, other_spec, REQUEST, [1], 1, None))
    jobs.create(new_job([2], model="other"))
    jobs.cancel(jobs.create(new_job([3])))
    clock.now += 1
    last = jobs.create(new_job([4]))
    assert places(lease_next(jobs, room=100)) == [(mine, 0), (last, 0)]
    assert places(lease_next(jobs, room=100)) == [(other, 0)]


def test_while_a_round_has_the_workers_nothing_more_is_had(
    jobs: JobStore, rounds: RoundStore
) -> None:
    job_id = jobs.create(new_job([0, 1, 2, 3]))
    lease = leased(lease_batch(jobs, job_id, 0, "w1"))
    rounds.store(round_config(), RoundState.GENERATING)
    assert work_of(jobs).lease_more(lease, 100) == []


def test_batches_beside_keep_the_job_from_expiring(
    jobs: JobStore, redis: Redis, settings: Any
) -> None:
    jobs.create(new_job([0, 1]))
    other = jobs.create(new_job([2, 3]))
    redis.expire(f"poc:job:{other}", 5)
    lease_next(jobs, room=100)
    assert redis.ttl(f"poc:job:{other}") == settings.job_ttl_sec
    assert redis.ttl(f"poc:job:{other}:leases") == settings.job_ttl_sec


def test_work_is_wanted_while_one_of_its_jobs_is_active(jobs: JobStore) -> None:
    queued, cancelled = jobs.create(new_job([0])), jobs.create(new_job([1]))
    jobs.cancel(cancelled)
    assert jobs.note_waiting([cancelled, queued], "")
    assert not jobs.note_waiting([cancelled, "0" * 32], "")
    lease_batch(jobs, queued, 0, "w1")
    assert jobs.note_waiting([queued], "")


def test_a_lease_that_its_workers_heartbeat_has_not_in_hand_is_free_and_counts_no_loss(
    jobs: JobStore, workers: WorkerRegistry, redis: Redis
) -> None:
    work = work_of(jobs, "w1")
    workers.heartbeat(worker_record("w1"), work.hand.summary())
    job_id = jobs.create(new_job(list(range(24))))
    leases = [lease_batch(jobs, job_id, index, "w1", work) for index in range(12)]
    assert free_lost(jobs) == 0  # its heartbeat was before all of them
    for lease in (leases[0], leases[2], leases[10]):
        assert lease is not None
        work.hand.drop(lease.number)
    workers.heartbeat(worker_record("w1"), work.hand.summary())
    assert free_lost(jobs) == 3
    assert pending(jobs, job_id) == [0, 2, 10]
    assert isinstance(lease_batch(jobs, job_id, 0, "w1", work), Lease)  # after its heartbeat
    assert free_lost(jobs) == 0
    assert pending(jobs, job_id) == [2, 10]
    assert not redis.exists(f"poc:job:{job_id}:attempts")


def test_a_batch_that_kills_its_workers_fails_its_job(
    jobs: JobStore, serve: Serve, workers: WorkerRegistry
) -> None:
    job_id = jobs.create(new_job([1]))
    for worker_id in ("a", "b", "c"):
        serve(worker_id)
        lease_batch(jobs, job_id, 0, worker_id)
        workers.remove(worker_id)
        free_lost(jobs)
    assert status(jobs, job_id) is JobStatus.FAILED


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
