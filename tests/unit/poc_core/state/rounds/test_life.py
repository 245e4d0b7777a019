"""A round in Redis starts, is read, switched and stopped, and expires."""

from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from poc_core.errors import RoundError
from poc_core.records import RoundState
from poc_core.settings import Settings
from poc_core.state import keys
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import DISTANCE_SPEC, MODEL, Clock, complete_lease, round_config
from tests.harness.stored_rounds import read, release, start, take


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


@pytest.mark.parametrize("state", [RoundState.GENERATING, RoundState.VALIDATING])
def test_a_round_that_goes_on_after_a_long_pause_does_not_expire_at_once(
    rounds: RoundStore, redis: Redis, settings: Settings, state: RoundState
) -> None:
    record = start(rounds)
    release(rounds, take(rounds, record), "w1")
    rounds.switch(record, RoundState.VALIDATING)
    kept = [key for key in redis.scan_iter() if record.round_id.encode() in key]
    kept += [keys.CURRENT_ROUND.encode(), keys.generating(MODEL).encode()]
    for key in kept:
        redis.expire(key, 5)
    rounds.switch(record, state)
    short = [
        key
        for key in kept
        if redis.exists(key) and int(redis.ttl(key)) < settings.callback_retention_sec - 5
    ]
    assert short == []


def test_no_more_rounds_are_listed_than_asked_for(rounds: RoundStore) -> None:
    ids = []
    for _ in range(3):
        record = start(rounds)
        rounds.switch(record, RoundState.STOPPED)
        ids.append(record.round_id)
    assert [record.round_id for record in rounds.newest(2)] == ids[:0:-1]


def test_a_redis_that_refuses_is_no_bad_record(
    rounds: RoundStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(rounds)
    monkeypatch.setattr(
        "redis.client.Pipeline.execute", lambda *_, **__: [ResponseError("BUSY a script")]
    )
    with pytest.raises(ResponseError, match="BUSY"):
        rounds.newest(1)
