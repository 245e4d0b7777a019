"""What waits for receivers: payloads that stay what they are until they are delivered."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from redis import Redis

from poc_core.arithmetic.nonces import MAX_NONCE
from poc_core.errors import QueueFullError
from poc_core.records import Lease, NewJob, Refusal, RoundRecord, RoundState
from poc_core.settings import Settings
from poc_core.state import JobStore, Outbox, RoundStore
from poc_core.state.delivery.outbox import Delivery, OutboxExpiredError
from poc_core.state.delivery.receivers import (
    BREAKS_AT,
    FIRST_BACKOFF_S,
    LAST_BACKOFF_S,
    Receivers,
)
from tests.harness.samples import (
    DISTANCE_SPEC,
    K_DIM,
    MODEL,
    REQUEST,
    SPEC,
    Clock,
    complete_batch,
    complete_lease,
    due_now,
    lease_batch,
    lease_nonces,
    round_config,
)
from tests.harness.stored import n_outboxes, outbox_status

pytestmark = pytest.mark.usefixtures("a_worker")

URL = "http://receiver:9000/poc"
VECTOR = "A" * 32  # 24 bytes of zeros


@pytest.fixture
def settings() -> Settings:
    return Settings(callback_max_artifacts=10)


def start(rounds: RoundStore, **changes: Any) -> RoundRecord:
    record = rounds.read(rounds.store(round_config(**changes), RoundState.GENERATING))
    assert record is not None
    return record


def compute(rounds: RoundStore, record: RoundRecord, places: int = 4) -> Lease:
    lease = lease_nonces(rounds, record, "w1", places)
    assert isinstance(lease, Lease)
    complete_lease(rounds, lease, "w1", [f"v{nonce}" for nonce in lease.nonces])
    return lease


def take(outbox: Outbox, outbox_id: str) -> Delivery:
    delivery = outbox.take(outbox_id)
    assert delivery is not None
    return delivery


def content(delivery: Delivery) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(delivery.body)
    return decoded


def nonces_of(delivery: Delivery) -> list[int]:
    return [artifact["nonce"] for artifact in content(delivery)["artifacts"]]


def drain(
    outbox: Outbox, outbox_id: str, after_each: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """Delivers what is due; the nonces of each payload."""
    payloads = []
    while (delivery := outbox.take(outbox_id)) is not None:
        payloads.append(nonces_of(delivery))
        outbox.delivered(delivery)
        after_each()
    return payloads


def interval_passes(clock: Clock, settings: Settings) -> None:
    clock.now += settings.callback_interval_sec


@pytest.fixture
def waiting(rounds: RoundStore, clock: Clock, settings: Settings) -> RoundRecord:
    """A round of which four artifacts are due."""
    record = start(rounds)
    compute(rounds, record)
    interval_passes(clock, settings)
    return record


# Payloads.


def test_a_payload_of_artifacts_is_what_the_protocol_says(
    outbox: Outbox, waiting: RoundRecord
) -> None:
    delivery = take(outbox, waiting.round_id)
    assert delivery.url == f"{URL}/generated"
    assert content(delivery) == {
        "public_key": "key",
        "block_hash": "block",
        "block_height": 7,
        "node_id": 0,
        "artifacts": [{"nonce": nonce, "vector_b64": f"v{nonce}"} for nonce in range(4)],
        "encoding": {"dtype": "f16", "k_dim": K_DIM, "endian": "le"},
        "payload_id": f"{waiting.round_id}-0",
    }


def test_a_payload_of_distances_is_what_the_protocol_says(
    rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings
) -> None:
    record = start(rounds, spec=DISTANCE_SPEC, terms={"r_target": 1.4})
    lease = lease_nonces(rounds, record, "w1", 3)
    assert isinstance(lease, Lease)
    complete_lease(rounds, lease, "w1", [1.25, 1.5, 1.375])
    interval_passes(clock, settings)
    assert content(take(outbox, record.round_id)) == {
        "public_key": "key",
        "block_hash": "block",
        "block_height": 7,
        "node_id": 0,
        "r_target": 1.4,
        "nonces": [0, 2],
        "dist": [1.25, 1.375],
        "payload_id": f"{record.round_id}-0",
    }


def test_a_slash_at_the_urls_end_does_no_harm(
    rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings
) -> None:
    record = start(rounds, url=URL + "/")
    compute(rounds, record)
    interval_passes(clock, settings)
    assert take(outbox, record.round_id).url == f"{URL}/generated"


def test_the_largest_nonces_keep_their_last_digit(
    rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings
) -> None:
    record = start(rounds, node_id=MAX_NONCE - 2**62, node_count=2**62)
    compute(rounds, record)
    interval_passes(clock, settings)
    assert nonces_of(take(outbox, record.round_id)) == [2**62 - 1, MAX_NONCE]


def test_payloads_come_in_order_and_hold_at_most_callback_max_artifacts(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord, clock: Clock, settings: Settings
) -> None:
    for places in [4] * 5 + [25]:
        compute(rounds, waiting, places)
    payloads = drain(outbox, waiting.round_id, lambda: interval_passes(clock, settings))
    assert payloads[:3] == [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    assert [nonce for payload in payloads for nonce in payload] == list(range(49))
    assert max(map(len, payloads)) <= 10


def test_a_payload_stays_the_same_over_failures_whatever_is_added(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord, clock: Clock
) -> None:
    bodies = set()
    for _ in range(5):
        delivery = take(outbox, waiting.round_id)
        bodies.add(delivery.body)
        outbox.failed(delivery, "500")
        compute(rounds, waiting)
        clock.now += LAST_BACKOFF_S
    assert len(bodies) == 1


def test_a_payload_stays_the_same_when_its_courier_died(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord, clock: Clock
) -> None:
    died_with = take(outbox, waiting.round_id)
    compute(rounds, waiting)
    clock.now += outbox.lock_s
    assert take(outbox, waiting.round_id).body == died_with.body


@pytest.mark.parametrize("is_dropped", [False, True], ids=["delivered", "dropped"])
def test_the_end_of_a_payload_removes_it_alone_and_the_next_has_the_next_number(
    rounds: RoundStore,
    outbox: Outbox,
    waiting: RoundRecord,
    clock: Clock,
    settings: Settings,
    is_dropped: bool,
) -> None:
    first = take(outbox, waiting.round_id)
    compute(rounds, waiting)
    assert outbox.dropped(first, "answered 500") if is_dropped else outbox.delivered(first)
    interval_passes(clock, settings)
    second = take(outbox, waiting.round_id)
    assert (nonces_of(second), second.failures) == ([4, 5, 6, 7], 0)
    assert second.payload_id == f"{waiting.round_id}-1"


def test_the_status_counts_what_waits_and_what_was_delivered(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord, redis: Redis
) -> None:
    delivery = take(outbox, waiting.round_id)
    compute(rounds, waiting, places=3)
    outbox.delivered(delivery)
    status = outbox_status(redis, waiting.round_id)
    assert (status.waiting, status.delivered, status.dropped, status.failures) == (3, 4, 0, 0)


def test_an_unknown_outbox_has_nothing(outbox: Outbox, redis: Redis) -> None:
    assert outbox.take("0" * 32) is None
    assert outbox_status(redis, "0" * 32).waiting == 0


# When.


def test_the_first_payload_is_due_an_interval_after_its_first_artifact(
    rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings
) -> None:
    record = start(rounds)
    compute(rounds, record)
    clock.now += settings.callback_interval_sec - 0.1
    compute(rounds, record)
    assert due_now(outbox) == []
    clock.now += 0.1
    assert due_now(outbox) == [record.round_id]


def test_after_a_delivery_the_next_is_due_an_interval_later(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord, clock: Clock, settings: Settings
) -> None:
    delivery = take(outbox, waiting.round_id)
    compute(rounds, waiting)
    outbox.delivered(delivery)
    assert outbox.take(waiting.round_id) is None
    interval_passes(clock, settings)
    assert due_now(outbox) == [waiting.round_id]


def test_an_outbox_that_is_empty_is_never_due(
    outbox: Outbox, waiting: RoundRecord, clock: Clock
) -> None:
    outbox.delivered(take(outbox, waiting.round_id))
    clock.now += 1000
    assert due_now(outbox) == []


def test_the_rest_is_due_at_once_when_the_round_stops(
    rounds: RoundStore, outbox: Outbox, clock: Clock
) -> None:
    record = start(rounds)
    compute(rounds, record)
    rounds.switch(record, RoundState.STOPPED)
    assert due_now(outbox) == [record.round_id]


def test_of_a_stopped_round_payload_follows_payload(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord
) -> None:
    for _ in range(5):
        compute(rounds, waiting)
    rounds.switch(waiting, RoundState.STOPPED)
    arrived = drain(outbox, waiting.round_id)
    assert [nonce for payload in arrived for nonce in payload] == list(range(24))


def test_the_last_values_of_a_stopped_round_do_not_wait_for_an_interval(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord
) -> None:
    in_hand = lease_nonces(rounds, waiting, "w1", 4)
    assert isinstance(in_hand, Lease)
    rounds.switch(waiting, RoundState.STOPPED)
    outbox.delivered(take(outbox, waiting.round_id))
    complete_lease(rounds, in_hand, "w1", [f"v{nonce}" for nonce in in_hand.nonces])
    assert due_now(outbox) == [waiting.round_id]
    assert nonces_of(take(outbox, waiting.round_id)) == [4, 5, 6, 7]


def test_a_full_payload_follows_at_once(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord, redis: Redis
) -> None:
    for _ in range(5):
        compute(rounds, waiting)
    assert [len(payload) for payload in drain(outbox, waiting.round_id)] == [8, 8]
    # Less than callback_max_artifacts: it fills up for an interval.
    assert outbox_status(redis, waiting.round_id).waiting == 8


def test_a_stop_does_not_cut_a_backoff_short(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord
) -> None:
    outbox.failed(take(outbox, waiting.round_id), "500")
    rounds.switch(waiting, RoundState.STOPPED)
    assert due_now(outbox) == []


def test_the_wait_after_a_failure_doubles_from_1_to_30_seconds(
    outbox: Outbox, waiting: RoundRecord, clock: Clock
) -> None:
    waits = []
    for _ in range(12):
        waits.append(outbox.failed(take(outbox, waiting.round_id), "500"))
        clock.now += waits[-1] - 0.01
        assert outbox.take(waiting.round_id) is None
        clock.now += 0.01
    assert all(
        FIRST_BACKOFF_S * 2**n <= wait <= FIRST_BACKOFF_S * 2 ** (n + 1)
        for n, wait in enumerate(waits[:4])
    )
    assert all(LAST_BACKOFF_S / 2 <= wait <= LAST_BACKOFF_S for wait in waits[4:])


def test_the_wait_differs_from_outbox_to_outbox(outbox: Outbox, waiting: RoundRecord) -> None:
    delivery = take(outbox, waiting.round_id)
    assert len({outbox.failed(delivery, "500") for _ in range(10)}) > 1


def test_after_thousands_of_failures_the_wait_is_still_30_seconds(
    outbox: Outbox, waiting: RoundRecord
) -> None:
    many = Delivery(waiting.round_id, "token", URL, b"", "id", failures=100_000)
    assert outbox.failed(many, "500") <= LAST_BACKOFF_S


def test_failures_are_shown_until_a_delivery(
    outbox: Outbox, waiting: RoundRecord, clock: Clock, redis: Redis
) -> None:
    wait_s = outbox.failed(take(outbox, waiting.round_id), "answered 500")
    status = outbox_status(redis, waiting.round_id)
    assert (status.failures, status.last_error) == (1, "answered 500")
    assert status.next_at == pytest.approx(clock.now + wait_s)
    clock.now += wait_s
    outbox.delivered(take(outbox, waiting.round_id))
    status = outbox_status(redis, waiting.round_id)
    assert (status.failures, status.last_error) == (0, None)


def test_failures_are_counted_over_tries(
    outbox: Outbox, waiting: RoundRecord, clock: Clock
) -> None:
    for failures in range(3):
        delivery = take(outbox, waiting.round_id)
        assert delivery.failures == failures
        outbox.failed(delivery, "500")
        clock.now += LAST_BACKOFF_S


# Who.


def test_only_one_delivers_at_a_time(outbox: Outbox, waiting: RoundRecord) -> None:
    take(outbox, waiting.round_id)
    assert outbox.take(waiting.round_id) is None
    assert due_now(outbox) == []


def test_who_renews_the_lock_keeps_it(outbox: Outbox, waiting: RoundRecord, clock: Clock) -> None:
    slow = take(outbox, waiting.round_id)
    for _ in range(5):
        clock.now += outbox.lock_s - 1
        assert outbox.renew(slow)
        assert due_now(outbox) == []
        assert outbox.take(waiting.round_id) is None
    assert outbox.delivered(slow)


def test_who_lost_the_lock_changes_nothing(
    outbox: Outbox, waiting: RoundRecord, clock: Clock, redis: Redis
) -> None:
    late = take(outbox, waiting.round_id)
    clock.now += outbox.lock_s
    holder = take(outbox, waiting.round_id)
    assert not outbox.renew(late)
    assert not outbox.delivered(late)
    outbox.failed(late, "500")
    outbox.halved(late, "answered 413")
    status = outbox_status(redis, waiting.round_id)
    assert (status.waiting, status.delivered, status.failures) == (4, 0, 0)
    assert outbox.delivered(holder)
    assert outbox_status(redis, waiting.round_id).delivered == 4


def test_delivered_counts_once(outbox: Outbox, waiting: RoundRecord, redis: Redis) -> None:
    delivery = take(outbox, waiting.round_id)
    assert [outbox.delivered(delivery), outbox.delivered(delivery)] == [True, False]
    assert outbox_status(redis, waiting.round_id).delivered == 4


def test_dropped_artifacts_are_counted_with_the_reason(
    outbox: Outbox, waiting: RoundRecord, redis: Redis
) -> None:
    outbox.dropped(take(outbox, waiting.round_id), "answered 500")
    status = outbox_status(redis, waiting.round_id)
    assert (status.waiting, status.delivered, status.dropped) == (0, 0, 4)
    assert status.last_error == "answered 500"


# Jobs.


def finish(
    jobs: JobStore,
    claimed: dict[int, str] | None = None,
    url: str | None = URL,
    nonces: Sequence[int] = (5, 6),
    values: Sequence[str | None] | None = None,
) -> str:
    request = REQUEST.model_copy(update={"url": url})
    job_id = jobs.create(NewJob(MODEL, SPEC, request, nonces, len(nonces), claimed))
    lease = lease_batch(jobs, job_id, 0, "w1")
    assert isinstance(lease, Lease)
    complete_batch(jobs, job_id, 0, values or [VECTOR] * len(nonces))
    assert jobs.finish(job_id)
    return job_id


def test_a_finished_job_is_due_at_once(jobs: JobStore, outbox: Outbox) -> None:
    job_id = finish(jobs)
    assert due_now(outbox) == [job_id]


def test_a_job_without_a_url_has_no_callback(jobs: JobStore, outbox: Outbox) -> None:
    finish(jobs, url=None)
    assert (due_now(outbox), outbox.n_jobs()) == ([], 0)


def test_a_jobs_artifacts_are_sent_as_the_protocol_says(jobs: JobStore, outbox: Outbox) -> None:
    job_id = finish(jobs)
    delivery = take(outbox, job_id)
    assert delivery.url == f"{URL}/generated"
    assert content(delivery) == {
        "request_id": job_id,
        "public_key": "key",
        "block_hash": "block",
        "block_height": 7,
        "node_id": 0,
        "artifacts": [{"nonce": 5, "vector_b64": VECTOR}, {"nonce": 6, "vector_b64": VECTOR}],
        "encoding": {"dtype": "f16", "k_dim": K_DIM, "endian": "le"},
        "payload_id": f"{job_id}-0",
    }


def test_a_jobs_verdict_is_sent_as_the_protocol_says(jobs: JobStore, outbox: Outbox) -> None:
    job_id = finish(jobs, claimed={5: VECTOR, 6: VECTOR})
    delivery = take(outbox, job_id)
    assert delivery.url == f"{URL}/validated"
    assert content(delivery) == {
        "request_id": job_id,
        "block_hash": "block",
        "block_height": 7,
        "public_key": "key",
        "node_id": 0,
        "n_total": 2,
        "n_mismatch": 0,
        "mismatch_nonces": [],
        "p_value": 1.0,
        "fraud_detected": False,
        "fraud_threshold": 0.01,
        "n_excluded": 0,
        "dist_threshold": 0.02,
        "p_mismatch": 0.001,
        "terms": "the request",
        "distances": {"min": 0.0, "median": 0.0, "max": 0.0, "histogram": [[0.0001, 2]]},
        "likely_cause": None,
        "payload_id": f"{job_id}-0",
    }


def test_a_job_finished_twice_has_one_callback(
    jobs: JobStore, outbox: Outbox, redis: Redis
) -> None:
    job_id = finish(jobs)
    assert not jobs.finish(job_id)
    assert redis.llen(f"poc:outbox:{job_id}:entries") == 1


def test_jobs_count_until_their_callback_is_delivered(
    jobs: JobStore, outbox: Outbox, clock: Clock
) -> None:
    first, second = finish(jobs), finish(jobs)
    assert outbox.n_jobs() == 2
    outbox.failed(take(outbox, first), "500")
    outbox.delivered(take(outbox, second))
    assert outbox.n_jobs() == 1


# Retention.


def ttl(redis: Redis, outbox_id: str) -> int:
    ttls = [int(redis.ttl(f"poc:outbox:{outbox_id}{suffix}")) for suffix in ("", ":entries")]
    assert ttls[0] == ttls[1]
    return ttls[0]


def test_every_key_of_an_outbox_expires(
    rounds: RoundStore,
    jobs: JobStore,
    outbox: Outbox,
    redis: Redis,
    clock: Clock,
    settings: Settings,
) -> None:
    without: list[Any] = []

    def look() -> None:
        without.extend(key for key in redis.scan_iter() if redis.ttl(key) == -1)

    job_id = finish(jobs)
    record = start(rounds)
    compute(rounds, record)
    interval_passes(clock, settings)
    for outbox_id in (record.round_id, job_id):
        delivery = take(outbox, outbox_id)
        look()
        outbox.failed(delivery, "500")
        look()
    clock.now += LAST_BACKOFF_S
    for outbox_id in (record.round_id, job_id):
        outbox.delivered(take(outbox, outbox_id))
        look()
    compute(rounds, record)
    look()
    assert without == []


def expires_soon(redis: Redis, outbox_id: str) -> None:
    for suffix in ("", ":entries"):
        redis.expire(f"poc:outbox:{outbox_id}{suffix}", 100)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_tries_prolong_the_retention_until_the_round_stops(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord, redis: Redis, is_stopped: bool
) -> None:
    if is_stopped:
        rounds.switch(waiting, RoundState.STOPPED)
    expires_soon(redis, waiting.round_id)
    outbox.failed(take(outbox, waiting.round_id), "500")
    assert (ttl(redis, waiting.round_id) > 100) is not is_stopped


def test_another_round_does_not_prolong_the_retention_of_the_last(
    rounds: RoundStore, waiting: RoundRecord, redis: Redis
) -> None:
    rounds.switch(waiting, RoundState.STOPPED)
    expires_soon(redis, waiting.round_id)
    start(rounds)
    assert ttl(redis, waiting.round_id) <= 100


def test_a_jobs_retention_counts_from_its_end_whatever_is_tried(
    jobs: JobStore, outbox: Outbox, redis: Redis
) -> None:
    job_id = finish(jobs)
    expires_soon(redis, job_id)
    outbox.failed(take(outbox, job_id), "500")
    assert ttl(redis, job_id) <= 100


def test_a_job_whose_retention_ended_no_longer_counts(
    jobs: JobStore, outbox: Outbox, redis: Redis
) -> None:
    job_id = finish(jobs)
    assert (n_outboxes(redis), outbox.n_jobs()) == (1, 1)
    redis.delete(f"poc:outbox:{job_id}", f"poc:outbox:{job_id}:entries")
    with pytest.raises(
        OutboxExpiredError, match=f"what {job_id} still had for its receiver is gone"
    ):
        outbox.take(job_id)
    assert outbox.take(job_id) is None
    assert (due_now(outbox), n_outboxes(redis), outbox.n_jobs()) == ([], 0, 0)


def test_a_round_that_was_delivered_to_the_end_expires_in_silence(
    outbox: Outbox, waiting: RoundRecord, redis: Redis
) -> None:
    outbox.delivered(take(outbox, waiting.round_id))
    redis.delete(f"poc:outbox:{waiting.round_id}")
    assert outbox.take(waiting.round_id) is None


# Bytes.


def large(nonce: int) -> str:
    """15 KB, as of a k_dim of 4096 and more."""
    return f"{nonce:0>15000}"


def compute_large(rounds: RoundStore, record: RoundRecord, places: int) -> None:
    lease = lease_nonces(rounds, record, "w1", places)
    assert isinstance(lease, Lease)
    complete_lease(rounds, lease, "w1", [large(nonce) for nonce in lease.nonces])


@pytest.fixture
def bounded(redis: Redis, settings: Settings, clock: Clock) -> tuple[RoundStore, Outbox]:
    """A million artifacts a payload, but only 100 kB, and 1 MB in the outbox."""
    changes = {
        "callback_max_artifacts": 10**6,
        "callback_max_bytes": 100_000,
        "outbox_max_bytes": 1_000_000,
    }
    settings = settings.model_copy(update=changes)
    return RoundStore(redis, settings, clock), Outbox(redis, settings, clock)


def test_a_payload_is_bounded_by_its_bytes(
    bounded: tuple[RoundStore, Outbox], redis: Redis
) -> None:
    rounds, outbox = bounded
    record = start(rounds)
    for _ in range(4):
        compute_large(rounds, record, places=3)
    compute_large(rounds, record, places=20)  # more than a payload's bytes in one lease
    rounds.switch(record, RoundState.STOPPED)
    sizes, arrived = [], []
    while (delivery := outbox.take(record.round_id)) is not None:
        sizes.append(len(delivery.body))
        arrived += nonces_of(delivery)
        outbox.delivered(delivery)
    assert max(sizes) < 101_000
    assert arrived == list(range(32))
    assert outbox_status(redis, record.round_id).waiting_bytes == 0


def test_an_artifact_larger_than_a_payloads_bytes_goes_alone(
    bounded: tuple[RoundStore, Outbox],
) -> None:
    rounds, outbox = bounded
    record = start(rounds)
    lease = lease_nonces(rounds, record, "w1", 2)
    assert isinstance(lease, Lease)
    complete_lease(rounds, lease, "w1", ["x" * 200_000, "y" * 200_000])
    rounds.switch(record, RoundState.STOPPED)
    for nonce in range(2):
        delivery = take(outbox, record.round_id)
        assert nonces_of(delivery) == [nonce]
        outbox.delivered(delivery)


def test_a_round_pauses_at_outbox_max_bytes_and_goes_on_below(
    bounded: tuple[RoundStore, Outbox], clock: Clock, settings: Settings, redis: Redis
) -> None:
    rounds, outbox = bounded
    record = start(rounds)
    compute_large(rounds, record, places=67)
    assert outbox_status(redis, record.round_id).waiting_bytes > 1_000_000
    assert lease_nonces(rounds, record, "w1", 1) is Refusal.FULL
    interval_passes(clock, settings)
    outbox.delivered(take(outbox, record.round_id))
    assert isinstance(lease_nonces(rounds, record, "w1", 1), Lease)


# What a receiver finds too large.


def deliver_below(outbox: Outbox, outbox_id: str, most: int) -> list[Delivery]:
    """What a receiver takes that answers 413 to more than `most` artifacts; ends at the first
    that cannot be halved.
    """
    taken = []
    while (delivery := outbox.take(outbox_id)) is not None:
        if len(content(delivery)["artifacts"]) <= most:
            outbox.delivered(delivery)
            taken.append(delivery)
        elif not outbox.halved(delivery, "answered 413"):
            outbox.failed(delivery, "answered 413")
            break
    return taken


@pytest.mark.parametrize("most", [1, 3, 5, 8])
def test_what_is_too_large_goes_in_smaller_ones_and_nothing_is_lost_or_doubled(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord, most: int, redis: Redis
) -> None:
    for places in (4, 4, 1, 7, 4, 9):  # entries that must be divided, and some that need not
        compute(rounds, waiting, places)
    rounds.switch(waiting, RoundState.STOPPED)
    taken = deliver_below(outbox, waiting.round_id, most)
    assert [nonce for delivery in taken for nonce in nonces_of(delivery)] == list(range(33))
    numbers = [int(delivery.payload_id.rpartition("-")[2]) for delivery in taken]
    assert numbers == sorted(set(numbers))
    status = outbox_status(redis, waiting.round_id)
    assert (status.waiting, status.waiting_bytes) == (0, 0)
    assert (status.delivered, status.last_error) == (33, None)


def test_halves_have_ids_of_their_own_that_stay_over_failures(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord, clock: Clock
) -> None:
    whole = take(outbox, waiting.round_id)
    assert outbox.halved(whole, "answered 413")
    first = take(outbox, waiting.round_id)
    assert (nonces_of(first), first.payload_id) == ([0, 1], f"{waiting.round_id}-1")
    outbox.failed(first, "answered 500")
    compute(rounds, waiting)
    clock.now += LAST_BACKOFF_S
    again = take(outbox, waiting.round_id)
    assert (again.body, again.payload_id) == (first.body, first.payload_id)


def test_a_receiver_that_found_one_too_large_gets_slowly_larger_ones_again(
    rounds: RoundStore, outbox: Outbox, waiting: RoundRecord
) -> None:
    for _ in range(100):
        compute(rounds, waiting, places=1)
    rounds.switch(waiting, RoundState.STOPPED)
    outbox.halved(take(outbox, waiting.round_id), "answered 413")
    sizes = [len(payload) for payload in drain(outbox, waiting.round_id)]
    assert sizes[0] == 5
    assert max(sizes) == 10
    assert sizes[:-1] == sorted(sizes[:-1])


def test_a_single_artifact_that_is_too_large_is_still_its_deliverers_to_end(
    outbox: Outbox, rounds: RoundStore, clock: Clock, settings: Settings, redis: Redis
) -> None:
    record = start(rounds)
    compute(rounds, record, places=1)
    interval_passes(clock, settings)
    delivery = take(outbox, record.round_id)
    assert not outbox.halved(delivery, "answered 413")
    outbox.failed(delivery, "answered 413")
    status = outbox_status(redis, record.round_id)
    assert (status.waiting, status.failures, status.last_error) == (1, 1, "answered 413")


def test_a_jobs_answer_that_is_too_large_goes_in_halves(
    jobs: JobStore, outbox: Outbox, redis: Redis
) -> None:
    job_id = finish(jobs, nonces=list(range(5)))
    taken = deliver_below(outbox, job_id, most=2)
    assert [nonces_of(delivery) for delivery in taken] == [[0, 1], [2], [3, 4]]
    assert len({delivery.payload_id for delivery in taken}) == 3
    for delivery in taken:
        told = content(delivery)
        assert (told["request_id"], told["payload_id"]) == (job_id, delivery.payload_id)
        assert told["encoding"]["k_dim"] == K_DIM
    assert outbox.n_jobs() == 0
    assert redis.get("poc:outbox:job_bytes") == b"0"


def test_what_was_excluded_comes_with_the_first_half_alone(jobs: JobStore, outbox: Outbox) -> None:
    job_id = finish(jobs, nonces=[1, 2, 3], values=[VECTOR, None, VECTOR])
    first, second = deliver_below(outbox, job_id, most=1)
    assert content(first)["excluded_nonces"] == [2]
    assert "excluded_nonces" not in content(second)


def test_a_verdict_cannot_be_halved(jobs: JobStore, outbox: Outbox) -> None:
    job_id = finish(jobs, claimed={5: VECTOR, 6: VECTOR})
    assert not outbox.halved(take(outbox, job_id), "answered 413")


# What is said of those that are due.


def test_an_outbox_is_announced_once_until_whoever_was_told_must_be_dead(
    jobs: JobStore, rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings
) -> None:
    job_id, record = finish(jobs), start(rounds)
    compute(rounds, record)
    interval_passes(clock, settings)
    assert {due.outbox_id: due.is_round for due in outbox.announce()} == {
        record.round_id: True,
        job_id: False,
    }
    assert outbox.announce() == []
    clock.now += outbox.lock_s
    assert len(outbox.announce()) == 2


@pytest.mark.parametrize(
    "fields", [{"bytes": "many"}, {"url": b"\xff"}, None], ids=["no number", "no text", "no hash"]
)
def test_an_outbox_that_cannot_be_read_keeps_no_other_from_being_announced(
    rounds: RoundStore,
    outbox: Outbox,
    waiting: RoundRecord,
    redis: Redis,
    caplog: pytest.LogCaptureFixture,
    clock: Clock,
    fields: Any,
) -> None:
    bad = f"bad-{fields}"
    redis.zadd("poc:outbox:due", {bad: 0.0})
    if fields is None:
        redis.set(f"poc:outbox:{bad}", "no hash")
    else:
        redis.hset(f"poc:outbox:{bad}", mapping=fields)
    for _ in range(3):
        assert [due.outbox_id for due in outbox.announce()] == [waiting.round_id]
        clock.now += outbox.lock_s
    assert caplog.text.count("in Redis cannot be read") == 1


def test_a_payload_that_cannot_be_read_is_said_once_and_kept(
    outbox: Outbox,
    waiting: RoundRecord,
    redis: Redis,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    redis.hset(f"poc:outbox:{waiting.round_id}", "head", "{")
    for _ in range(3):
        assert outbox.take(waiting.round_id) is None
        clock.now += outbox.lock_s
    assert caplog.text.count(f"outbox '{waiting.round_id}' in Redis cannot be read") == 1
    assert outbox_status(redis, waiting.round_id).waiting == 4


def test_an_announcement_says_for_whom_it_is_and_keeps_the_secret(
    rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings, redis: Redis
) -> None:
    compute(rounds, start(rounds, url="http://user:secret@receiver:9000/x"))
    interval_passes(clock, settings)
    (due,) = outbox.announce()
    assert due.receiver == "receiver:9000"
    assert due.waiting_bytes == outbox_status(redis, due.outbox_id).waiting_bytes > 0


# Places of jobs.


def test_jobs_that_come_quickly_do_not_pass_one_for_each_half_mebibyte_of_the_outbox(
    redis: Redis, settings: Settings, clock: Clock, serve: Callable[..., Any]
) -> None:
    settings = settings.model_copy(
        update={"outbox_max_bytes": 70 * 512 * 1024, "max_queued_nonces": 10**6}
    )
    jobs, outbox = JobStore(redis, settings, clock), Outbox(redis, settings, clock)
    refusals = []
    for number in range(100):  # none of them is computed before all are asked for
        try:
            queued_of(jobs, f"client {number}", f"receiver:{number}")
        except QueueFullError as error:
            refusals.append(str(error))
    assert (outbox.n_jobs(), len(refusals)) == (70, 30)
    assert "The callbacks of 70 jobs" in refusals[0]
    assert "try again later, or leave out the url and poll" in refusals[0]
    assert len(jobs.active_jobs(MODEL)) == 70
    jobs.create(NewJob(MODEL, SPEC, REQUEST, [1], 1))  # without a url


@pytest.mark.parametrize("end", ["fail", "cancel"])
def test_a_job_that_ends_without_a_callback_gives_its_place_back(
    jobs: JobStore, outbox: Outbox, end: str
) -> None:
    job_id = jobs.create(NewJob(MODEL, SPEC, REQUEST.model_copy(update={"url": URL}), [5], 1))
    assert outbox.n_jobs() == 1
    if end == "fail":
        jobs.fail(job_id, "no engine")
    else:
        jobs.cancel(job_id)
    assert (outbox.n_jobs(), due_now(outbox)) == (0, [])


def test_the_place_of_a_job_that_expired_is_found_again(
    jobs: JobStore, outbox: Outbox, redis: Redis
) -> None:
    gone = jobs.create(NewJob(MODEL, SPEC, REQUEST.model_copy(update={"url": URL}), [5], 1))
    waits = finish(jobs)
    redis.delete(f"poc:job:{gone}")
    jobs.recount()
    assert redis.hkeys("poc:outbox:of_jobs") == [waits.encode()]


def test_jobs_callbacks_are_bounded_by_their_bytes_together(
    redis: Redis, settings: Settings, clock: Clock
) -> None:
    settings = settings.model_copy(update={"outbox_max_bytes": 1024})
    jobs, outbox = JobStore(redis, settings, clock), Outbox(redis, settings, clock)
    first = finish(jobs, nonces=list(range(30)))
    with pytest.raises(QueueFullError, match="1024 bytes of them"):
        finish(jobs)
    jobs.recount()  # changes nothing
    with pytest.raises(QueueFullError):
        finish(jobs)
    outbox.delivered(take(outbox, first))
    finish(jobs)


# Whatever happens, and in whatever order.


class FickleReceiver:
    """Takes, refuses, takes without an answer that arrives, finds too large. It remembers the
    ids.
    """

    def __init__(self, outbox: Outbox, rng: random.Random) -> None:
        self._outbox = outbox
        self._rng = rng
        self._seen: dict[str, bytes] = {}
        self._too_large: set[str] = set()
        self.taken: dict[str, list[int]] = {}  # by id, in the order of their arrival

    def answer(self, delivery: Delivery) -> None:
        """One try of a courier, which may die before its end, or have lost its lock."""
        assert self._seen.setdefault(delivery.payload_id, delivery.body) == delivery.body
        mood = self._rng.choice(
            ["takes", "takes", "takes", "answer lost", "refuses", "too large", "courier dies"]
        )
        if mood == "too large" and delivery.payload_id not in self.taken:
            self._too_large.add(delivery.payload_id)
        if delivery.payload_id in self._too_large:
            if not self._outbox.halved(delivery, "answered 413"):
                self._too_large.remove(delivery.payload_id)  # or it would never take it
                self._outbox.failed(delivery, "answered 413")
        elif mood == "refuses":
            self._outbox.failed(delivery, "answered 500")
        else:
            self.taken.setdefault(delivery.payload_id, nonces_of(delivery))
            if mood == "answer lost":
                self._outbox.failed(delivery, "no answer")
            elif mood != "courier dies":
                self._outbox.delivered(delivery)


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_events_loses_nothing_doubles_nothing_and_keeps_the_order(
    rounds: RoundStore, outbox: Outbox, clock: Clock, settings: Settings, seed: int, redis: Redis
) -> None:
    rng = random.Random(seed)
    receiver = FickleReceiver(outbox, rng)
    record = start(rounds)
    n_computed = 0
    held: list[Delivery] = []  # by couriers, some of which hang until their lock is lost
    for _ in range(80):
        event = rng.choice(["compute", "take", "take", "answer", "answer", "time passes"])
        if event == "compute":
            n_computed += len(compute(rounds, record, rng.randint(1, 25)).nonces)
        elif event == "take":
            held += filter(None, [outbox.take(record.round_id)])
        elif event == "answer" and held:
            receiver.answer(held.pop(rng.randrange(len(held))))
        elif event == "time passes":
            clock.now += rng.choice([0.5, settings.callback_interval_sec, outbox.lock_s])
    rounds.switch(record, RoundState.STOPPED)
    while n_outboxes(redis):
        clock.now += LAST_BACKOFF_S
        for delivery in [*held, *filter(None, [outbox.take(record.round_id)])]:
            receiver.answer(delivery)
        held.clear()
    assert [nonce for nonces in receiver.taken.values() for nonce in nonces] == list(
        range(n_computed)
    )
    status = outbox_status(redis, record.round_id)
    assert (status.waiting, status.waiting_bytes, status.delivered) == (0, 0, n_computed)


# Shares of the jobs' callbacks.


def queued_of(jobs: JobStore, client: str, receiver: str) -> str:
    """A job with a callback that nobody has computed."""
    request = REQUEST.model_copy(update={"url": f"http://{receiver}/poc"})
    return jobs.create(NewJob(MODEL, SPEC, request, [5], 1, client=client))


def job_of(jobs: JobStore, client: str, receiver: str) -> str:
    """A job whose callback waits for its receiver."""
    job_id = queued_of(jobs, client, receiver)
    assert isinstance(lease_batch(jobs, job_id, 0, "w1"), Lease)
    complete_batch(jobs, job_id, 0, [VECTOR])
    assert jobs.finish(job_id)
    return job_id


def waiting_of(redis: Redis) -> set[str]:
    found: Any = redis.hkeys("poc:outbox:of_jobs")
    return {job_id.decode() for job_id in found}


def is_not_taken(outbox: Outbox, job_id: str, clock: Clock, tries: int = 1) -> None:
    for _ in range(tries):
        outbox.failed(take(outbox, job_id), "refused")
        clock.now += LAST_BACKOFF_S


@pytest.fixture
def few() -> Settings:
    """64 callbacks, the fewest there may be."""
    return Settings(outbox_max_bytes=64 * 512 * 1024)


@pytest.fixture
def shared(redis: Redis, few: Settings, clock: Clock) -> JobStore:
    return JobStore(redis, few, clock)


@pytest.mark.promise("a client with dead receivers", "does not block other callbacks")
@pytest.mark.parametrize("make", [queued_of, job_of], ids=["queued", "computed"])
def test_one_client_and_one_receiver_have_a_quarter_of_the_callbacks(
    shared: JobStore, redis: Redis, outbox: Outbox, make: Callable[[JobStore, str, str], str]
) -> None:
    first = {make(shared, "greedy", f"dead:{number}") for number in range(16)}
    with pytest.raises(QueueFullError, match=r"a quarter of 64 jobs .* one client"):
        make(shared, "greedy", "alive:1")
    second = {make(shared, f"client {number}", "silent:1") for number in range(16)}
    with pytest.raises(QueueFullError, match=r"a quarter of 64 jobs .* one receiver"):
        make(shared, "another", "silent:1")
    rest = {make(shared, f"other {number}", f"alive:{number}") for number in range(32)}
    with pytest.raises(QueueFullError, match="callbacks of 64 jobs"):
        make(shared, "last", "last:1")
    assert waiting_of(redis) == first | second | rest  # nobody lost one
    one = next(iter(first))
    if make is job_of:
        outbox.delivered(take(outbox, one))
    else:
        shared.cancel(one)
    make(shared, "greedy", "alive:1")


@pytest.mark.promise("a client with dead receivers", "does not block other callbacks")
def test_one_client_and_one_receiver_have_a_quarter_of_the_bytes(
    redis: Redis, few: Settings, clock: Clock, shared: JobStore
) -> None:
    job_of(shared, "greedy", "dead:1")
    size = int(redis.get("poc:outbox:job_bytes") or 0)
    tight = JobStore(redis, few.model_copy(update={"outbox_max_bytes": 4 * size}), clock)
    with pytest.raises(QueueFullError, match="one client"):
        job_of(tight, "greedy", "alive:1")
    with pytest.raises(QueueFullError, match="one receiver"):
        job_of(tight, "other", "dead:1")
    job_of(tight, "other", "alive:1")


def test_callbacks_that_nobody_takes_are_given_up_when_the_node_is_stopped(
    shared: JobStore, outbox: Outbox, redis: Redis, clock: Clock
) -> None:
    hopeless = job_of(shared, "one", "dead:1")
    is_not_taken(outbox, hopeless, clock, BREAKS_AT)
    silent = job_of(shared, "one", "silent:1")
    for _ in range(BREAKS_AT):
        Receivers(redis, clock).silent("silent:1")
    failed_once = job_of(shared, "one", "restarts:1")
    is_not_taken(outbox, failed_once, clock)
    fresh = job_of(shared, "one", "alive:1")
    assert outbox.drop_failing() == 2
    assert waiting_of(redis) == {failed_once, fresh}
    assert outbox.take(silent) is None
    assert int(redis.get("poc:outbox:job_bytes") or 0) == sum(
        outbox.status(job_id).waiting_bytes for job_id in (failed_once, fresh)
    )
