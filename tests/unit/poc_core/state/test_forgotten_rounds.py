"""A round that another has followed: kept while anything of it is computed or delivered, no
longer."""

from typing import Any

import pytest
from redis import Redis

from poc_core.records import Lease, RoundRecord, RoundState
from poc_core.state import keys
from poc_core.state.outbox import Delivery, Outbox
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import Clock, complete_lease, lease_nonces, round_config, work_of

pytestmark = pytest.mark.usefixtures("a_worker")


def start(rounds: RoundStore) -> RoundRecord:
    record = rounds.read(rounds.store(round_config(), RoundState.GENERATING))
    assert record is not None
    return record


def take(rounds: RoundStore, record: RoundRecord, places: int = 4) -> Lease:
    lease = lease_nonces(rounds, record, "w1", places)
    assert isinstance(lease, Lease)
    return lease


def complete(rounds: RoundStore, lease: Lease) -> bool:
    # One nonce has no finite state: what a round says of those is a key of its own.
    return complete_lease(rounds, lease, "w1", [None, *(f"v{nonce}" for nonce in lease.nonces[1:])])


def stop(rounds: RoundStore, record: RoundRecord) -> None:
    rounds.switch(record, RoundState.STOPPED)


def next_delivery(outbox: Outbox, record: RoundRecord) -> Delivery:
    delivery = outbox.take(record.round_id)
    assert delivery is not None
    return delivery


def left_of(redis: Redis, record: RoundRecord) -> list[str]:
    found: Any = redis.keys("*")
    named = [key.decode() for key in found if record.round_id in key.decode()]
    due: Any = redis.zrange(keys.OUTBOX_DUE, 0, -1)
    followed: Any = redis.smembers(keys.FOLLOWED_ROUNDS)
    return named + [record.round_id for one in (*due, *followed) if record.round_id.encode() == one]


@pytest.fixture
def ended(rounds: RoundStore) -> RoundRecord:
    """A stopped round of which nothing is in hand, and something waits for its receiver."""
    record = start(rounds)
    lease = take(rounds, record)
    complete(rounds, lease)
    work_of(rounds).release(take(rounds, record))
    stop(rounds, record)
    return record


def test_nothing_is_left_of_a_delivered_round_once_another_begins(
    rounds: RoundStore, outbox: Outbox, redis: Redis, ended: RoundRecord
) -> None:
    outbox.delivered(next_delivery(outbox, ended))
    following = start(rounds)
    rounds.forget_followed()
    assert left_of(redis, ended) == []
    assert rounds.current() == following


def test_a_round_without_a_receiver_goes_as_well(rounds: RoundStore, redis: Redis) -> None:
    record = rounds.read(rounds.store(round_config(url=None), RoundState.GENERATING))
    assert record is not None
    complete(rounds, take(rounds, record))
    stop(rounds, record)
    start(rounds)
    rounds.forget_followed()
    assert left_of(redis, record) == []


def test_a_round_is_kept_until_its_late_receiver_has_everything(
    rounds: RoundStore, outbox: Outbox, redis: Redis, ended: RoundRecord, clock: Clock
) -> None:
    start(rounds)
    wait_s = outbox.failed(next_delivery(outbox, ended), "503")
    rounds.forget_followed()
    clock.now += wait_s
    assert outbox.delivered(next_delivery(outbox, ended))
    rounds.forget_followed()
    assert left_of(redis, ended) == []


def test_a_lease_that_is_in_hand_still_counts_and_is_delivered(
    rounds: RoundStore, outbox: Outbox, redis: Redis
) -> None:
    record = start(rounds)
    lease = take(rounds, record)
    stop(rounds, record)
    start(rounds)
    rounds.forget_followed()
    assert complete(rounds, lease)
    assert outbox.delivered(next_delivery(outbox, record))
    rounds.forget_followed()
    assert left_of(redis, record) == []


def test_a_lease_keeps_a_round_while_its_worker_lives(
    rounds: RoundStore, workers: WorkerRegistry, redis: Redis
) -> None:
    record = start(rounds)
    take(rounds, record)
    stop(rounds, record)
    start(rounds)
    rounds.forget_followed()
    assert left_of(redis, record)
    workers.remove("w1")
    rounds.forget_followed()
    assert left_of(redis, record) == []


def test_the_current_round_stays_when_it_is_over_and_delivered(
    rounds: RoundStore, outbox: Outbox, ended: RoundRecord
) -> None:
    outbox.delivered(next_delivery(outbox, ended))
    rounds.forget_followed()
    found = rounds.read(ended.round_id)
    assert found is not None
    assert (found.state, found.n_processed) == (RoundState.STOPPED, 4)
