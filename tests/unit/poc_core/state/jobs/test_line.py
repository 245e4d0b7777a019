"""Batches are leased in order: validations first, then old jobs; small jobs pass large ones."""

from typing import Any

import pytest
from redis import Redis

from poc_core.records import JobStatus, Lease, NewJob, RoundState
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
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
    round_config,
    work_of,
    worker_record,
)
from tests.harness.stored_jobs import Serve, compute, lease_next, read, status

pytestmark = pytest.mark.usefixtures("a_worker")


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
