"""A worker's turns with jobs, on a fake engine."""

import time
from collections.abc import Callable, Iterator

import pytest

from poc_core.settings import parse_chat_policy
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from poc_core.state.work import WorkStore
from tests.harness.job_turns import MakeRunner
from tests.harness.samples import work_of, worker_record
from tests.peers.fake_engine import FakeEngine
from workers import runner as runner_module
from workers import work as work_module
from workers.chat_gate import ChatGate, Starvation
from workers.proofs import Proofs
from workers.work import Work


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_module, "_CHAT_WAIT_S", 0.05)
    monkeypatch.setattr(runner_module, "_LOOK_S", 0.01)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()  # beside chat, the layers of the first micro-batch go one by one


@pytest.fixture
def store(jobs: JobStore, rounds: RoundStore) -> WorkStore:
    store = work_of(jobs, "w1")
    store.jobs, store.rounds = jobs, rounds  # so that tests can replace their methods
    return store


@pytest.fixture
def make_runner(
    engine: FakeEngine, store: WorkStore, workers: WorkerRegistry
) -> Iterator[MakeRunner]:
    started: list[Proofs] = []

    def make(
        policy: str | None = "yield",
        starvation: Starvation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Work:
        gate = None
        if policy is not None:
            patience = starvation or Starvation()
            gate = ChatGate(parse_chat_policy(policy), engine.unfinished_chat, patience, clock)
        started.append(Proofs(engine, gate))
        return Work(started[-1], store)

    workers.heartbeat(worker_record("w1"))
    yield make
    for proofs in started:
        proofs.stop()


@pytest.fixture
def runner(make_runner: MakeRunner) -> Work:
    return make_runner()


@pytest.fixture
def validations(runner: Work, store: WorkStore) -> Work:
    """Of the same worker."""
    proofs = runner._proofs  # noqa: SLF001
    return Work(proofs, store, urgent=True)
