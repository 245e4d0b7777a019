"""Entries of computed nonces: packed in Python, counted in Lua, unpacked in Python."""

from collections.abc import Callable

import pytest
from pydantic import JsonValue
from redis import Redis

from poc_core.records import RoundState, WorkerRecord
from poc_core.state import entries
from poc_core.state.rounds import RoundStore
from tests.harness.samples import complete_lease, known, lease_nonces, leased, round_config
from tests.harness.stored import outbox_status

PAIRS: list[tuple[int, JsonValue]] = [(0, "v|0"), (2**63 - 1, [1, 2]), (5, 1.25)]


def test_what_is_packed_comes_out_again() -> None:
    packed = [entries.pack(part).encode() for part in (PAIRS[:2], PAIRS[2:])]
    assert entries.unpack(packed) == PAIRS
    assert entries.unpack([]) == []


def test_a_value_that_json_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        entries.pack([(1, float("nan"))])


def test_the_count_that_lua_put_before_it_is_taken_off() -> None:
    assert entries.without_count(b'2|[0,"v|0"],[1,"w"]') == b'[0,"v|0"],[1,"w"]'


def test_lua_counts_what_python_packed(
    rounds: RoundStore, serve: Callable[..., WorkerRecord], redis: Redis
) -> None:
    serve("w1")
    round_id = rounds.store(round_config(), RoundState.GENERATING)
    record = known(rounds.read(round_id))
    lease = leased(lease_nonces(rounds, record, "w1", 3))
    complete_lease(rounds, lease, "w1", ["a|b", "c", None])
    assert outbox_status(redis, round_id).waiting == 2
