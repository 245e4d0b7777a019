"""What a worker's batch costs Redis, however many other workers there are."""

from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from poc_core.records import Lease, RoundRecord, RoundState
from poc_core.settings import Settings
from poc_core.state import RoundStore
from tests.harness.lua_steps import counted_steps
from tests.harness.samples import Clock, round_config

Serve = Callable[..., Any]

FLEETS = (16, 256)


@pytest.fixture
def record(rounds: RoundStore) -> RoundRecord:
    found = rounds.read(rounds.store(round_config(), RoundState.GENERATING))
    assert found is not None
    return found


def leased(
    rounds: RoundStore, record: RoundRecord, worker: str, in_hand: list[Lease] | None = None
) -> Lease:
    found = rounds.lease(record, worker, 4, in_hand or [])
    assert isinstance(found, Lease)
    return found


def steps_of_a_batch(
    rounds: RoundStore, record: RoundRecord, clock: Clock, n_workers: int, serve: Serve
) -> float:
    """Commands that the scripts of one batch call, of a worker among so many; of 40 a second."""
    held: dict[str, list[Lease]] = {}
    for number in range(n_workers):
        worker = f"w{number}-of-{n_workers}"
        serve(worker)
        held[worker] = [leased(rounds, record, worker)]
        held[worker].append(leased(rounds, record, worker, held[worker]))
    with counted_steps() as steps:
        for worker in list(held)[:16]:
            lease = held[worker].pop(0)
            assert rounds.complete(lease, worker, [f"v{nonce}" for nonce in lease.nonces])
            leased(rounds, record, worker, held[worker])
    return steps.total() / 16


def test_a_batch_of_a_round_costs_as_much_among_many_workers(
    rounds: RoundStore, record: RoundRecord, clock: Clock, serve: Serve
) -> None:
    few, many = (
        steps_of_a_batch(rounds, record, clock, n, serve)
        for n in FLEETS
    )
    assert many <= 1.1 * few
