"""Looking over many jobs, some at a time: what is found, and that nothing hides the rest."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from redis import Redis

from poc_core.settings import Settings
from poc_core.state import JobStore, WorkerRegistry
from poc_core.state.job_survey import ActiveJobs, JobSurvey, StuckJobs
from tests.harness.samples import MODEL, Clock, lease_batch, new_job


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]) -> None:
    monkeypatch.setattr("poc_core.state.job_survey._CHUNK", 3)
    serve("w1")
    serve("w2")


LINE = f"poc:jobs:line:{MODEL}"


def waiting(redis: Redis) -> list[str]:
    return [job_id.decode() for job_id in cast(list[bytes], redis.zrange(LINE, 0, -1))]


def found(jobs: JobStore) -> StuckJobs:
    """All slices as one."""
    slices = list(jobs.survey.stuck(MODEL))
    lists: list[list[str]] = [
        [job_id for one in slices for job_id in getattr(one, name)]
        for name in ("unfinished", "orphaned", "broken")
    ]
    return StuckJobs(sum(one.n_dropped for one in slices), *lists)


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
        jobs.complete(ids["done"], index, ["v"] * (2 - index))
    lease_batch(jobs, ids["orphaned"], 0, "w2")
    workers.remove("w2")
    redis.delete(f"poc:job:{ids['expired']}")
    redis.delete(f"poc:job:{ids['broken']}")
    redis.set(f"poc:job:{ids['broken']}", "no hash", ex=100)
    redis.hset(f"poc:job:{ids['bad lease']}:leases", "0", "nobody's")
    seen = found(jobs)
    assert seen.n_dropped == 1
    assert seen.unfinished == [ids["done"]]
    assert seen.orphaned == [ids["orphaned"]]
    assert seen.broken == [ids["broken"], ids["bad lease"]]


def test_a_lease_that_is_too_old_is_found(jobs: JobStore, clock: Clock, settings: Settings) -> None:
    job_id = jobs.create(new_job([0]))
    lease_batch(jobs, job_id, 0, "w1")
    clock.now += settings.visibility_timeout_s
    assert found(jobs).orphaned == []
    clock.now += 1
    assert found(jobs).orphaned == [job_id]


@pytest.mark.parametrize("n", [0, 2, 3, 4, 9])
def test_every_job_joins_the_line(jobs: JobStore, redis: Redis, clock: Clock, n: int) -> None:
    ids = []
    for nonce in range(n):
        ids.append(jobs.create(new_job([nonce])))
        clock.now += 1
    jobs.create(new_job([5], model="other"))
    redis.delete(LINE)
    assert (waiting(redis), found(jobs)) == ([], StuckJobs(0, [], [], []))
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
    jobs.note_waiting(ids[0], "chat")
    jobs.note_waiting(ids[6], "chat")
    jobs.cancel(ids[5])
    assert jobs.count_active() == ActiveJobs(queued=4, running=3, waiting_for_chat=2)


def test_one_worker_of_a_model_looks_at_a_time(redis: Redis, settings: Settings) -> None:
    survey = JobSurvey(redis, settings)
    turns = [
        survey.take_turn(MODEL, "w1"),
        survey.take_turn(MODEL, "w2"),
        survey.take_turn("other", "w3"),
    ]
    assert turns == [True, False, True]
    shortest_pause_ms = 0.8 * settings.reap_interval_s * 1000
    assert 0 < int(redis.pttl(f"poc:jobs:reaper:{MODEL}")) < shortest_pause_ms
