"""An outbox is kept for a limited time."""

from typing import Any

import pytest

from poc_core.records import RoundRecord, RoundState
from poc_core.state.outbox import LAST_BACKOFF_S, OutboxExpiredError
from tests.harness.outbox import Box
from tests.harness.samples import due_now
from tests.harness.stored import n_outboxes

pytestmark = pytest.mark.usefixtures("a_worker")


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
    with pytest.raises(OutboxExpiredError, match=f"the undelivered data of {job_id} is deleted"):
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
