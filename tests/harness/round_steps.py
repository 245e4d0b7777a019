"""Runs a worker's steps of a round, and reads their results in Redis."""

import dataclasses
import time
from collections.abc import Callable

from redis import Redis

from poc_core.records import RoundRecord, RoundState
from poc_core.state.rounds import RoundStore
from tests.harness.samples import work_of
from tests.peers.fake_engine import FakeEngine
from workers.proofs import Proofs
from workers.work import Work

MICRO_BATCH_S = 0.02
STEP_S = 0.25  # of steps that end in time
LONG_STEP_S = 60.0  # of steps that end by what happens in them, on a machine with other work too


def engine_for_four(n_stages: int = 1, layers: int = 1) -> FakeEngine:
    """One that holds four nonces at a time."""
    engine = FakeEngine(n_stages, layers, layer_s=MICRO_BATCH_S)
    engine.info = dataclasses.replace(engine.info, max_batch_tokens=4 * 64)
    return engine


class RoundSteps:
    """Turns of a round, one after the other while it goes on."""

    def __init__(
        self,
        proofs: Proofs,
        worker_id: str,
        rounds: RoundStore,
        publish: Callable[[str], None],
        step_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        store = work_of(rounds, worker_id)
        store.rounds = rounds
        self._work = Work(proofs, store)
        self._publish, self._step_s, self._clock = publish, step_s, clock
        self.leave = self._work.leaving.set
        self.held = lambda: store.hand.summary().partition(":")[2]

    def step(self, round_id: str) -> None:
        if self._work.run(self._clock() + self._step_s):
            self._publish(round_id)


def stop(rounds: RoundStore, record: RoundRecord) -> Callable[[], object]:
    return lambda: rounds.switch(record, RoundState.STOPPED)


def leases(redis: Redis, record: RoundRecord) -> int:
    """Micro-batches that somebody has in hand."""
    return redis.hlen(f"poc:round:{record.round_id}:leases")


def assert_first(nonces: list[int], least: int) -> None:
    """The first nonces of the round, in order; how many more than `least` depends on where in a
    look or a slice the end came.
    """
    assert nonces == list(range(len(nonces)))
    assert len(nonces) >= least


def refusal(engine: FakeEngine) -> Callable[[], object]:
    return lambda: engine.refuse.update(block="k_dim must be at most 128.")
