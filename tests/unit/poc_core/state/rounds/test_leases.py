"""Places of a round are leased, each to one worker at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
from redis import Redis

from poc_core.fields import MAX_NONCE
from poc_core.records import Lease, Refusal, RoundState
from poc_core.settings import Settings
from poc_core.state.outbox import Outbox
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import MODEL, Clock, due_now, known, lease_nonces, work_of, worker_record
from tests.harness.stored_rounds import Serve, complete, in_outbox, read, release, start, take
from tests.planted.forgetful import forgetting


def nonces_of(leases: Sequence[Lease]) -> list[int]:
    return [nonce for lease in leases for nonce in lease.nonces]


@pytest.mark.parametrize(
    ("place", "nonces"),
    [
        ({"node_id": 0, "node_count": 3}, [0, 3, 6, 9]),
        ({"node_id": 2, "node_count": 3}, [2, 5, 8, 11]),
        ({"node_id": 1, "node_count": 3, "group_id": 0, "n_groups": 2}, [1, 7, 13, 19]),
        ({"node_id": 1, "node_count": 3, "group_id": 1, "n_groups": 2}, [4, 10, 16, 22]),
    ],
    ids=str,
)
def test_the_nonces_are_those_of(
    rounds: RoundStore, place: dict[str, Any], nonces: list[int]
) -> None:
    assert list(take(rounds, start(rounds, **place)).nonces) == nonces


def test_a_dead_workers_lease_goes_to_the_next_that_asks_a_second_later(
    rounds: RoundStore, workers: WorkerRegistry, clock: Clock
) -> None:
    record = start(rounds)
    lost = take(rounds, record, "w1")
    workers.remove("w1")
    assert take(rounds, record, "w2").place == 4
    clock.now += 1
    assert take(rounds, record, "w2") == lost


def test_a_lease_that_its_workers_heartbeat_does_not_list_goes_to_the_next_that_asks(
    rounds: RoundStore, workers: WorkerRegistry, clock: Clock
) -> None:
    record = start(rounds)
    work = work_of(rounds, "w1")
    leases: Any = [work.lease(MODEL, round=record, places=4) for _ in range(2)]
    lost, held = (found[0] for found in leases)
    workers.heartbeat(worker_record("w1"), work.hand.summary())
    later: Any = work.lease(MODEL, round=record, places=4)  # after its heartbeat
    work.hand.drop(lost.number)
    clock.now += 1
    assert take(rounds, record, "w2").place == 12
    workers.heartbeat(worker_record("w1"), work.hand.summary())
    clock.now += 1
    assert [take(rounds, record, "w2").place for _ in range(2)] == [lost.place, 16]
    assert [work.complete(lease, ["v"] * 4) for lease in (held, later[0])] == [True, True]


def test_what_redis_forgot_of_a_round_is_computed_again_and_counted_once(
    rounds: RoundStore, redis: Redis
) -> None:
    record = start(rounds)
    first = take(rounds, record)
    with forgetting(redis, "poc:round:*", "poc:outbox:*"):
        second = take(rounds, record)
        assert complete(rounds, first)
    assert not complete(rounds, second)  # as if it had never been leased
    assert take(rounds, record, "w2").nonces == second.nonces
    assert [complete(rounds, one) for one in (first, second, second)] == [True, True, False]
    assert read(rounds, record.round_id).n_processed == 8
    assert in_outbox(redis, record) == nonces_of([first, second])


def test_of_a_lease_that_came_back_the_first_values_count(rounds: RoundStore, redis: Redis) -> None:
    record = start(rounds)
    first = take(rounds, record)
    release(rounds, first, "w1")
    again = take(rounds, record, "w2")
    assert [complete(rounds, first), complete(rounds, again, "w2")] == [True, False]
    assert in_outbox(redis, record) == nonces_of([first])


def test_the_lowest_of_the_lost_leases_goes_first(
    rounds: RoundStore, workers: WorkerRegistry, serve: Serve, clock: Clock
) -> None:
    record = start(rounds)
    for worker in ("w5", "w4", "w3"):  # as strings, "8:4" would come after "12:4"
        serve(worker)
        take(rounds, record, worker)
    take(rounds, record, "w1")
    for worker in ("w1", "w3", "w4"):
        workers.remove(worker)
    clock.now += 1
    first = take(rounds, record, "w2")
    second = take(rounds, record, "w2")
    third = take(rounds, record, "w5")
    assert [first.place, second.place, third.place] == [4, 8, 12]


def test_a_lost_lease_that_is_too_large_is_split(
    rounds: RoundStore, workers: WorkerRegistry, clock: Clock
) -> None:
    record = start(rounds)
    take(rounds, record, "w1", places=8)
    workers.remove("w1")
    clock.now += 1
    first = take(rounds, record, "w2", places=3)
    rest = take(rounds, record, "w2", places=16)
    assert [(lease.place, len(lease.nonces)) for lease in (first, rest)] == [(0, 3), (3, 5)]


@pytest.mark.parametrize("state", [RoundState.IDLE, RoundState.VALIDATING, RoundState.STOPPED])
def test_a_round_that_does_not_generate_leases_nothing(
    rounds: RoundStore, state: RoundState
) -> None:
    record = start(rounds)
    rounds.switch(record, state)
    assert lease_nonces(rounds, record, "w1", 4) is None


def test_a_second_generation_phase_goes_on_where_the_first_ended(rounds: RoundStore) -> None:
    record = start(rounds)
    complete(rounds, take(rounds, record))
    rounds.switch(record, RoundState.VALIDATING)
    rounds.switch(record, RoundState.GENERATING)
    assert take(rounds, record).place == 4


def test_a_round_whose_sequence_has_ended_ends_with_its_last_nonce(
    rounds: RoundStore, outbox: Outbox, clock: Clock
) -> None:
    record = start(rounds, node_id=5, node_count=2**62)
    first, last = take(rounds, record, "w1", 1), take(rounds, record, "w2", 1)
    complete(rounds, last, "w2")
    assert lease_nonces(rounds, record, "w2", 1) is Refusal.EXHAUSTED
    assert read(rounds, record.round_id).state is RoundState.GENERATING  # w1 still computes
    clock.now += 3
    complete(rounds, first)
    ended = read(rounds, record.round_id)
    assert (ended.state, ended.is_exhausted) == (RoundState.STOPPED, True)
    assert ended.stopped_at == clock.now
    assert rounds.generating(record.config.model) is None
    assert lease_nonces(rounds, record, "w1", 1) is None
    assert due_now(outbox) == [record.round_id]  # what is left does not wait for the interval


def test_a_round_without_any_nonce_ends_when_a_worker_asks(rounds: RoundStore) -> None:
    record = start(rounds, node_id=2**63 - 1, node_count=2**63, group_id=1, n_groups=2)
    assert lease_nonces(rounds, record, "w1", 4) is Refusal.EXHAUSTED
    assert read(rounds, record.round_id).state is RoundState.STOPPED


def test_a_round_does_not_end_while_a_lost_lease_of_it_is_to_be_computed(
    rounds: RoundStore, workers: WorkerRegistry, clock: Clock
) -> None:
    record = start(rounds, node_count=2**62)
    first, _ = take(rounds, record, "w1", 1), take(rounds, record, "w2", 1)
    workers.remove("w2")
    clock.now += 1
    complete(rounds, first)
    again = take(rounds, record, "w1", 1)
    release(rounds, again, "w1")
    assert read(rounds, record.round_id).state is RoundState.GENERATING
    complete(rounds, take(rounds, record, "w1", 1))
    ended = read(rounds, record.round_id)
    assert (ended.state, ended.n_processed) == (RoundState.STOPPED, 2)


def test_a_round_that_was_stopped_before_its_sequence_ended_is_not_exhausted(
    rounds: RoundStore,
) -> None:
    record = start(rounds, node_count=2**62)
    lease = take(rounds, record)
    rounds.switch(record, RoundState.STOPPED)
    complete(rounds, lease)
    assert not read(rounds, record.round_id).is_exhausted


@pytest.mark.parametrize(
    ("node_id", "nonces"),
    [(5, [5, 2**62 + 5]), (MAX_NONCE - 2**62, [2**62 - 1, MAX_NONCE])],
)
def test_the_sequence_ends_at_the_largest_nonce_and_a_lost_lease_is_still_handed_on(
    rounds: RoundStore, workers: WorkerRegistry, clock: Clock, node_id: int, nonces: list[int]
) -> None:
    record = start(rounds, node_id=node_id, node_count=2**62)
    lost = take(rounds, record, "w1")
    assert list(lost.nonces) == nonces
    assert lease_nonces(rounds, record, "w2", 4) is Refusal.EXHAUSTED
    workers.remove("w1")
    clock.now += 1
    assert take(rounds, record, "w2") == lost


def test_a_full_outbox_pauses_the_round_until_some_is_delivered(
    redis: Redis, clock: Clock, settings: Settings
) -> None:
    small = settings.model_copy(update={"outbox_max_bytes": 1})
    rounds, outbox = RoundStore(redis, small, clock), Outbox(redis, small, clock)
    record = start(rounds)
    complete(rounds, take(rounds, record))
    assert lease_nonces(rounds, record, "w1", 4) is Refusal.FULL
    clock.now += settings.callback_interval_sec
    delivery = known(outbox.take(record.round_id))
    outbox.delivered(delivery)
    assert take(rounds, record).place == 4


def test_a_round_without_a_url_never_fills_up(
    redis: Redis, clock: Clock, settings: Settings
) -> None:
    rounds = RoundStore(redis, settings.model_copy(update={"outbox_max_bytes": 1}), clock)
    record = start(rounds, url=None)
    complete(rounds, take(rounds, record))
    assert take(rounds, record).place == 4
