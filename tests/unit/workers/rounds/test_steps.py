"""A round's steps lease nonces, keep batches in progress and queue the next step."""

import dataclasses
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from redis import Redis

from poc_core.records import RoundRecord, RoundState
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.round_steps import (
    STEP_S,
    RoundSteps,
    assert_first,
    engine_for_four,
    leases,
    stop,
)
from tests.harness.samples import MODEL, round_config, worker_record
from tests.harness.stored_rounds import in_outbox, read, take
from tests.peers.fake_engine import FakeEngine
from workers.proofs import Proofs

N_SLICES = 5  # of short steps


@pytest.fixture
def short_steps(
    rounds: RoundStore, published: list[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Proofs], RoundSteps]:
    """Its steps end, by a clock that counts slices, after some of them."""

    def made(proofs: Proofs) -> RoundSteps:
        def clock() -> float:
            return len(cast(FakeEngine, proofs.engine).ticks)

        monkeypatch.setattr("workers.work.time", SimpleNamespace(monotonic=clock))
        return RoundSteps(proofs, "w1", rounds, published.append, N_SLICES, clock)

    return made


@pytest.fixture
def short_runner(proofs: Proofs, short_steps: Callable[[Proofs], RoundSteps]) -> RoundSteps:
    return short_steps(proofs)


def test_a_step_computes_one_lease_after_the_other(
    runner: RoundSteps, engine: FakeEngine, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    engine.events[4] = stop(rounds, record)
    runner.step(record.round_id)
    assert engine.begun[:5] == [list(range(first, first + 4)) for first in range(0, 20, 4)]
    assert_first(in_outbox(redis, record), 16)


def test_a_step_ends_in_time_and_queues_the_next(
    proofs: Proofs, rounds: RoundStore, record: RoundRecord, published: list[str]
) -> None:
    began = time.monotonic()
    RoundSteps(proofs, "w1", rounds, published.append, STEP_S).step(record.round_id)
    assert time.monotonic() - began >= STEP_S
    assert published == [record.round_id]


def test_the_next_step_goes_on_where_the_last_ended(
    short_runner: RoundSteps, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    short_runner.step(record.round_id)
    short_runner.step(record.round_id)
    nonces = in_outbox(redis, record)
    assert nonces == list(range(len(nonces)))
    assert read(rounds, record.round_id).n_processed == len(nonces)


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_micro_batches_stay_in_hand_from_step_to_step_so_that_no_stage_is_ever_idle(
    rounds: RoundStore,
    redis: Redis,
    record: RoundRecord,
    short_steps: Callable[[Proofs], RoundSteps],
    n_stages: int,
) -> None:
    engine = engine_for_four(n_stages)
    proofs = Proofs(engine)
    runner = short_steps(proofs)
    for _ in range(4):
        runner.step(record.round_id)
        assert leases(redis, record) >= n_stages
    stop(rounds, record)()
    runner.step(record.round_id)
    proofs.stop()
    # Each nonce once, in order.
    assert engine.begun == [list(range(n, n + 4)) for n in range(0, 4 * len(engine.begun), 4)]
    n_arrived = len(in_outbox(redis, record))
    assert in_outbox(redis, record) == list(range(n_arrived))
    assert 0 <= 4 * len(engine.begun) - n_arrived <= 4 * proofs.depth


def test_what_is_in_hand_after_the_last_step_goes_back(
    short_runner: RoundSteps, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    short_runner.step(record.round_id)
    assert leases(redis, record) > 0
    rounds.switch(record, RoundState.VALIDATING)
    short_runner.step(record.round_id)
    n_arrived = len(in_outbox(redis, record))
    rounds.switch(record, RoundState.GENERATING)
    assert take(rounds, record, "w2").place == n_arrived


def test_what_is_in_hand_of_an_earlier_round_goes_back(
    short_runner: RoundSteps, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    short_runner.step(record.round_id)
    assert leases(redis, record) > 0
    stop(rounds, record)()
    second = rounds.read(rounds.store(round_config(), RoundState.GENERATING))
    assert second is not None
    short_runner.step(second.round_id)
    assert leases(redis, record) == 0
    assert leases(redis, second) > 0
    assert_first(in_outbox(redis, second), 0)


@pytest.mark.parametrize("holds", [3, 8, 100])
def test_a_lease_is_what_the_engine_holds_whatever_the_rounds_batch_size(
    runner: RoundSteps, engine: FakeEngine, rounds: RoundStore, record: RoundRecord, holds: int
) -> None:
    engine.info = dataclasses.replace(engine.info, max_batch_tokens=holds * 64)
    engine.events[0] = stop(rounds, record)
    runner.step(record.round_id)
    assert engine.begun[0] == list(range(holds))


@pytest.mark.parametrize("round_id", ["0" * 32, None], ids=["unknown", "stopped"])
def test_a_step_of_a_round_that_does_not_run_does_nothing(
    runner: RoundSteps,
    engine: FakeEngine,
    rounds: RoundStore,
    record: RoundRecord,
    published: list[str],
    round_id: str | None,
) -> None:
    stop(rounds, record)()
    runner.step(round_id or record.round_id)
    assert (engine.begun, published) == ([], [])


def test_a_round_whose_sequence_has_ended_asks_for_no_more_steps(
    runner: RoundSteps,
    engine: FakeEngine,
    rounds: RoundStore,
    workers: WorkerRegistry,
    published: list[str],
) -> None:
    workers.heartbeat(worker_record("w1"))
    round_id = rounds.store(round_config(node_count=2**62), RoundState.GENERATING)
    runner.step(round_id)
    ended = rounds.read(round_id)
    assert ended is not None
    assert (ended.state, ended.n_processed, published) == (RoundState.STOPPED, 2, [])
    assert engine.begun == [[0, 2**62]]
    assert rounds.generating(MODEL) is None  # housekeeping queues no further step
