"""A payload becomes due at a time, and one courier delivers the payload."""

from typing import Any

import pytest

from poc_core.records import RoundRecord, RoundState
from poc_core.state.outbox import LAST_BACKOFF_S, Delivery
from tests.harness.outbox import URL, Box, nonces_of
from tests.harness.samples import Clock, complete_lease, due_now, known, round_config

pytestmark = pytest.mark.usefixtures("a_worker")


def test_the_first_payload_is_due_an_interval_after_the_start(box: Box) -> None:
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


def test_nor_do_they_when_all_before_them_was_delivered_before_the_stop(
    box: Box, waiting: RoundRecord
) -> None:
    in_hand = box.lease(waiting, 4)
    box.outbox.delivered(box.take(waiting.round_id))
    box.rounds.switch(waiting, RoundState.STOPPED)
    complete_lease(box.rounds, in_hand, "w1", [f"v{nonce}" for nonce in in_hand.nonces])
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


@pytest.mark.parametrize(("retry_after_s", "wait_s"), [(0, 1), (45, 45), (1e9, 600)])
def test_a_receiver_says_how_long_to_wait_up_to_ten_minutes(
    box: Box, waiting: RoundRecord, retry_after_s: float, wait_s: float
) -> None:
    assert box.outbox.failed(box.take(waiting.round_id), "429", retry_after_s) == wait_s
    box.clock.now += wait_s - 0.01
    assert box.outbox.take(waiting.round_id) is None
    box.clock.now += 0.01
    assert box.outbox.take(waiting.round_id) is not None


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
    assert caplog.text.count(f"outbox {bad!r} in Redis cannot be read") == 1


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


# Hosts whose clocks differ.


@pytest.fixture
def ahead(box: Box) -> Box:
    """The same node, as a worker sees it whose host's clock is three minutes ahead."""
    clock = Clock()
    clock.now = box.clock.now + 180
    return Box(box.redis, box.settings, clock)


@pytest.mark.parametrize("state", [RoundState.GENERATING, RoundState.IDLE])
def test_a_worker_whose_clock_is_ahead_delays_neither_the_first_payload(
    box: Box, ahead: Box, state: RoundState
) -> None:
    round_id = box.rounds.store(round_config(), state)
    record = known(box.rounds.read(round_id))
    box.rounds.switch(record, RoundState.GENERATING)
    ahead.compute(record)
    assert due_now(box.outbox) == []
    box.interval_passes()
    assert due_now(box.outbox) == [round_id]
    assert nonces_of(box.take(round_id)) == [0, 1, 2, 3]


def test_nor_a_later_payload(box: Box, ahead: Box, waiting: RoundRecord) -> None:
    box.outbox.delivered(box.take(waiting.round_id))
    ahead.compute(waiting)
    box.interval_passes()
    assert due_now(box.outbox) == [waiting.round_id]
    assert nonces_of(box.take(waiting.round_id)) == [4, 5, 6, 7]


def test_nor_the_last_values_of_a_stopped_round(box: Box, ahead: Box, waiting: RoundRecord) -> None:
    in_hand = ahead.lease(waiting, 4)
    box.outbox.delivered(box.take(waiting.round_id))
    box.rounds.switch(waiting, RoundState.STOPPED)
    complete_lease(ahead.rounds, in_hand, "w1", [f"v{nonce}" for nonce in in_hand.nonces])
    assert due_now(box.outbox) == [waiting.round_id]
    assert nonces_of(box.take(waiting.round_id)) == [4, 5, 6, 7]


def test_nor_the_callback_of_a_job(box: Box, ahead: Box) -> None:
    job_id = ahead.finish()
    assert due_now(box.outbox) == [job_id]
    assert nonces_of(box.take(job_id)) == [5, 6]
