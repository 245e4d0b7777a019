"""Silent receivers: jobs' payloads wait for one that probes, a round's never for jobs'."""

import pytest
from redis import Redis

from poc_core.records import NewJob, RoundState
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import LAST_BACKOFF_S, PROBE_S, Outbox, Receivers
from poc_core.state.parsing import BREAKS_AT
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    MODEL,
    REQUEST,
    SPEC,
    Clock,
    complete_batch,
    complete_lease,
    due_now,
    known,
    lease_batch,
    lease_nonces,
    leased,
    round_config,
)
from tests.harness.stored import spared_receivers

pytestmark = pytest.mark.usefixtures("a_worker")

URL = "http://receiver:9000/poc"
RECEIVER = "receiver:9000"


@pytest.fixture
def receivers(redis: Redis, clock: Clock) -> Receivers:
    return Receivers(redis, clock)


def finished_job(jobs: JobStore, url: str = URL) -> str:
    job_id = jobs.create(NewJob(MODEL, SPEC, REQUEST.model_copy(update={"url": url}), [5], 1))
    leased(lease_batch(jobs, job_id, 0, "w1"))
    complete_batch(jobs, job_id, 0, ["A" * 32])
    assert jobs.finish(job_id)
    return job_id


def falls_silent(receivers: Receivers) -> None:
    for _ in range(BREAKS_AT):
        receivers.silent(RECEIVER)


def test_few_silences_change_nothing(
    jobs: JobStore, outbox: Outbox, receivers: Receivers, redis: Redis
) -> None:
    for _ in range(BREAKS_AT - 1):
        receivers.silent(RECEIVER)
    assert outbox.take(finished_job(jobs)) is not None
    assert spared_receivers(redis) == []


def test_a_receiver_that_is_silent_again_and_again_is_spared_for_a_while(
    jobs: JobStore, outbox: Outbox, receivers: Receivers, clock: Clock, redis: Redis
) -> None:
    falls_silent(receivers)
    job_id, other = finished_job(jobs), finished_job(jobs, "http://other:9000")
    assert outbox.take(job_id) is None
    assert due_now(outbox) == [other]  # so it is not looked at again and again
    assert outbox.take(other) is not None
    (spared,) = spared_receivers(redis)
    assert (spared.receiver, spared.failures) == (RECEIVER, BREAKS_AT)
    clock.now = spared.next_try_at
    assert due_now(outbox) == [job_id]


def test_then_one_payload_probes_and_the_others_wait_for_what_comes_of_it(
    jobs: JobStore, outbox: Outbox, receivers: Receivers, clock: Clock, redis: Redis
) -> None:
    falls_silent(receivers)
    first, second = finished_job(jobs), finished_job(jobs)
    clock.now += 2
    probe = known(outbox.take(first))
    assert outbox.take(second) is None
    receivers.answered(probe.receiver)
    outbox.delivered(probe)
    assert spared_receivers(redis) == []
    assert outbox.take(second) is not None


def test_a_probe_that_died_with_its_courier_is_followed_by_another(
    jobs: JobStore, outbox: Outbox, receivers: Receivers, clock: Clock
) -> None:
    falls_silent(receivers)
    first, second = finished_job(jobs), finished_job(jobs)
    clock.now += 2
    outbox.take(first)
    clock.now += PROBE_S
    assert outbox.take(second) is not None


def test_the_pause_doubles_to_30_seconds(receivers: Receivers, clock: Clock, redis: Redis) -> None:
    falls_silent(receivers)
    waits = []
    for _ in range(20):
        (spared,) = spared_receivers(redis)
        waits.append(spared.next_try_at - clock.now)
        receivers.silent(RECEIVER)
    assert 1 <= waits[0] <= 2
    assert all(LAST_BACKOFF_S / 2 <= wait <= LAST_BACKOFF_S for wait in waits[5:])


def test_a_round_is_not_held_up_by_what_jobs_found_silent(
    rounds: RoundStore,
    outbox: Outbox,
    receivers: Receivers,
    clock: Clock,
    settings: Settings,
    redis: Redis,
) -> None:
    for _ in range(BREAKS_AT + 10):
        receivers.silent(RECEIVER)
    record = known(rounds.read(rounds.store(round_config(url=URL), RoundState.GENERATING)))
    lease = leased(lease_nonces(rounds, record, "w1", 4))
    complete_lease(rounds, lease, "w1", [f"v{nonce}" for nonce in lease.nonces])
    clock.now += settings.callback_interval_sec
    assert spared_receivers(redis)[0].next_try_at > clock.now + 1
    assert outbox.take(record.round_id) is not None


def test_what_is_known_of_receivers_expires(receivers: Receivers, redis: Redis) -> None:
    falls_silent(receivers)
    assert [key for key in redis.scan_iter() if redis.ttl(key) == -1] == []


def test_of_very_many_silent_receivers_the_latest_are_listed(
    receivers: Receivers, clock: Clock, redis: Redis
) -> None:
    for number in range(30):
        clock.now += 1
        for _ in range(BREAKS_AT):
            receivers.silent(f"receiver{number}:80")
    assert [spared.receiver for spared in spared_receivers(redis)] == [
        f"receiver{n}:80" for n in range(29, 9, -1)
    ]
