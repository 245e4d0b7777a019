"""What the node did, by steps of four lengths."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from poc_core.records import RoundState, WorkerRecord
from poc_core.state import keys, scripts
from poc_core.state.history import (
    CHATS,
    FIRST_TOKEN,
    SHOWN,
    STEPS,
    History,
    bucket,
    first_token_p95,
    shares,
)
from poc_core.state.jobs import JobStore
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    Clock,
    complete_batch,
    complete_lease,
    known,
    lease_batch,
    lease_nonces,
    new_job,
    round_config,
)


@pytest.fixture
def history(redis: Redis) -> History:
    return History(redis)


def test_counts_of_a_step_are_added_up_at_each_length(history: History) -> None:
    history.add(1_000_000, {CHATS: 2})
    history.add(1_000_004, {CHATS: 1})
    history.add(1_000_005, {CHATS: 4})
    assert history.read(5, 1_000_000, 3) == [{CHATS: 3}, {CHATS: 4}, {}]
    assert history.read(20, 1_000_000, 1) == [{CHATS: 7}]


@pytest.mark.parametrize(("step_s", "kept_s"), STEPS.items())
def test_a_step_outlives_the_range_that_shows_it_and_not_by_much(
    history: History, redis: Redis, step_s: int, kept_s: int
) -> None:
    history.add(1_000_000, {CHATS: 1})
    lives_s = redis.ttl(keys.past(step_s, 1_000_000 // step_s * step_s))
    assert (SHOWN + 1) * step_s < lives_s <= kept_s <= (SHOWN + 15) * step_s


def test_the_scripts_count_in_the_same_steps() -> None:
    found = known(re.search(r"local PAST = \{(.*)\}\n", scripts.source("common")))
    pairs = re.findall(r"\{(\d+), (\d+)\}", found[1])
    assert {int(step_s): int(kept_s) for step_s, kept_s in pairs} == STEPS


def test_nonces_of_rounds_and_jobs_count_by_the_workers_name(
    history: History,
    rounds: RoundStore,
    jobs: JobStore,
    serve: Callable[..., WorkerRecord],
    redis: Redis,
) -> None:
    ids = ("here/gpu0-0a1b2c", "here/gpu0-3d4e5f")  # two starts of one worker
    for worker_id in ids:
        serve(worker_id)
    rounds.store(round_config(), RoundState.GENERATING)
    current: Any = rounds.current()
    for worker_id in ids:
        lease: Any = lease_nonces(rounds, current, worker_id, 4)
        complete_lease(rounds, lease, worker_id, ["AAAA"] * 4)
    # Until the round ends, its counts are stored by second.
    assert history.read(5, 1_000_000 - 12, 3) == [{}, {}, {"here/gpu0": 8}]
    rounds.switch(current, RoundState.STOPPED)
    job_id = jobs.create(new_job([1, 2]))
    batch: Any = lease_batch(jobs, job_id, 0, ids[1])
    complete_batch(jobs, job_id, batch.place, ["AAAA", "BBBB"])
    assert history.read(5, 1_000_000, 1) == [{"here/gpu0": 10}]
    assert shares(redis, keys.round(current.round_id)) == {"here/gpu0": 8}
    assert shares(redis, keys.job(job_id)) == {"here/gpu0": 2}


def test_a_batch_that_comes_twice_counts_once(
    history: History, jobs: JobStore, serve: Callable[..., WorkerRecord]
) -> None:
    serve("w1")
    job_id = jobs.create(new_job([1, 2]))
    lease_batch(jobs, job_id, 0, "w1")
    for _ in range(2):
        complete_batch(jobs, job_id, 0, ["AAAA", "BBBB"])
    assert history.read(5, 1_000_000, 1) == [{"w1": 2}]


def test_the_first_token_is_told_rounded_up_by_a_fifth_at_most() -> None:
    steps = [{bucket(0.1): 90}, {bucket(2.0): 10, "w1": 3}]
    found = known(first_token_p95(steps))
    assert 2.0 <= found <= 2.4
    assert first_token_p95([{bucket(0.1): 96, bucket(2.0): 4}]) == pytest.approx(0.1, rel=0.2)
    assert first_token_p95([{"w1": 3}]) is None


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_any_time_has_its_bucket(seconds: float) -> None:
    assert 0 <= int(bucket(seconds).removeprefix(FIRST_TOKEN)) <= 60


def test_nothing_is_kept_for_ever(
    history: History, redis: Redis, clock: Clock, rounds: RoundStore
) -> None:
    history.add(clock.now, {CHATS: 1})
    rounds.store(round_config(), RoundState.GENERATING)
    assert [key for key in redis.scan_iter("*") if redis.ttl(key) < 0] == []
