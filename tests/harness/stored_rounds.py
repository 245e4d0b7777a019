"""Starts, leases and completes rounds in Redis."""

from collections.abc import Callable
from typing import Any

from redis import Redis

from poc_core.records import Lease, RoundRecord, RoundState
from poc_core.state import entries
from poc_core.state.rounds import RoundStore
from tests.harness.samples import complete_lease, known, lease_nonces, round_config, work_of

Serve = Callable[..., Any]


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


def in_outbox(redis: Redis, record: RoundRecord) -> list[int]:
    """The nonces that wait for the round's receiver, as they were put there."""
    waiting: Any = redis.lrange(f"poc:outbox:{record.round_id}:entries", 0, -1)
    assert isinstance(waiting, list)
    return [nonce for nonce, _ in entries.unpack(entries.without_count(entry) for entry in waiting)]
