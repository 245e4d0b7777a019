"""Rounds in Redis: places leased, computed once, counted, and handed on when a worker is lost."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from poc_core.arithmetic.nonces import MAX_NONCE
from poc_core.errors import RoundError
from poc_core.records import Lease, Refusal, RoundRecord, RoundState
from poc_core.settings import Settings
from poc_core.state import entries
from poc_core.state.outbox import Outbox
from poc_core.state.overview import Overviews
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import (
    DISTANCE_SPEC,
    MODEL,
    Clock,
    complete_lease,
    due_now,
    known,
    lease_nonces,
    round_config,
    work_of,
    worker_record,
)
from tests.harness.stored import outbox_status
from tests.planted.forgetful import forgetting

Serve = Callable[..., Any]


@pytest.fixture(autouse=True)
def two_workers(serve: Serve) -> None:
    serve("w1")
    serve("w2")


def start(
    rounds: RoundStore, state: RoundState = RoundState.GENERATING, **changes: Any
) -> RoundRecord:
    return read(rounds, rounds.store(round_config(**changes), state))


def read(rounds: RoundStore, round_id: str) -> RoundRecord:
    return known(rounds.read(round_id))


def take(rounds: RoundStore, record: RoundRecord, worker: str = "w1", places: int = 4) -> Lease:
    lease = lease_nonces(rounds, record, worker, places)
    assert isinstance(lease, Lease), lease
    return lease


def complete(rounds: RoundStore, lease: Lease, worker: str = "w1") -> bool:
    return complete_lease(rounds, lease, worker, [f"v{nonce}" for nonce in lease.nonces])


def release(rounds: RoundStore, lease: Lease, worker: str) -> bool:
    return work_of(rounds, worker).release(lease)


def nonces_of(leases: Sequence[Lease]) -> list[int]:
    return [nonce for lease in leases for nonce in lease.nonces]


def excluded(redis: Redis, record: RoundRecord) -> list[int]:
    seen = known(Overviews(redis).read().round)
    assert seen.record.round_id == record.round_id
    return list(seen.excluded)


def in_outbox(redis: Redis, record: RoundRecord) -> list[int]:
    """The nonces that wait for the round's receiver, as they were put there."""
    waiting: Any = redis.lrange(f"poc:outbox:{record.round_id}:entries", 0, -1)
    assert isinstance(waiting, list)
    return [nonce for nonce, _ in entries.unpack(entries.without_count(entry) for entry in waiting)]


# Start, look, switch, stop.


def test_a_round_knows_what_it_was_started_with(rounds: RoundStore, clock: Clock) -> None:
    config = round_config(node_id=1, node_count=3, group_id=1, n_groups=2)
    record = read(rounds, rounds.store(config, RoundState.GENERATING))
    assert (record.config, record.state) == (config, RoundState.GENERATING)
    assert (record.created_at, record.started_at, record.stopped_at) == (clock.now, clock.now, None)


def test_the_round_stored_last_is_the_current_one(rounds: RoundStore) -> None:
    assert rounds.current() is None
    record = start(rounds)
    assert rounds.current() == record


def test_an_unknown_round_reads_as_none(rounds: RoundStore) -> None:
    assert rounds.read("0" * 32) is None


@pytest.mark.parametrize("model", [MODEL, "other"])
def test_a_second_round_is_refused_while_one_generates(rounds: RoundStore, model: str) -> None:
    first = start(rounds)
    with pytest.raises(RoundError, match="generating already"):
        rounds.store(round_config(model=model), RoundState.GENERATING)
    assert rounds.current() == first
    assert rounds.generating("other") is None


@pytest.mark.parametrize("state", [RoundState.IDLE, RoundState.VALIDATING, RoundState.STOPPED])
def test_a_round_that_does_not_generate_is_replaced(rounds: RoundStore, state: RoundState) -> None:
    first = start(rounds, RoundState.IDLE)
    rounds.switch(first, state)
    second = start(rounds)
    assert rounds.current() == second
    assert read(rounds, first.round_id).state is RoundState.STOPPED


def test_only_a_generating_round_has_the_models_workers_and_a_stopped_one_never_again(
    rounds: RoundStore,
) -> None:
    record = start(rounds, RoundState.IDLE)
    assert rounds.generating(MODEL) is None
    before = RoundState.IDLE
    for state in (
        RoundState.GENERATING,
        RoundState.VALIDATING,
        RoundState.GENERATING,
        RoundState.STOPPED,
    ):
        assert rounds.switch(record, state) is before
        is_generating = state is RoundState.GENERATING
        assert rounds.generating(MODEL) == (record.round_id if is_generating else None)
        before = state
    assert rounds.switch(record, RoundState.GENERATING) is RoundState.STOPPED
    assert read(rounds, record.round_id).state is RoundState.STOPPED
    assert rounds.generating(MODEL) is None


def test_a_round_that_is_not_current_takes_no_workers_from_the_one_that_generates(
    rounds: RoundStore, redis: Redis
) -> None:
    earlier = start(rounds, RoundState.IDLE)
    redis.delete("poc:round:current")  # as a Redis that forgot it
    generating = start(rounds)
    rounds.switch(earlier, RoundState.STOPPED)
    assert rounds.generating(MODEL) == generating.round_id


def test_an_expired_round_cannot_be_switched(rounds: RoundStore, redis: Redis) -> None:
    record = start(rounds)
    redis.flushall()
    assert rounds.switch(record, RoundState.STOPPED) is None
    assert rounds.current() is None


def test_a_stopped_round_tells_when_and_why(rounds: RoundStore, clock: Clock) -> None:
    record = start(rounds)
    clock.now += 60
    rounds.switch(record, RoundState.STOPPED, "seq_len is too large.")
    clock.now += 60
    rounds.switch(record, RoundState.STOPPED)
    ended = read(rounds, record.round_id)
    assert (ended.stopped_at, ended.error) == (clock.now - 60, "seq_len is too large.")


def test_a_round_counts_from_its_first_generation(rounds: RoundStore, clock: Clock) -> None:
    record = start(rounds, RoundState.IDLE)
    assert record.started_at is None
    clock.now += 5
    rounds.switch(record, RoundState.GENERATING)
    rounds.switch(record, RoundState.VALIDATING)
    clock.now += 5
    rounds.switch(record, RoundState.GENERATING)
    assert read(rounds, record.round_id).started_at == clock.now - 5


class LosesItsAnswer:
    """A Redis script whose first answer gets lost on the way: redis-py sends the call again."""

    def __init__(self, script: Any) -> None:
        self.script = script

    def __call__(self, *args: Any) -> Any:
        self.script(*args)
        return self.script(*args)


def test_a_start_whose_answer_was_lost_is_no_second_round(rounds: RoundStore) -> None:
    rounds._store = LosesItsAnswer(rounds._store)  # type: ignore[assignment]
    record = start(rounds)
    assert record.state is RoundState.GENERATING


# Leases.


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


# Completing.


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


# Expiry.


def keys_without_ttl(redis: Redis) -> list[bytes]:
    return [key for key in redis.scan_iter() if redis.ttl(key) == -1]


@pytest.mark.parametrize(
    ("changes", "value"),
    [({}, "v"), ({"spec": DISTANCE_SPEC, "terms": {"r_target": 1.4}}, 1.3)],
    ids=["artifacts", "distances"],
)
def test_every_key_of_a_round_expires(
    rounds: RoundStore,
    workers: WorkerRegistry,
    clock: Clock,
    redis: Redis,
    changes: dict[str, Any],
    value: Any,
) -> None:
    record = start(rounds, **changes)
    lease = take(rounds, record, "w1", 9)
    complete_lease(rounds, lease, "w1", [None, *[value] * 8])
    take(rounds, record, "w1", 9)
    workers.remove("w1")
    clock.now += 1
    take(rounds, record, "w2", 4)
    assert keys_without_ttl(redis) == []
    rounds.switch(record, RoundState.STOPPED)
    assert keys_without_ttl(redis) == []


def test_a_round_that_goes_on_does_not_expire(
    rounds: RoundStore, redis: Redis, settings: Settings, clock: Clock
) -> None:
    record = start(rounds)
    complete_lease(rounds, take(rounds, record, "w1", 9), "w1", [None, *["v"] * 8])
    take(rounds, record, "w1", 9)
    # nonces by second live only as long as somebody asks for them
    of_the_round = [key for key in redis.scan_iter("poc:round:*") if b":rate:" not in key]
    of_the_outbox = list(redis.scan_iter(f"poc:outbox:{record.round_id}*"))
    for key in of_the_round + of_the_outbox:
        redis.expire(key, 5)
    clock.now += 1
    take(rounds, record, "w2", 4)
    short = [
        key
        for key in of_the_round + of_the_outbox
        if int(redis.ttl(key)) < settings.callback_retention_sec - 5
    ]
    assert short == []


def test_a_redis_that_refuses_is_no_bad_record(
    rounds: RoundStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(rounds)
    monkeypatch.setattr(
        "redis.client.Pipeline.execute", lambda *_, **__: [ResponseError("BUSY a script")]
    )
    with pytest.raises(ResponseError, match="BUSY"):
        rounds.newest(1)
