"""Batches of jobs beside chat: when they wait, what their clients see, when they give up."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import pytest
from fastapi.testclient import TestClient
from pydantic import JsonValue

from poc_core.records import JobRecord, JobStatus, ModelInfo, ProofSpec, RoundState
from poc_core.settings import parse_chat_policy
from poc_core.state import JobStore, RoundStore, WorkerRegistry
from tests.samples import MODEL, SPEC, new_job, round_config, worker_record
from workers import host as host_module
from workers.chat_gate import ChatGate
from workers.engines.base import Engine
from workers.host import Chat, EngineHost
from workers.queue.job_queue import JobQueue
from workers.step_size import StepSize

PATIENCE_S = 0.3


class FakeEngine(Engine):
    """Answers at once; `on_compute` happens inside each call."""

    def __init__(self) -> None:
        self.info = ModelInfo(MODEL, 128, 4, 1024, max_batch_tokens=8192, dtype="float32")
        self.calls: list[list[int]] = []
        self.busy_s = 0.06  # a nonce, more or less: micro-batches of one
        self.on_compute: Callable[[], object] = lambda: None

    def compute(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        self.calls.append(list(nonces))
        self.on_compute()
        return [f"v{nonce}" for nonce in nonces]

    def close(self) -> None: ...


class Messages:
    """Stands in for the queue of the model's batches."""

    def __init__(self) -> None:
        self.published: list[tuple[str, int]] = []

    def publish(self, job_id: str, batch_indexes: Iterable[int]) -> None:
        self.published += [(job_id, index) for index in batch_indexes]


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_CHAT_SLICE_S", 0.05)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def messages() -> Messages:
    return Messages()


@pytest.fixture
def gate() -> ChatGate:
    return ChatGate(parse_chat_policy("yield"))


@pytest.fixture
def host(engine: FakeEngine, jobs: JobStore, workers: WorkerRegistry, messages: Messages, gate: ChatGate) -> EngineHost:
    workers.heartbeat(worker_record("w1"))
    return host_with(gate, engine, jobs, messages)


def host_with(gate: ChatGate, engine: FakeEngine, jobs: JobStore, messages: Messages) -> EngineHost:
    chat = Chat(gate, StepSize(engine.info, 100))
    return EngineHost(engine, "w1", jobs, cast(JobQueue, messages), chat, PATIENCE_S)


def read(jobs: JobStore, job_id: str) -> JobRecord:
    record = jobs.read(job_id)
    assert record is not None
    return record


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class InBackground:
    """A batch that runs on a thread of its own, as a Celery task does."""

    def __init__(self, host: EngineHost, job_id: str, index: int = 0) -> None:
        self._thread = threading.Thread(target=host.run_batch, args=(job_id, index))

    def __enter__(self) -> "InBackground":
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._thread.join(5)
        assert not self._thread.is_alive()


def test_without_chat_a_batch_runs_to_its_end(host: EngineHost, jobs: JobStore, engine: FakeEngine) -> None:
    job_id = jobs.create(new_job([0, 1, 2], batch_size=3))
    host.run_batch(job_id, 0)
    assert read(jobs, job_id).status is JobStatus.COMPLETED
    assert [nonce for call in engine.calls for nonce in call] == [0, 1, 2]


def test_an_engine_without_chat_gets_whole_micro_batches(
    engine: FakeEngine, jobs: JobStore, workers: WorkerRegistry, messages: Messages
) -> None:
    workers.heartbeat(worker_record("w1"))
    host = EngineHost(engine, "w1", jobs, cast(JobQueue, messages))
    job_id = jobs.create(new_job(list(range(300)), batch_size=300))
    host.run_batch(job_id, 0)
    assert [len(call) for call in engine.calls] == [128, 128, 44]
    assert host.chat_stats() == {}


def test_a_batch_waits_for_chat_and_completes_when_chat_ends(
    host: EngineHost, jobs: JobStore, engine: FakeEngine, gate: ChatGate
) -> None:
    gate.enter_chat()
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(host, job_id):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        assert read(jobs, job_id).status is JobStatus.RUNNING
        assert engine.calls == []
        gate.leave_chat()
    record = read(jobs, job_id)
    assert (record.status, record.waiting_for) == (JobStatus.COMPLETED, None)


def test_chat_that_comes_between_two_micro_batches_is_waited_for(
    host: EngineHost, jobs: JobStore, engine: FakeEngine, gate: ChatGate
) -> None:
    engine.on_compute = gate.enter_chat
    job_id = jobs.create(new_job([0, 1, 2], batch_size=3))
    with InBackground(host, job_id):
        for n_calls in (1, 2):
            wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
            assert len(engine.calls) == n_calls
            gate.leave_chat()
            wait_until(lambda: len(engine.calls) > n_calls)  # noqa: B023
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_the_status_says_that_a_job_waits_and_no_longer_once_it_goes_on(
    host: EngineHost, jobs: JobStore, engine: FakeEngine, gate: ChatGate, client: TestClient
) -> None:
    def waiting_for() -> object:
        return client.get(f"/api/v1/pow/generate/{job_id}").json().get("waiting_for")

    goes_on = threading.Event()
    engine.on_compute = lambda: len(engine.calls) == 2 and goes_on.wait(5)
    gate.enter_chat()
    job_id = jobs.create(new_job([0, 1, 2, 3], batch_size=4))
    with InBackground(host, job_id):
        wait_until(lambda: waiting_for() == "chat")
        gate.leave_chat()
        wait_until(lambda: waiting_for() is None)
        assert read(jobs, job_id).status is JobStatus.RUNNING  # its batch is not done yet
        goes_on.set()


def test_a_job_fails_after_its_patience_and_says_why(
    host: EngineHost, jobs: JobStore, engine: FakeEngine, gate: ChatGate, client: TestClient
) -> None:
    gate.enter_chat()
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    began = time.monotonic()
    host.run_batch(job_id, 0)
    assert PATIENCE_S <= time.monotonic() - began < PATIENCE_S + 0.5
    assert engine.calls == []
    shown = client.get(f"/api/v1/pow/generate/{job_id}").json()
    assert shown["status"] == "failed"
    assert "waiting_for" not in shown
    for part in ("Chat kept the engine busy", "POC_GENERATE_CHUNK_TIMEOUT_SEC", "POC_CHAT_POLICY"):
        assert part in shown["error"]


def test_patience_begins_anew_with_every_micro_batch(
    host: EngineHost, jobs: JobStore, engine: FakeEngine, gate: ChatGate
) -> None:
    def chat_for_a_while() -> None:
        gate.enter_chat()
        threading.Timer(0.6 * PATIENCE_S, gate.leave_chat).start()

    engine.on_compute = chat_for_a_while
    job_id = jobs.create(new_job([0, 1, 2, 3], batch_size=4))
    host.run_batch(job_id, 0)
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_under_share_a_job_completes_beside_constant_chat(
    engine: FakeEngine, jobs: JobStore, workers: WorkerRegistry, messages: Messages
) -> None:
    workers.heartbeat(worker_record("w1"))
    gate = ChatGate(parse_chat_policy("share:0.3"))
    host = host_with(gate, engine, jobs, messages)
    gate.enter_chat()
    job_id = jobs.create(new_job(list(range(5)), batch_size=5))
    host.run_batch(job_id, 0)
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_a_round_takes_a_batch_back_that_waits_for_chat(
    host: EngineHost, jobs: JobStore, rounds: RoundStore, engine: FakeEngine, gate: ChatGate, messages: Messages
) -> None:
    gate.enter_chat()
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(host, job_id):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        rounds.store(round_config(), RoundState.GENERATING)
    assert read(jobs, job_id).status is JobStatus.RUNNING
    assert jobs.pending(job_id) == [0]  # free, for whoever asks after the round
    assert messages.published == []  # the reaper queues it again then
    assert engine.calls == []


def test_a_worker_that_is_to_end_gives_a_batch_back_that_waits_for_chat(
    host: EngineHost, jobs: JobStore, engine: FakeEngine, gate: ChatGate, messages: Messages
) -> None:
    gate.enter_chat()
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(host, job_id):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        host.leave()
    assert read(jobs, job_id).status is JobStatus.RUNNING
    assert jobs.pending(job_id) == [0]
    assert messages.published == [(job_id, 0)]
    assert engine.calls == []


def test_a_worker_that_is_to_end_finishes_a_batch_that_need_not_wait(
    host: EngineHost, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.on_compute = host.leave
    job_id = jobs.create(new_job([0, 1, 2], batch_size=3))
    host.run_batch(job_id, 0)
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_a_cancelled_job_is_not_waited_with(
    host: EngineHost, jobs: JobStore, engine: FakeEngine, gate: ChatGate
) -> None:
    gate.enter_chat()
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(host, job_id):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        jobs.cancel(job_id)
    gate.leave_chat()
    assert engine.calls == []


def test_chat_that_comes_while_another_batch_has_the_engine_is_waited_for(
    host: EngineHost, engine: FakeEngine, gate: ChatGate
) -> None:
    """Between its wait at the gate and the engine, a thread may stand in line behind another."""
    first_computes, first_ends = threading.Event(), threading.Event()

    def compute() -> None:
        first_computes.set()
        first_ends.wait(5)

    engine.on_compute = compute
    first = threading.Thread(target=host.step, args=(SPEC, [0], 5))
    first.start()
    first_computes.wait(5)
    answers: list[object] = []
    second = threading.Thread(target=lambda: answers.append(host.step(SPEC, [1], 0.2)))
    second.start()
    time.sleep(0.1)  # past the gate, before the engine
    gate.enter_chat()
    first_ends.set()
    first.join(5)
    second.join(5)
    assert answers == [None]
    assert engine.calls == [[0]]


def test_micro_batches_are_measured_and_counted(host: EngineHost, engine: FakeEngine) -> None:
    engine.busy_s = 0.01
    sizes = []
    for _ in range(6):
        sizes.append(host.step_size(SPEC))
        host.step(SPEC, range(sizes[-1]), 1)
    assert sizes[0] == 1
    assert sizes[-1] > 8
    stats = host.chat_stats()
    assert stats["proof_busy_s"] == pytest.approx(0.06)
    assert (stats["chat_active"], stats["skips"]) == (0, 0)
