"""A worker's leases as its heartbeats list them; looking over many jobs, some at a time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from poc_core.settings import Settings
from poc_core.state import scripts
from poc_core.state.jobs import ActiveJobs, JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.work import HeldLeases, StuckJobs, WorkStore
from tests.harness.samples import (
    MODEL,
    Clock,
    complete_batch,
    lease_batch,
    new_job,
    pending,
    work_of,
    worker_record,
)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]) -> None:
    monkeypatch.setattr("poc_core.state.work._CHUNK", 3)
    monkeypatch.setattr("poc_core.state.jobs._CHUNK", 3)
    serve("w1")
    serve("w2")


LINE = f"poc:jobs:line:{MODEL}"


def waiting(redis: Redis) -> list[str]:
    return [job_id.decode() for job_id in cast(list[bytes], redis.zrange(LINE, 0, -1))]


def found(jobs: JobStore) -> StuckJobs:
    """All slices as one."""
    slices = list(work_of(jobs).stuck(MODEL))
    n_dropped, n_freed = (sum(getattr(one, n) for one in slices) for n in ("n_dropped", "n_freed"))
    unfinished, broken = (
        [job_id for one in slices for job_id in getattr(one, name)]
        for name in ("unfinished", "broken")
    )
    return StuckJobs(n_dropped, n_freed, unfinished, broken)


def test_questions_are_numbered_and_what_is_in_progress_is_told() -> None:
    hand = HeldLeases()
    assert hand.summary() == "0:"
    assert [hand.ask() for _ in range(3)] == [1, 2, 3]
    assert hand.summary() == "3:1 2 3"
    hand.add(2, 2)
    for number in (1, 2, 2):
        hand.drop(number)
    assert hand.summary() == "3:2 3"  # a lease of two
    hand.drop(2)
    hand.drop(3)
    assert hand.summary() == "3:"


def test_no_two_threads_get_the_same_number() -> None:
    hand = HeldLeases()
    with ThreadPoolExecutor(4) as threads:
        numbers = list(threads.map(lambda _: hand.ask(), range(400)))
    assert sorted(numbers) == list(range(1, 401))


def test_an_answer_that_was_lost_leaves_a_lease_that_no_heartbeat_lists(
    jobs: JobStore, workers: WorkerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = jobs.create(new_job([0]))
    work = work_of(jobs)
    together = scripts.together

    def lost(*given: Any) -> list[Any]:
        together(*given)
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(scripts, "together", lost)
        with pytest.raises(ConnectionError):
            work.lease(MODEL)
    assert pending(jobs, job_id) == []
    workers.heartbeat(worker_record("w1"), work.hand.summary())
    assert found(jobs).n_freed == 1
    assert pending(jobs, job_id) == [0]


def test_each_kind_of_trouble_is_found(
    jobs: JobStore, workers: WorkerRegistry, redis: Redis, clock: Clock
) -> None:
    names = ["queued", "held", "orphaned", "done", "expired", "broken", "bad lease", "late"]
    ids = {}
    for name in names:
        ids[name] = jobs.create(new_job([0, 1, 2]))
        clock.now += 1
    for index in (0, 1):
        lease_batch(jobs, ids["held"], index, "w1")
        lease_batch(jobs, ids["done"], index, "w1")
        complete_batch(jobs, ids["done"], index, ["v"] * (2 - index))
    lease_batch(jobs, ids["orphaned"], 0, "w2")
    workers.remove("w2")
    redis.delete(f"poc:job:{ids['expired']}")
    redis.delete(f"poc:job:{ids['broken']}")
    redis.set(f"poc:job:{ids['broken']}", "no hash", ex=100)
    redis.hset(f"poc:job:{ids['bad lease']}:leases", "0", "nobody's")
    seen = found(jobs)
    assert seen == StuckJobs(1, 2, [ids["done"]], [ids["broken"]])
    assert [pending(jobs, ids[name]) for name in ("orphaned", "bad lease")] == [[0, 1]] * 2


@pytest.mark.parametrize("n", [0, 2, 3, 4, 9])
def test_every_job_joins_the_line(jobs: JobStore, redis: Redis, clock: Clock, n: int) -> None:
    ids = []
    for nonce in range(n):
        ids.append(jobs.create(new_job([nonce])))
        clock.now += 1
    jobs.create(new_job([5], model="other"))
    redis.delete(LINE)
    assert (waiting(redis), found(jobs)) == ([], StuckJobs(0, 0, [], []))
    assert waiting(redis) == ids


def test_jobs_that_are_dropped_hide_no_others(jobs: JobStore, redis: Redis, clock: Clock) -> None:
    ids = []
    for nonce in range(20):
        ids.append(jobs.create(new_job([nonce])))
        clock.now += 1
    redis.delete(LINE, *(f"poc:job:{job_id}" for job_id in ids[:5] + ids[9:14]))
    seen = found(jobs)
    assert (seen.n_dropped, waiting(redis)) == (10, ids[5:9] + ids[14:])
    assert jobs.active_jobs(MODEL) == ids[5:9] + ids[14:]


def test_active_jobs_are_counted_by_what_they_do(jobs: JobStore) -> None:
    ids = [jobs.create(new_job([nonce])) for nonce in range(7)]
    other = jobs.create(new_job([9], model="other"))
    for job_id in [*ids[:2], other]:
        lease_batch(jobs, job_id, 0, "w1")
    jobs.note_waiting([ids[0]], "chat")
    jobs.note_waiting([ids[6]], "chat")
    jobs.cancel(ids[5])
    assert jobs.count_active() == ActiveJobs(queued=4, running=3, waiting_for_chat=2)


def test_one_worker_of_a_model_looks_at_a_time(redis: Redis, settings: Settings) -> None:
    settings = settings.model_copy(update={"worker_ttl_s": 1200.0})  # looks every 600 s
    one, other = (WorkStore(redis, settings, worker_id) for worker_id in ("w1", "w2"))
    turns = [one.take_turn(MODEL), other.take_turn(MODEL), other.take_turn("other")]
    assert turns == [True, False, True]
    shortest_pause_ms = 0.8 * 600_000
    assert 300_000 < int(redis.pttl(f"poc:jobs:reaper:{MODEL}")) < shortest_pause_ms
