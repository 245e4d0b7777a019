"""Each computed nonce counts once and waits for delivery."""

import pytest
from redis import Redis

from poc_core.records import RoundRecord, RoundState
from poc_core.state import entries
from poc_core.state.overview import Overviews
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import DISTANCE_SPEC, Clock, complete_lease, known
from tests.harness.stored import outbox_status
from tests.harness.stored_rounds import complete, in_outbox, read, release, start, take


def excluded(redis: Redis, record: RoundRecord) -> list[int]:
    seen = known(Overviews(redis).read().round)
    assert seen.record.round_id == record.round_id
    return list(seen.excluded)


def test_a_completed_lease_is_counted_once_and_waits_for_delivery(
    rounds: RoundStore, redis: Redis
) -> None:
    record = start(rounds)
    lease = take(rounds, record)
    for is_first in (True, False):
        assert complete(rounds, lease) is is_first
        counted = read(rounds, record.round_id)
        assert (counted.n_processed, counted.n_valid, counted.n_excluded) == (4, 4, 0)
        assert outbox_status(redis, record.round_id).waiting == 4


@pytest.mark.parametrize(("held", "taken"), [(4, 4), (8, 4)], ids=["whole", "split"])
def test_a_lease_that_another_worker_took_over_counts_once(
    rounds: RoundStore, workers: WorkerRegistry, clock: Clock, held: int, taken: int
) -> None:
    record = start(rounds)
    lease = take(rounds, record, "w1", places=held)
    workers.remove("w1")
    clock.now += 1
    again = take(rounds, record, "w2", places=taken)
    is_whole = held == taken
    assert [complete(rounds, lease, "w1"), complete(rounds, again, "w2")] == [
        is_whole,
        not is_whole,
    ]
    assert read(rounds, record.round_id).n_processed == 4


def test_a_lost_lease_may_still_be_completed_while_nobody_else_has_it(rounds: RoundStore) -> None:
    record = start(rounds)
    lease = take(rounds, record, "w1")
    release(rounds, lease, "w1")
    assert complete(rounds, lease, "w1")
    assert take(rounds, record, "w2").place == 4


def test_what_is_completed_after_the_stop_is_counted_and_delivered(
    rounds: RoundStore, redis: Redis
) -> None:
    record = start(rounds)
    lease = take(rounds, record)
    rounds.switch(record, RoundState.STOPPED)
    assert complete(rounds, lease)
    assert read(rounds, record.round_id).n_processed == 4
    assert outbox_status(redis, record.round_id).waiting == 4


def test_a_round_without_a_url_keeps_nothing_to_deliver(rounds: RoundStore, redis: Redis) -> None:
    record = start(rounds, url=None)
    complete(rounds, take(rounds, record))
    assert read(rounds, record.round_id).n_processed == 4
    assert list(redis.scan_iter("poc:outbox*")) == []


def test_nonces_without_a_finite_state_are_excluded_and_named(
    rounds: RoundStore, redis: Redis
) -> None:
    record = start(rounds)
    lease = take(rounds, record)
    complete_lease(rounds, lease, "w1", ["a", None, "c", None])
    counted = read(rounds, record.round_id)
    assert (counted.n_processed, counted.n_valid, counted.n_excluded) == (4, 2, 2)
    assert excluded(redis, record) == [1, 3]
    assert in_outbox(redis, record) == [0, 2]


def test_only_distances_below_the_target_are_reported(rounds: RoundStore, redis: Redis) -> None:
    record = start(rounds, spec=DISTANCE_SPEC, terms={"r_target": 1.4})
    complete_lease(rounds, take(rounds, record), "w1", [1.39, 1.4, 1.41, 0.2])
    counted = read(rounds, record.round_id)
    assert (counted.n_processed, counted.n_valid) == (4, 2)
    assert in_outbox(redis, record) == [0, 3]


def test_reported_nonces_are_listed_by_count_and_page_by_page(
    rounds: RoundStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poc_core.state.work._MOST_KEPT", 20)
    record = start(rounds, spec=DISTANCE_SPEC, terms={"r_target": 1.4})
    for _ in range(5):
        lease = take(rounds, record, places=7)
        complete_lease(rounds, lease, "w1", [1.1, 1.5, 1.2, 1.3, 1.3, 1.3, 1.3])
    valid = [nonce for nonce in range(35) if nonce % 7 != 1]

    def page(first: int | None, most: int) -> tuple[int, list[int]]:
        found = rounds.reported(record.round_id, first, most)
        return found.first, [nonce for nonce, _ in found.pairs]

    assert page(None, 4) == (26, valid[-4:])
    assert page(None, 1000) == (10, valid[10:])  # the last 20 are kept
    assert page(12, 5) == (12, valid[12:17])
    assert page(0, 5) == (10, valid[10:15])  # what is gone is passed over
    assert page(28, 5) == (28, valid[28:])
    assert page(100, 5) == (100, [])


def test_reported_values_may_be_lists(rounds: RoundStore, redis: Redis) -> None:
    record = start(rounds, spec=DISTANCE_SPEC, terms={"r_target": 1.4})
    redis.rpush(f"poc:round:{record.round_id}:valid", entries.pack([(3, [1, [2, 3]])]))
    assert list(rounds.reported(record.round_id).pairs) == [(3, [1, [2, 3]])]


def test_of_very_many_excluded_nonces_the_last_ones_are_named(
    rounds: RoundStore, redis: Redis
) -> None:
    record = start(rounds)
    for _ in range(2):
        lease = take(rounds, record, places=1024)
        complete_lease(rounds, lease, "w1", [None] * 1024)
    assert excluded(redis, record) == list(range(2048 - 1000, 2048))
    assert read(rounds, record.round_id).n_excluded == 2048


def test_the_number_of_values_must_be_that_of_the_nonces(rounds: RoundStore) -> None:
    lease = take(rounds, start(rounds))
    with pytest.raises(ValueError, match="zip"):
        complete_lease(rounds, lease, "w1", ["a"])
