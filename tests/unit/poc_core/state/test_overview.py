"""The snapshot of the node agrees with each store, and its rates are right."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from redis import Redis

from poc_core.records import Lease, RoundRecord, RoundState
from poc_core.serving.deployments import HostReport, HostState
from poc_core.settings import Settings
from poc_core.state import keys
from poc_core.state.deployments import DeploymentStore
from poc_core.state.history import History
from poc_core.state.jobs import JobStore
from poc_core.state.keys import COURIER_KNOWN_S
from poc_core.state.outbox import Outbox, Receivers
from poc_core.state.overview import CurrentRound, GoneHost, Overviews
from poc_core.state.parsing import BREAKS_AT
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    Clock,
    complete_batch,
    complete_lease,
    known,
    lease_batch,
    lease_nonces,
    leased,
    new_job,
    round_config,
    work_of,
    worker_record,
)
from tests.harness.stored import outbox_status

Serve = Callable[..., Any]


@pytest.fixture(autouse=True)
def two_workers(serve: Serve) -> None:
    serve("w2")
    serve("w1")


@pytest.fixture
def overviews(redis: Redis, clock: Clock) -> Overviews:
    return Overviews(redis, clock)


def start(
    rounds: RoundStore, state: RoundState = RoundState.GENERATING, **changes: Any
) -> RoundRecord:
    return known(rounds.read(rounds.store(round_config(**changes), state)))


def compute(rounds: RoundStore, record: RoundRecord, worker: str = "w1", places: int = 4) -> None:
    lease = lease_nonces(rounds, record, worker, places)
    assert isinstance(lease, Lease), lease
    complete_lease(rounds, lease, worker, [f"v{nonce}" for nonce in lease.nonces])


def current(overviews: Overviews) -> CurrentRound:
    return known(overviews.read().round)


def test_a_node_that_does_nothing(overviews: Overviews, redis: Redis) -> None:
    redis.flushall()
    seen = overviews.read()
    assert (seen.round, list(seen.workers), list(seen.silent)) == (None, [], [])
    assert (
        seen.callbacks_waiting,
        seen.queued_nonces,
        seen.total_processed,
        seen.nonces_per_second,
    ) == (0, 0, 0, 0)


def test_a_round_that_cannot_be_read_is_skipped_and_hides_nothing_else(
    overviews: Overviews, rounds: RoundStore, redis: Redis
) -> None:
    record = start(rounds)
    redis.hset(keys.round(record.round_id), "config", "{}")
    seen = overviews.read()
    assert (seen.round, len(seen.workers)) == (None, 2)
    assert rounds.current() is None
    assert rounds.store(round_config(), RoundState.GENERATING) == current(overviews).record.round_id


def test_it_is_what_the_stores_tell_one_by_one(
    overviews: Overviews,
    rounds: RoundStore,
    jobs: JobStore,
    outbox: Outbox,
    workers: WorkerRegistry,
    redis: Redis,
    clock: Clock,
    settings: Settings,
) -> None:
    job_id = jobs.create(new_job(list(range(6))))
    lease_batch(jobs, job_id, 0, "w1")
    complete_batch(jobs, job_id, 0, ["a", "b"])
    record = start(rounds, url="http://receiver:9000/poc")
    compute(rounds, record)
    clock.now += settings.callback_interval_sec
    delivery = known(outbox.take(record.round_id))
    outbox.failed(delivery, "it answered 500")
    receivers = Receivers(redis, clock)
    for name, n_tries in (("once:80", 1), ("often:80", BREAKS_AT)):
        for _ in range(n_tries):
            receivers.silent(name)

    seen = overviews.read()
    assert seen.round is not None
    assert seen.round.record == rounds.current()
    assert seen.round.outbox == outbox_status(redis, record.round_id)
    assert (seen.round.outbox.failures, seen.round.outbox.waiting) == (1, 4)
    assert seen.workers == workers.live()
    assert [worker.id for worker in seen.workers] == ["w1", "w2"]
    assert [receiver.receiver for receiver in seen.silent] == ["often:80"]
    assert (seen.callbacks_waiting, seen.queued_nonces) == (1, jobs.queued_nonces()) == (1, 4)
    assert (seen.total_processed, seen.nonces_per_second) == (6, 0.6)


@pytest.mark.parametrize("ends", [None, RoundState.VALIDATING, RoundState.STOPPED])
def test_counts_are_the_same_before_and_after_they_are_spread(
    overviews: Overviews,
    rounds: RoundStore,
    redis: Redis,
    clock: Clock,
    ends: RoundState | None,
) -> None:
    record = start(rounds)

    def next_lease() -> None:
        lease_nonces(rounds, record, "w2", 4)

    found = []
    for worker in ("w1", "w2", "w1"):
        compute(rounds, record, worker)
    fresh = cast(dict[bytes, bytes], redis.hgetall(keys.counted(record.round_id)))
    assert sorted(name for name in fresh if name) == [b"1000000|w1", b"1000000|w2"]
    clock.now += 1
    for spread in (lambda: None, (lambda: rounds.switch(record, ends)) if ends else next_lease):
        spread()
        seen = overviews.read()
        assert seen.round is not None
        found.append((seen.total_processed, seen.per_second, seen.round.rates))
        assert History(redis).read(5, 1_000_000, 1) == [{"w1": 8, "w2": 4}]
    assert found[0] == found[1]
    assert found[0][0] == 12
    assert found[0][2].totals == {"w1": 8, "w2": 4}
    assert list(cast(dict[bytes, bytes], redis.hgetall(keys.counted(record.round_id)))) == [b""]


def test_what_comes_after_the_end_of_a_round_is_spread_at_once(
    overviews: Overviews, rounds: RoundStore, redis: Redis
) -> None:
    record = start(rounds)
    lease = leased(lease_nonces(rounds, record, "w1", 4))
    rounds.switch(record, RoundState.STOPPED)
    complete_lease(rounds, lease, "w1", ["v"] * 4)
    assert redis.get(keys.STATS_TOTAL) == b"4"
    assert overviews.read().total_processed == 4


def test_a_stopped_round_waits_for_what_living_workers_have_in_hand(
    overviews: Overviews, rounds: RoundStore, outbox: Outbox
) -> None:
    record = start(rounds)
    first, second = lease_nonces(rounds, record, "w1", 4), lease_nonces(rounds, record, "w2", 4)
    assert isinstance(first, Lease)
    assert isinstance(second, Lease)
    assert overviews.read().callbacks_waiting == 0
    rounds.switch(record, RoundState.STOPPED)
    assert overviews.read().callbacks_waiting == 1
    complete_lease(rounds, first, "w1", ["v"] * 4)
    assert overviews.read().callbacks_waiting == 1
    delivery = known(outbox.take(record.round_id))
    outbox.delivered(delivery)
    assert overviews.read().callbacks_waiting == 1
    work_of(rounds, "w2").release(second)
    assert overviews.read().callbacks_waiting == 0


@pytest.mark.parametrize("why", ["no receiver", "dead", "answer lost"])
def test_a_stopped_round_does_not_wait_for_what_never_comes(
    overviews: Overviews, rounds: RoundStore, workers: WorkerRegistry, redis: Redis, why: str
) -> None:
    changes: dict[str, Any] = {"url": ""} if why == "no receiver" else {}
    record = start(rounds, **changes)
    lease_nonces(rounds, record, "w1", 4)
    rounds.switch(record, RoundState.STOPPED)
    assert overviews.read().callbacks_waiting == (why != "no receiver")
    if why == "dead":
        redis.delete("poc:worker:w1")
    elif why == "answer lost":
        workers.heartbeat(worker_record("w1"), "1:")
    assert overviews.read().callbacks_waiting == 0


def test_a_round_that_expired_is_none(
    overviews: Overviews, rounds: RoundStore, redis: Redis
) -> None:
    record = start(rounds)
    redis.delete(f"poc:round:{record.round_id}")
    assert overviews.read().round is None


def test_a_worker_that_died_is_not_seen(overviews: Overviews, redis: Redis) -> None:
    redis.delete("poc:worker:w1")
    assert [worker.id for worker in overviews.read().workers] == ["w2"]


def test_a_restarted_redis_gets_the_script_again(overviews: Overviews, redis: Redis) -> None:
    overviews.read()
    redis.script_flush()
    assert len(overviews.read().workers) == 2


def test_rates_are_those_of_the_last_ten_seconds_per_worker(
    overviews: Overviews, rounds: RoundStore, clock: Clock
) -> None:
    record = start(rounds)
    clock.now += 100
    compute(rounds, record, "w1", 20)
    clock.now += 5
    compute(rounds, record, "w2", 10)
    compute(rounds, record, "w2", 10)
    clock.now += 1
    rates = current(overviews).rates
    assert (rates.totals, rates.per_second) == ({"w1": 20, "w2": 20}, {"w1": 2.0, "w2": 2.0})
    clock.now += 5
    assert current(overviews).rates.per_second == {"w2": 2.0}


@pytest.mark.parametrize(
    ("age_s", "rate"), [(1, 20.0), (1.5, 20.0), (4, 5.0), (9, 20 / 9), (10, 2.0)]
)
def test_the_rate_of_a_young_round_is_that_since_its_start(
    overviews: Overviews, rounds: RoundStore, clock: Clock, age_s: float, rate: float
) -> None:
    record = start(rounds)
    compute(rounds, record, places=20)
    clock.now += age_s
    assert current(overviews).rates.per_second == {"w1": rate}


def test_the_second_under_way_does_not_count_for_the_rate(
    overviews: Overviews, rounds: RoundStore
) -> None:
    compute(rounds, start(rounds))
    assert current(overviews).rates.per_second == {}


def test_it_tells_how_long_ago_each_gave_a_sign_of_life(
    overviews: Overviews, outbox: Outbox, redis: Redis, settings: Settings
) -> None:
    assert overviews.read().courier_silent_s is None
    outbox.announce()
    redis.expire("poc:worker:w1", 9000)
    redis.pexpire("poc:courier", (COURIER_KNOWN_S - 700) * 1000)
    seen = overviews.read()
    assert 8900 < seen.left_s["w1"] <= 9000
    assert 0 < seen.left_s["w2"] <= settings.worker_ttl_s
    assert seen.courier_silent_s == pytest.approx(700, abs=100)
    outbox.leave()
    assert overviews.read().courier_silent_s is None


def test_a_host_whose_reports_ended_is_gone_unless_it_left_or_is_back(
    overviews: Overviews, redis: Redis, settings: Settings, clock: Clock
) -> None:
    store = DeploymentStore(redis, settings, clock)
    for host in ("h1", "h2", "h3"):
        report = HostReport(id=f"{host}-7-aaaaaa", host=host, state=HostState.IDLE, generation=0)
        store.report(report)
    assert [report.host for report in overviews.read().deployment.hosts] == ["h1", "h2", "h3"]
    store.leave("h1-7-aaaaaa")
    redis.delete("poc:host:h2-7-aaaaaa", "poc:host:h3-7-aaaaaa")
    store.report(report.model_copy(update={"id": "h3-8-bbbbbb"}))
    seen = overviews.read()
    assert seen.gone == [GoneHost("h2", clock.now)]
    assert [report.id for report in seen.deployment.hosts] == ["h3-8-bbbbbb"]
    store.leave("h3-8-bbbbbb")  # the last: since when nobody is here h2 does not say
    assert overviews.read().gone == []
