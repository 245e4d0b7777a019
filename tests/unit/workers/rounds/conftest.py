"""A worker's part in a round, on an engine that a test directs."""

from collections.abc import Iterator

import pytest

from poc_core.records import RoundRecord, RoundState
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.round_steps import LONG_STEP_S, RoundSteps, engine_for_four
from tests.harness.samples import round_config, worker_record
from tests.peers.fake_engine import FakeEngine
from workers import patience
from workers.proofs import Proofs


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0.01)


@pytest.fixture
def engine() -> FakeEngine:
    return engine_for_four()


@pytest.fixture
def published() -> list[str]:
    return []


@pytest.fixture
def proofs(engine: FakeEngine) -> Iterator[Proofs]:
    proofs = Proofs(engine)
    yield proofs
    proofs.stop()


@pytest.fixture
def runner(proofs: Proofs, rounds: RoundStore, published: list[str]) -> RoundSteps:
    """Its steps end by what happens in them."""
    return RoundSteps(proofs, "w1", rounds, published.append, LONG_STEP_S)


@pytest.fixture
def record(rounds: RoundStore, workers: WorkerRegistry) -> RoundRecord:
    workers.heartbeat(worker_record("w1"))
    workers.heartbeat(worker_record("w2"))
    started = rounds.read(rounds.store(round_config(), RoundState.GENERATING))
    assert started is not None
    return started
