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
from poc_core.state.jobs import JobStore
from poc_core.state.outbox import (
    LAST_BACKOFF_S,
    Delivery,
    Outbox,
    OutboxExpiredError,
    Receivers,
)
from poc_core.state.parsing import BREAKS_AT, OutboxStatus
from poc_core.state.rounds import RoundStore
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
    known,
    lease_batch,
    lease_nonces,
    leased,
    round_config,
)
from tests.harness.stored import n_outboxes, outbox_status

pytestmark = pytest.mark.usefixtures("a_worker")

URL = "http://receiver:9000/poc"
VECTOR = "A" * 32  # 24 bytes of zeros


@pytest.fixture
def settings() -> Settings:
    return Settings(callback_max_artifacts=10)


def content(delivery: Delivery) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(delivery.body)
    return decoded


def nonces_of(delivery: Delivery) -> list[int]:
    return [artifact["nonce"] for artifact in content(delivery)["artifacts"]]


class Box:
    """The outboxes of one node, with the rounds and jobs that fill them."""

    def __init__(self, redis: Redis, settings: Settings, clock: Clock) -> None:
        self.redis, self.settings, self.clock = redis, settings, clock
        self.rounds = RoundStore(redis, settings, clock)
        self.jobs = JobStore(redis, settings, clock)
        self.outbox = Outbox(redis, settings, clock)

    def with_settings(self, **changes: int) -> "Box":
        return Box(self.redis, self.settings.model_copy(update=changes), self.clock)

    def start(self, **changes: Any) -> RoundRecord:
        config = round_config(**changes)
        return known(self.rounds.read(self.rounds.store(config, RoundState.GENERATING)))

    def lease(self, record: RoundRecord, places: int) -> Lease:
        return leased(lease_nonces(self.rounds, record, "w1", places))

    def compute(self, record: RoundRecord, places: int = 4, vector: str = "v{}") -> Lease:
        lease = self.lease(record, places)
        complete_lease(self.rounds, lease, "w1", [vector.format(nonce) for nonce in lease.nonces])
        return lease

    def finish(
        self,
        claimed: dict[int, str] | None = None,
        url: str | None = URL,
        nonces: Sequence[int] = (5, 6),
        values: Sequence[str | None] | None = None,
    ) -> str:
        request = REQUEST.model_copy(update={"url": url})
        job_id = self.jobs.create(NewJob(MODEL, SPEC, request, nonces, len(nonces), claimed))
        assert isinstance(lease_batch(self.jobs, job_id, 0, "w1"), Lease)
        complete_batch(self.jobs, job_id, 0, values or [VECTOR] * len(nonces))
        assert self.jobs.finish(job_id)
        return job_id

    def interval_passes(self) -> None:
        self.clock.now += self.settings.callback_interval_sec

    def take(self, outbox_id: str) -> Delivery:
        return known(self.outbox.take(outbox_id))

    def drain(
        self, outbox_id: str, after_each: Callable[[], None] = lambda: None
    ) -> list[Delivery]:
        """Delivers what is due, and returns it."""
        taken = []
        while (delivery := self.outbox.take(outbox_id)) is not None:
            taken.append(delivery)
            self.outbox.delivered(delivery)
            after_each()
        return taken

    def status(self, outbox_id: str) -> OutboxStatus:
        return outbox_status(self.redis, outbox_id)

    def expires_soon(self, outbox_id: str) -> None:
        for suffix in ("", ":entries"):
            self.redis.expire(f"poc:outbox:{outbox_id}{suffix}", 100)

    def ttl(self, outbox_id: str) -> int:
        ttls = {int(self.redis.ttl(f"poc:outbox:{outbox_id}{key}")) for key in ("", ":entries")}
        (ttl,) = ttls
        return ttl


@pytest.fixture
def box(redis: Redis, settings: Settings, clock: Clock) -> Box:
    return Box(redis, settings, clock)


@pytest.fixture
def waiting(box: Box) -> RoundRecord:
    """A round of which four artifacts are due."""
    record = box.start()
    box.compute(record)
    box.interval_passes()
    return record


# Payloads.


def test_a_payload_of_artifacts_is_what_the_protocol_says(box: Box, waiting: RoundRecord) -> None:
    delivery = box.take(waiting.round_id)
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


def test_a_payload_of_distances_is_what_the_protocol_says(box: Box) -> None:
    record = box.start(spec=DISTANCE_SPEC, terms={"r_target": 1.4})
    lease = box.lease(record, 3)
    complete_lease(box.rounds, lease, "w1", [1.25, 1.5, 1.375])
    box.interval_passes()
    assert content(box.take(record.round_id)) == {
        "public_key": "key",
        "block_hash": "block",
        "block_height": 7,
        "node_id": 0,
        "r_target": 1.4,
        "nonces": [0, 2],
        "dist": [1.25, 1.375],
        "payload_id": f"{record.round_id}-0",
    }


def test_a_slash_at_the_urls_end_does_no_harm(box: Box) -> None:
    record = box.start(url=URL + "/")
    box.compute(record)
    box.interval_passes()
    assert box.take(record.round_id).url == f"{URL}/generated"


def test_the_largest_nonces_keep_their_last_digit(box: Box) -> None:
    record = box.start(node_id=MAX_NONCE - 2**62, node_count=2**62)
    box.compute(record)
    box.interval_passes()
    assert nonces_of(box.take(record.round_id)) == [2**62 - 1, MAX_NONCE]


def test_payloads_come_in_order_and_hold_at_most_callback_max_artifacts(
    box: Box, waiting: RoundRecord
) -> None:
    for places in [4] * 5 + [25]:
        box.compute(waiting, places)
    taken = box.drain(waiting.round_id, box.interval_passes)
    payloads = [nonces_of(delivery) for delivery in taken]
    assert payloads[:3] == [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    assert [nonce for payload in payloads for nonce in payload] == list(range(49))
    assert max(map(len, payloads)) <= 10


def test_a_payload_stays_the_same_over_failures_whatever_is_added(
    box: Box, waiting: RoundRecord
) -> None:
    bodies = set()
    for _ in range(5):
        delivery = box.take(waiting.round_id)
        bodies.add(delivery.body)
        box.outbox.failed(delivery, "500")
        box.compute(waiting)
        box.clock.now += LAST_BACKOFF_S
    assert len(bodies) == 1


def test_a_payload_stays_the_same_when_its_courier_died(box: Box, waiting: RoundRecord) -> None:
    died_with = box.take(waiting.round_id)
    box.compute(waiting)
    box.clock.now += box.outbox.lock_s
    assert box.take(waiting.round_id).body == died_with.body


@pytest.mark.parametrize("is_dropped", [False, True], ids=["delivered", "dropped"])
def test_the_end_of_a_payload_removes_it_alone_and_the_next_has_the_next_number(
    box: Box, waiting: RoundRecord, is_dropped: bool
) -> None:
    first = box.take(waiting.round_id)
    box.compute(waiting)
    assert box.outbox.dropped(first, "answered 500") if is_dropped else box.outbox.delivered(first)
    box.interval_passes()
    second = box.take(waiting.round_id)
    assert (nonces_of(second), second.failures) == ([4, 5, 6, 7], 0)
    assert second.payload_id == f"{waiting.round_id}-1"


def test_the_status_counts_what_waits_and_what_was_delivered(
    box: Box, waiting: RoundRecord
) -> None:
    delivery = box.take(waiting.round_id)
    box.compute(waiting, places=3)
    box.outbox.delivered(delivery)
    status = box.status(waiting.round_id)
    assert (status.waiting, status.delivered, status.dropped, status.failures) == (3, 4, 0, 0)


def test_an_unknown_outbox_has_nothing(box: Box) -> None:
    assert box.outbox.take("0" * 32) is None
    assert box.status("0" * 32).waiting == 0


# When.


def test_the_first_payload_is_due_an_interval_after_its_first_artifact(box: Box) -> None:
    record = box.start()
    box.compute(record)
    box.clock.now += box.settings.callback_interval_sec - 0.1
    box.compute(record)
    assert due_now(box.outbox) == []
    box.clock.now += 0.1
    assert due_now(box.outbox) == [record.round_id]


def test_after_a_delivery_the_next_is_due_an_interval_later(box: Box, waiting: RoundRecord) -> None:
    delivery = box.take(waiting.round_id)
    box.compute(waiting)
    box.outbox.delivered(delivery)
    assert box.outbox.take(waiting.round_id) is None
    box.interval_passes()
    assert due_now(box.outbox) == [waiting.round_id]


def test_an_outbox_that_is_empty_is_never_due(box: Box, waiting: RoundRecord) -> None:
    box.outbox.delivered(box.take(waiting.round_id))
    box.clock.now += 1000
    assert due_now(box.outbox) == []


def test_the_rest_is_due_at_once_when_the_round_stops(box: Box) -> None:
    record = box.start()
    box.compute(record)
    box.rounds.switch(record, RoundState.STOPPED)
    assert due_now(box.outbox) == [record.round_id]


def test_of_a_stopped_round_payload_follows_payload(box: Box, waiting: RoundRecord) -> None:
    for _ in range(5):
        box.compute(waiting)
    box.rounds.switch(waiting, RoundState.STOPPED)
    taken = box.drain(waiting.round_id)
    assert [nonce for delivery in taken for nonce in nonces_of(delivery)] == list(range(24))


def test_the_last_values_of_a_stopped_round_do_not_wait_for_an_interval(
    box: Box, waiting: RoundRecord
) -> None:
    in_hand = box.lease(waiting, 4)
    box.rounds.switch(waiting, RoundState.STOPPED)
    box.outbox.delivered(box.take(waiting.round_id))
    complete_lease(box.rounds, in_hand, "w1", [f"v{nonce}" for nonce in in_hand.nonces])
    assert due_now(box.outbox) == [waiting.round_id]
    assert nonces_of(box.take(waiting.round_id)) == [4, 5, 6, 7]


def test_a_full_payload_follows_at_once(box: Box, waiting: RoundRecord) -> None:
    for _ in range(5):
        box.compute(waiting)
    assert [len(nonces_of(delivery)) for delivery in box.drain(waiting.round_id)] == [8, 8]
    # Less than callback_max_artifacts: it fills up for an interval.
    assert box.status(waiting.round_id).waiting == 8


def test_a_stop_does_not_cut_a_backoff_short(box: Box, waiting: RoundRecord) -> None:
    box.outbox.failed(box.take(waiting.round_id), "500")
    box.rounds.switch(waiting, RoundState.STOPPED)
    assert due_now(box.outbox) == []


def test_the_wait_after_a_failure_doubles_from_1_to_30_seconds(
    box: Box, waiting: RoundRecord
) -> None:
    waits = []
    for _ in range(12):
        waits.append(box.outbox.failed(box.take(waiting.round_id), "500"))
        box.clock.now += waits[-1] - 0.01
        assert box.outbox.take(waiting.round_id) is None
        box.clock.now += 0.01
    assert all(2**n <= wait <= 2 ** (n + 1) for n, wait in enumerate(waits[:4]))
    assert all(15 <= wait <= 30 for wait in waits[4:])


def test_the_wait_differs_from_outbox_to_outbox(box: Box, waiting: RoundRecord) -> None:
    delivery = box.take(waiting.round_id)
    assert len({box.outbox.failed(delivery, "500") for _ in range(10)}) > 1


def test_after_thousands_of_failures_the_wait_is_still_30_seconds(
    box: Box, waiting: RoundRecord
) -> None:
    many = Delivery(waiting.round_id, "token", URL, b"", "id", failures=100_000)
    assert box.outbox.failed(many, "500") <= LAST_BACKOFF_S


def test_failures_are_shown_until_a_delivery(box: Box, waiting: RoundRecord) -> None:
    wait_s = box.outbox.failed(box.take(waiting.round_id), "answered 500")
    status = box.status(waiting.round_id)
    assert (status.failures, status.last_error) == (1, "answered 500")
    assert status.next_at == pytest.approx(box.clock.now + wait_s)
    box.clock.now += wait_s
    box.outbox.delivered(box.take(waiting.round_id))
    status = box.status(waiting.round_id)
    assert (status.failures, status.last_error) == (0, None)


def test_failures_are_counted_over_tries_and_dated_from_the_first(
    box: Box, waiting: RoundRecord
) -> None:
    began = box.clock.now
    for failures in range(3):
        delivery = box.take(waiting.round_id)
        assert delivery.failures == failures
        box.outbox.failed(delivery, "500")
        assert box.status(waiting.round_id).failing_since == began
        box.clock.now += LAST_BACKOFF_S
    box.compute(waiting)
    box.outbox.delivered(box.take(waiting.round_id))
    assert box.status(waiting.round_id).failing_since is None


# Who.


def test_only_one_delivers_at_a_time(box: Box, waiting: RoundRecord) -> None:
    box.take(waiting.round_id)
    assert box.outbox.take(waiting.round_id) is None
    assert due_now(box.outbox) == []


def test_who_renews_the_lock_keeps_it(box: Box, waiting: RoundRecord) -> None:
    slow = box.take(waiting.round_id)
    for _ in range(5):
        box.clock.now += box.outbox.lock_s - 1
        assert box.outbox.renew(slow)
        assert due_now(box.outbox) == []
        assert box.outbox.take(waiting.round_id) is None
    assert box.outbox.delivered(slow)


def test_who_lost_the_lock_changes_nothing(box: Box, waiting: RoundRecord) -> None:
    late = box.take(waiting.round_id)
    box.clock.now += box.outbox.lock_s
    holder = box.take(waiting.round_id)
    assert not box.outbox.renew(late)
    assert not box.outbox.delivered(late)
    box.outbox.failed(late, "500")
    box.outbox.halved(late, "answered 413")
    status = box.status(waiting.round_id)
    assert (status.waiting, status.delivered, status.failures) == (4, 0, 0)
    assert box.outbox.delivered(holder)
    assert box.status(waiting.round_id).delivered == 4


def test_delivered_counts_once(box: Box, waiting: RoundRecord) -> None:
    delivery = box.take(waiting.round_id)
    assert [box.outbox.delivered(delivery), box.outbox.delivered(delivery)] == [True, False]
    assert box.status(waiting.round_id).delivered == 4


def test_dropped_artifacts_are_counted_with_the_reason(box: Box, waiting: RoundRecord) -> None:
    box.outbox.dropped(box.take(waiting.round_id), "answered 500")
    status = box.status(waiting.round_id)
    assert (status.waiting, status.delivered, status.dropped) == (0, 0, 4)
    assert status.last_error == "answered 500"


# Jobs.


def test_a_finished_job_is_due_at_once(box: Box) -> None:
    job_id = box.finish()
    assert due_now(box.outbox) == [job_id]


def test_a_job_without_a_url_has_no_callback(box: Box) -> None:
    box.finish(url=None)
    assert (due_now(box.outbox), box.outbox.n_jobs()) == ([], 0)


def test_a_jobs_artifacts_are_sent_as_the_protocol_says(box: Box) -> None:
    job_id = box.finish()
    delivery = box.take(job_id)
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


def test_a_jobs_verdict_is_sent_as_the_protocol_says(box: Box) -> None:
    job_id = box.finish(claimed={5: VECTOR, 6: VECTOR})
    delivery = box.take(job_id)
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


def test_a_job_finished_twice_has_one_callback(box: Box) -> None:
    job_id = box.finish()
    assert not box.jobs.finish(job_id)
    assert box.redis.llen(f"poc:outbox:{job_id}:entries") == 1


def test_jobs_count_until_their_callback_is_delivered(box: Box) -> None:
    first, second = box.finish(), box.finish()
    assert box.outbox.n_jobs() == 2
    box.outbox.failed(box.take(first), "500")
    box.outbox.delivered(box.take(second))
    assert box.outbox.n_jobs() == 1


# Retention.


def test_every_key_of_an_outbox_expires(box: Box) -> None:
    without: list[Any] = []

    def look() -> None:
        without.extend(key for key in box.redis.scan_iter() if box.redis.ttl(key) == -1)

    job_id = box.finish()
    record = box.start()
    box.compute(record)
    box.interval_passes()
    for outbox_id in (record.round_id, job_id):
        delivery = box.take(outbox_id)
        look()
        box.outbox.failed(delivery, "500")
        look()
    box.clock.now += LAST_BACKOFF_S
    for outbox_id in (record.round_id, job_id):
        box.outbox.delivered(box.take(outbox_id))
        look()
    box.compute(record)
    look()
    assert without == []


@pytest.mark.parametrize("is_stopped", [False, True])
def test_tries_prolong_the_retention_until_the_round_stops(
    box: Box, waiting: RoundRecord, is_stopped: bool
) -> None:
    if is_stopped:
        box.rounds.switch(waiting, RoundState.STOPPED)
    box.expires_soon(waiting.round_id)
    box.outbox.failed(box.take(waiting.round_id), "500")
    assert (box.ttl(waiting.round_id) > 100) is not is_stopped


def test_another_round_does_not_prolong_the_retention_of_the_last(
    box: Box, waiting: RoundRecord
) -> None:
    box.rounds.switch(waiting, RoundState.STOPPED)
    box.expires_soon(waiting.round_id)
    box.start()
    assert box.ttl(waiting.round_id) <= 100


def test_a_jobs_retention_counts_from_its_end_whatever_is_tried(box: Box) -> None:
    job_id = box.finish()
    box.expires_soon(job_id)
    box.outbox.failed(box.take(job_id), "500")
    assert box.ttl(job_id) <= 100


def test_a_job_whose_retention_ended_no_longer_counts(box: Box) -> None:
    job_id = box.finish()
    assert (n_outboxes(box.redis), box.outbox.n_jobs()) == (1, 1)
    box.redis.delete(f"poc:outbox:{job_id}", f"poc:outbox:{job_id}:entries")
    with pytest.raises(
        OutboxExpiredError, match=f"what {job_id} still had for its receiver is gone"
    ):
        box.outbox.take(job_id)
    assert box.outbox.take(job_id) is None
    assert (due_now(box.outbox), n_outboxes(box.redis), box.outbox.n_jobs()) == ([], 0, 0)


def test_a_jobs_outbox_without_its_entry_is_no_longer_due(box: Box) -> None:
    job_id = box.finish()
    box.redis.delete(f"poc:outbox:{job_id}:entries")
    assert box.outbox.take(job_id) is None
    assert due_now(box.outbox) == []


def test_a_round_that_was_delivered_to_the_end_expires_in_silence(
    box: Box, waiting: RoundRecord
) -> None:
    box.outbox.delivered(box.take(waiting.round_id))
    box.redis.delete(f"poc:outbox:{waiting.round_id}")
    assert box.outbox.take(waiting.round_id) is None


# Bytes.


LARGE = "{:0>15000}"  # 15 KB, as of a k_dim of 4096 and more


@pytest.fixture
def bounded(box: Box) -> Box:
    """A million artifacts a payload, but only 100 kB, and 1 MB in the outbox."""
    return box.with_settings(
        callback_max_artifacts=10**6, callback_max_bytes=100_000, outbox_max_bytes=1_000_000
    )


def test_a_payload_is_bounded_by_its_bytes(bounded: Box) -> None:
    record = bounded.start()
    for places in (3, 3, 3, 3, 20):  # the last: more than a payload's bytes in one lease
        bounded.compute(record, places, LARGE)
    bounded.rounds.switch(record, RoundState.STOPPED)
    taken = bounded.drain(record.round_id)
    assert max(len(delivery.body) for delivery in taken) < 101_000
    assert [nonce for delivery in taken for nonce in nonces_of(delivery)] == list(range(32))
    assert bounded.status(record.round_id).waiting_bytes == 0


def test_an_artifact_larger_than_a_payloads_bytes_goes_alone(bounded: Box) -> None:
    record = bounded.start()
    bounded.compute(record, 2, "{:0>200000}")
    bounded.rounds.switch(record, RoundState.STOPPED)
    assert [nonces_of(delivery) for delivery in bounded.drain(record.round_id)] == [[0], [1]]


def test_a_round_pauses_at_outbox_max_bytes_and_goes_on_below(bounded: Box) -> None:
    record = bounded.start()
    bounded.compute(record, 67, LARGE)
    assert bounded.status(record.round_id).waiting_bytes > 1_000_000
    assert lease_nonces(bounded.rounds, record, "w1", 1) is Refusal.FULL
    bounded.interval_passes()
    bounded.outbox.delivered(bounded.take(record.round_id))
    bounded.lease(record, 1)


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
    box: Box, waiting: RoundRecord, most: int
) -> None:
    for places in (4, 4, 1, 7, 4, 9):  # entries that must be divided, and some that need not
        box.compute(waiting, places)
    box.rounds.switch(waiting, RoundState.STOPPED)
    taken = deliver_below(box.outbox, waiting.round_id, most)
    assert [nonce for delivery in taken for nonce in nonces_of(delivery)] == list(range(33))
    numbers = [int(delivery.payload_id.rpartition("-")[2]) for delivery in taken]
    assert numbers == sorted(set(numbers))
    status = box.status(waiting.round_id)
    assert (status.waiting, status.waiting_bytes) == (0, 0)
    assert (status.delivered, status.last_error) == (33, None)


def test_halves_have_ids_of_their_own_that_stay_over_failures(
    box: Box, waiting: RoundRecord
) -> None:
    whole = box.take(waiting.round_id)
    assert box.outbox.halved(whole, "answered 413")
    first = box.take(waiting.round_id)
    assert (nonces_of(first), first.payload_id) == ([0, 1], f"{waiting.round_id}-1")
    box.outbox.failed(first, "answered 500")
    box.compute(waiting)
    box.clock.now += LAST_BACKOFF_S
    again = box.take(waiting.round_id)
    assert (again.body, again.payload_id) == (first.body, first.payload_id)


def test_a_receiver_that_found_one_too_large_gets_slowly_larger_ones_again(
    box: Box, waiting: RoundRecord
) -> None:
    for _ in range(100):
        box.compute(waiting, places=1)
    box.rounds.switch(waiting, RoundState.STOPPED)
    box.outbox.halved(box.take(waiting.round_id), "answered 413")
    sizes = [len(nonces_of(delivery)) for delivery in box.drain(waiting.round_id)]
    assert sizes[0] == 5
    assert max(sizes) == 10
    assert sizes[:-1] == sorted(sizes[:-1])


def test_a_single_artifact_that_is_too_large_is_still_its_deliverers_to_end(box: Box) -> None:
    record = box.start()
    box.compute(record, places=1)
    box.interval_passes()
    delivery = box.take(record.round_id)
    assert not box.outbox.halved(delivery, "answered 413")
    box.outbox.failed(delivery, "answered 413")
    status = box.status(record.round_id)
    assert (status.waiting, status.failures, status.last_error) == (1, 1, "answered 413")


@pytest.mark.parametrize(
    ("most", "parts"), [(2, [[0, 1], [2], [3, 4]]), (1, [[0], [1], [2], [3], [4]])]
)
def test_a_jobs_answer_that_is_too_large_goes_in_halves(
    box: Box, most: int, parts: list[list[int]]
) -> None:
    job_id = box.finish(nonces=list(range(5)))
    taken = deliver_below(box.outbox, job_id, most)
    assert [nonces_of(delivery) for delivery in taken] == parts  # each is a complete body
    assert len({delivery.payload_id for delivery in taken}) == len(parts)
    for delivery in taken:
        told = content(delivery)
        assert (told["request_id"], told["payload_id"]) == (job_id, delivery.payload_id)
        assert told["encoding"]["k_dim"] == K_DIM
    assert box.outbox.n_jobs() == 0
    assert box.redis.get("poc:outbox:job_bytes") == b"0"


def test_what_was_excluded_comes_with_the_first_half_alone(box: Box) -> None:
    job_id = box.finish(nonces=[1, 2, 3], values=[VECTOR, None, VECTOR])
    first, second = deliver_below(box.outbox, job_id, most=1)
    assert content(first)["excluded_nonces"] == [2]
    assert "excluded_nonces" not in content(second)


def test_a_verdict_cannot_be_halved(box: Box) -> None:
    job_id = box.finish(claimed={5: VECTOR, 6: VECTOR})
    assert not box.outbox.halved(box.take(job_id), "answered 413")


# What is said of those that are due.


def test_an_outbox_is_announced_once_until_whoever_was_told_must_be_dead(box: Box) -> None:
    job_id, record = box.finish(), box.start()
    box.compute(record)
    box.interval_passes()
    assert {due.outbox_id: due.is_round for due in box.outbox.announce()} == {
        record.round_id: True,
        job_id: False,
    }
    assert box.outbox.announce() == []
    box.clock.now += box.outbox.lock_s
    assert len(box.outbox.announce()) == 2


@pytest.mark.parametrize(
    "fields", [{"bytes": "many"}, {"url": b"\xff"}, None], ids=["no number", "no text", "no hash"]
)
def test_an_outbox_that_cannot_be_read_keeps_no_other_from_being_announced(
    box: Box, waiting: RoundRecord, caplog: pytest.LogCaptureFixture, fields: Any
) -> None:
    bad = f"bad-{fields}"
    box.redis.zadd("poc:outbox:due", {bad: 0.0})
    if fields is None:
        box.redis.set(f"poc:outbox:{bad}", "no hash")
    else:
        box.redis.hset(f"poc:outbox:{bad}", mapping=fields)
    for _ in range(3):
        assert [due.outbox_id for due in box.outbox.announce()] == [waiting.round_id]
        box.clock.now += box.outbox.lock_s
    assert caplog.text.count("in Redis cannot be read") == 1


def test_a_payload_that_cannot_be_read_is_said_once_and_kept(
    box: Box, waiting: RoundRecord, caplog: pytest.LogCaptureFixture
) -> None:
    box.redis.hset(f"poc:outbox:{waiting.round_id}", "head", "{")
    for _ in range(3):
        assert box.outbox.take(waiting.round_id) is None
        box.clock.now += box.outbox.lock_s
    assert caplog.text.count(f"outbox '{waiting.round_id}' in Redis cannot be read") == 1
    assert box.status(waiting.round_id).waiting == 4


def test_an_announcement_says_for_whom_it_is_and_keeps_the_secret(box: Box) -> None:
    box.compute(box.start(url="http://user:secret@receiver:9000/x"))
    box.interval_passes()
    (due,) = box.outbox.announce()
    assert due.receiver == "receiver:9000"
    assert due.waiting_bytes == box.status(due.outbox_id).waiting_bytes > 0


# Places of jobs.


def test_jobs_that_come_quickly_do_not_pass_one_for_each_half_mebibyte_of_the_outbox(
    box: Box,
) -> None:
    box = box.with_settings(outbox_max_bytes=70 * 512 * 1024, max_queued_nonces=10**6)
    jobs, outbox = box.jobs, box.outbox
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
def test_a_job_that_ends_without_a_callback_gives_its_place_back(box: Box, end: str) -> None:
    job_id = box.jobs.create(NewJob(MODEL, SPEC, REQUEST.model_copy(update={"url": URL}), [5], 1))
    assert box.outbox.n_jobs() == 1
    if end == "fail":
        box.jobs.fail(job_id, "no engine")
    else:
        box.jobs.cancel(job_id)
    assert (box.outbox.n_jobs(), due_now(box.outbox)) == (0, [])


def test_the_place_of_a_job_that_expired_is_found_again(box: Box) -> None:
    gone = box.jobs.create(NewJob(MODEL, SPEC, REQUEST.model_copy(update={"url": URL}), [5], 1))
    waits = box.finish()
    box.redis.delete(f"poc:job:{gone}")
    box.jobs.recount()
    assert box.redis.hkeys("poc:outbox:of_jobs") == [waits.encode()]


def test_jobs_callbacks_are_bounded_by_their_bytes_together(box: Box) -> None:
    box = box.with_settings(outbox_max_bytes=1024)
    first = box.finish(nonces=list(range(30)))
    with pytest.raises(QueueFullError, match="1024 bytes of them"):
        box.finish()
    box.jobs.recount()  # changes nothing
    with pytest.raises(QueueFullError):
        box.finish()
    box.outbox.delivered(box.take(first))
    box.finish()


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
    box: Box, seed: int
) -> None:
    rng = random.Random(seed)
    receiver = FickleReceiver(box.outbox, rng)
    record = box.start()
    n_computed = 0
    held: list[Delivery] = []  # by couriers, some of which hang until their lock is lost
    for _ in range(80):
        event = rng.choice(["compute", "take", "take", "answer", "answer", "time passes"])
        if event == "compute":
            n_computed += len(box.compute(record, rng.randint(1, 25)).nonces)
        elif event == "take":
            held += filter(None, [box.outbox.take(record.round_id)])
        elif event == "answer" and held:
            receiver.answer(held.pop(rng.randrange(len(held))))
        elif event == "time passes":
            box.clock.now += rng.choice(
                [0.5, box.settings.callback_interval_sec, box.outbox.lock_s]
            )
    box.rounds.switch(record, RoundState.STOPPED)
    while n_outboxes(box.redis):
        box.clock.now += LAST_BACKOFF_S
        for delivery in [*held, *filter(None, [box.outbox.take(record.round_id)])]:
            receiver.answer(delivery)
        held.clear()
    assert [nonce for nonces in receiver.taken.values() for nonce in nonces] == list(
        range(n_computed)
    )
    status = box.status(record.round_id)
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


def is_not_taken(box: Box, job_id: str, tries: int = 1) -> None:
    for _ in range(tries):
        box.outbox.failed(box.take(job_id), "refused")
        box.clock.now += LAST_BACKOFF_S


@pytest.fixture
def few(box: Box) -> Box:
    """64 callbacks, the fewest there may be."""
    return box.with_settings(outbox_max_bytes=64 * 512 * 1024)


@pytest.mark.promise("a client with dead receivers", "does not block other callbacks")
@pytest.mark.parametrize("make", [queued_of, job_of], ids=["queued", "computed"])
def test_one_client_and_one_receiver_have_a_quarter_of_the_callbacks(
    few: Box, make: Callable[[JobStore, str, str], str]
) -> None:
    first = {make(few.jobs, "greedy", f"dead:{number}") for number in range(16)}
    with pytest.raises(QueueFullError, match=r"a quarter of 64 jobs .* one client"):
        make(few.jobs, "greedy", "alive:1")
    second = {make(few.jobs, f"client {number}", "silent:1") for number in range(16)}
    with pytest.raises(QueueFullError, match=r"a quarter of 64 jobs .* one receiver"):
        make(few.jobs, "another", "silent:1")
    rest = {make(few.jobs, f"other {number}", f"alive:{number}") for number in range(32)}
    with pytest.raises(QueueFullError, match="callbacks of 64 jobs"):
        make(few.jobs, "last", "last:1")
    assert waiting_of(few.redis) == first | second | rest  # nobody lost one
    one = next(iter(first))
    if make is job_of:
        few.outbox.delivered(few.take(one))
    else:
        few.jobs.cancel(one)
    make(few.jobs, "greedy", "alive:1")


@pytest.mark.promise("a client with dead receivers", "does not block other callbacks")
def test_one_client_and_one_receiver_have_a_quarter_of_the_bytes(
    few: Box,
) -> None:
    job_of(few.jobs, "greedy", "dead:1")
    size = int(few.redis.get("poc:outbox:job_bytes") or 0)
    tight = few.with_settings(outbox_max_bytes=4 * size).jobs
    with pytest.raises(QueueFullError, match="one client"):
        job_of(tight, "greedy", "alive:1")
    with pytest.raises(QueueFullError, match="one receiver"):
        job_of(tight, "other", "dead:1")
    job_of(tight, "other", "alive:1")


def test_callbacks_that_nobody_takes_are_given_up_when_the_node_is_stopped(
    few: Box,
) -> None:
    hopeless = job_of(few.jobs, "one", "dead:1")
    is_not_taken(few, hopeless, BREAKS_AT)
    silent = job_of(few.jobs, "one", "silent:1")
    for _ in range(BREAKS_AT):
        Receivers(few.redis, few.clock).silent("silent:1")
    failed_once = job_of(few.jobs, "one", "restarts:1")
    is_not_taken(few, failed_once)
    fresh = job_of(few.jobs, "one", "alive:1")
    assert few.outbox.drop_failing() == 2
    assert waiting_of(few.redis) == {failed_once, fresh}
    assert few.outbox.take(silent) is None
    assert int(few.redis.get("poc:outbox:job_bytes") or 0) == sum(
        few.outbox.status(job_id).waiting_bytes for job_id in (failed_once, fresh)
    )
