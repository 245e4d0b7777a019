"""Bounds of payloads and outboxes, and payloads that a receiver finds too large."""

import pytest

from poc_core.records import Refusal, RoundRecord, RoundState
from poc_core.state.outbox import LAST_BACKOFF_S, Delivery, Outbox
from tests.harness.outbox import VECTOR, Box, content, nonces_of
from tests.harness.samples import K_DIM, lease_nonces

pytestmark = pytest.mark.usefixtures("a_worker")

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
