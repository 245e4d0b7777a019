"""Batches of jobs on a worker: merged as the engine holds them, beside chat, given back."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import JsonValue
from redis import Redis
from redis.exceptions import ConnectionError

from poc_core.errors import ProoflineError
from poc_core.records import JobRecord, JobStatus, Lease, NewJob, ProofSpec, RoundState
from poc_core.settings import parse_chat_policy
from poc_core.state import scripts
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from poc_core.state.work import WorkStore
from tests.harness.samples import (
    MODEL,
    REQUEST,
    SPEC,
    Clock,
    complete_batch,
    free_lost,
    known,
    lease_batch,
    new_job,
    pending,
    result_body,
    round_config,
    work_of,
    worker_record,
)
from tests.harness.waiting import wait_until
from tests.peers.fake_engine import FakeEngine, value
from workers import runner as runner_module
from workers import work as work_module
from workers.chat_gate import ChatGate, Starvation
from workers.engines.base import EngineLostError
from workers.proofs import ENGINE_LOST_STATUS, Proofs
from workers.work import Work

OTHER = SPEC.model_copy(update={"block_hash": "other"})

MakeRunner = Callable[..., Work]


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


def read(jobs: JobStore, job_id: str) -> JobRecord:
    return known(jobs.read(job_id))


def artifacts(jobs: JobStore, job_id: str) -> list[tuple[int, str]]:
    body = known(result_body(jobs, job_id))
    return [(one["nonce"], one["vector_b64"]) for one in json.loads(body)["artifacts"]]


def expected(nonces: Iterable[int], spec: ProofSpec = SPEC) -> list[tuple[int, str]]:
    return [(nonce, value(spec, nonce)) for nonce in nonces]


def job_of(spec: ProofSpec, nonces: list[int], batch_size: int = 2) -> NewJob:
    return NewJob(MODEL, spec, REQUEST, nonces, batch_size, None)


class InBackground:
    """A turn on a thread of its own, as a Celery task has it."""

    def __init__(self, runner: Work) -> None:
        self._thread = threading.Thread(target=runner.run)

    def __enter__(self) -> "InBackground":
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


def chat_comes(engine: FakeEngine) -> None:
    engine.chat = 1


def chat_ends(engine: FakeEngine) -> None:
    engine.chat = 0


# Computing.


def test_an_engine_without_chat_gets_whole_micro_batches(
    make_runner: MakeRunner, jobs: JobStore, engine: FakeEngine
) -> None:
    job_id = jobs.create(new_job(list(range(300)), batch_size=300))
    make_runner(None).run()
    assert [len(nonces) for nonces in engine.begun] == [128, 128, 44]
    assert len(engine.slices) == 3
    assert artifacts(jobs, job_id) == expected(range(300))


def test_what_comes_meanwhile_joins_what_is_computed(
    make_runner: MakeRunner, jobs: JobStore, engine: FakeEngine
) -> None:
    came: list[str] = []
    engine.events[0] = lambda: came.append(jobs.create(job_of(OTHER, [9])))
    job_id = jobs.create(new_job([0, 1]))
    assert not make_runner(None).run()
    assert artifacts(jobs, job_id) == expected([0, 1])
    assert artifacts(jobs, came[0]) == expected([9], OTHER)


def test_a_turn_ends_at_its_time_and_the_next_one_goes_on_with_what_is_in_hand(
    make_runner: MakeRunner, jobs: JobStore, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, now = make_runner(None), Clock()
    monkeypatch.setattr(work_module, "time", SimpleNamespace(monotonic=now))
    job_ids = [jobs.create(job_of(spec, list(range(n)))) for spec, n in ((SPEC, 2), (OTHER, 3))]
    go_on = threading.Event()

    def time_passes() -> None:
        now.now += 10
        go_on.wait(60)

    engine.events[0] = time_passes
    assert runner.run(now.now + 10)
    assert runner._runner.held  # noqa: SLF001
    go_on.set()
    assert not runner.run()
    assert not runner._runner.held  # noqa: SLF001
    assert [artifacts(jobs, job_id) for job_id in job_ids] == [
        expected(range(2)),
        expected(range(3), OTHER),
    ]
    assert runner.take_counts() == {f"job {job_ids[0]}": 2, f"job {job_ids[1]}": 3}
    assert runner.take_counts() == {}


# Merging.


def test_batches_of_a_job_are_computed_together_and_each_gets_its_own_values(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    nonces = list(range(50, 33, -1))
    job_id = jobs.create(new_job(nonces))
    for _ in range(3):
        assert not runner.run()  # what is done is not computed again
    assert engine.begun == [nonces]
    assert read(jobs, job_id).status is JobStatus.COMPLETED
    assert artifacts(jobs, job_id) == expected(nonces)


def test_batches_of_other_jobs_with_the_same_spec_join(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    ours = [jobs.create(new_job([n, n + 1, n + 2])) for n in (0, 10, 20)]
    other = jobs.create(job_of(OTHER, [30]))
    runner.run()
    computed = sorted(sorted(nonces) for nonces in engine.begun)
    assert computed == [[0, 1, 2, 10, 11, 12, 20, 21, 22], [30]]
    assert [artifacts(jobs, job_id) for job_id in ours] == [
        expected([n, n + 1, n + 2]) for n in (0, 10, 20)
    ]
    assert artifacts(jobs, other) == expected([30], OTHER)


def test_no_more_is_leased_than_a_micro_batch_holds(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    job_id = jobs.create(new_job(list(range(300)), batch_size=50))
    runner.run()
    # 128 fit: two batches
    assert engine.begun == [list(range(first, first + 100)) for first in (0, 100, 200)]
    assert artifacts(jobs, job_id) == expected(range(300))


# Chat.


def test_a_batch_waits_for_chat_and_completes_when_chat_ends(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    chat_comes(engine)
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(runner):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        assert read(jobs, job_id).status is JobStatus.QUEUED  # nobody has it
        assert engine.begun == []
        chat_ends(engine)
    record = read(jobs, job_id)
    assert (record.status, record.waiting_for) == (JobStatus.COMPLETED, None)


def test_a_batch_that_waits_for_chat_is_free_for_a_worker_whose_chat_is_idle(
    runner: Work, jobs: JobStore, engine: FakeEngine, workers: WorkerRegistry
) -> None:
    workers.heartbeat(worker_record("w2"))
    chat_comes(engine)
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(runner):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        assert pending(jobs, job_id) == [0]
        assert lease_batch(jobs, job_id, 0, "w2")
        complete_batch(jobs, job_id, 0, ["v0", "v1"])
        chat_ends(engine)
    assert engine.begun == []


def test_chat_that_comes_between_two_slices_is_waited_for(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.events = dict.fromkeys(range(3), lambda: chat_comes(engine))
    job_id = jobs.create(new_job([0, 1, 2], batch_size=3))
    with InBackground(runner):
        for n_ticks in (1, 2, 3):
            wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
            assert len(engine.ticks) == n_ticks
            chat_ends(engine)
            wait_until(lambda: len(engine.ticks) > n_ticks)  # noqa: B023
            wait_until(lambda: len(engine.ticks) == 4 or read(jobs, job_id).waiting_for == "chat")
    assert artifacts(jobs, job_id) == expected([0, 1, 2])


@pytest.mark.parametrize("chat_from", [None, 0], ids=["not begun", "between two slices"])
def test_the_status_says_that_a_job_waits_and_no_longer_once_it_goes_on(
    runner: Work, jobs: JobStore, engine: FakeEngine, client: TestClient, chat_from: int | None
) -> None:
    def waiting_for() -> object:
        return client.get(f"/api/v1/pow/generate/{job_id}").json().get("waiting_for")

    goes_on = threading.Event()
    engine.events[1] = lambda: goes_on.wait(60)
    if chat_from is None:
        chat_comes(engine)
    else:
        engine.events[chat_from] = lambda: chat_comes(engine)
    job_id = jobs.create(new_job([0, 1, 2, 3], batch_size=4))
    with InBackground(runner):
        wait_until(lambda: waiting_for() == "chat")
        chat_ends(engine)
        wait_until(lambda: waiting_for() is None)
        assert read(jobs, job_id).status is JobStatus.RUNNING  # its batch is not done yet
        goes_on.set()


def test_constant_chat_fails_no_job_and_in_the_end_it_completes(
    make_runner: MakeRunner, jobs: JobStore, engine: FakeEngine
) -> None:
    later_s = 0.0
    patience = Starvation(after_s=20, share=0.9)
    runner = make_runner("yield", patience, lambda: time.monotonic() + later_s)

    def time_passes() -> bool:
        nonlocal later_s
        later_s += 2
        return read(jobs, job_id).status is JobStatus.COMPLETED

    engine.said_s = 0.01
    chat_comes(engine)
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(runner):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        assert engine.ticks == []
        wait_until(time_passes, "the job's end beside chat")
    assert engine.chat == 1


def test_under_share_a_job_completes_beside_constant_chat(
    make_runner: MakeRunner, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.said_s = 0.01
    runner = make_runner("share:0.3")
    chat_comes(engine)
    job_id = jobs.create(new_job(list(range(5)), batch_size=5))
    runner.run()
    assert read(jobs, job_id).status is JobStatus.COMPLETED


# Validations, which have a deadline.


def validation(nonces: list[int], batch_size: int = 2) -> NewJob:
    claimed = {nonce: str(value(SPEC, nonce)) for nonce in nonces}
    return new_job(nonces, batch_size, claimed)


def test_a_validation_has_its_share_of_the_engine_beside_constant_chat_at_once(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    chat_comes(engine)
    job_id = jobs.create(validation([0, 1, 2]))
    runner.run()
    record = read(jobs, job_id)
    assert (record.status, record.waiting_for) == (JobStatus.COMPLETED, None)
    assert engine.chat == 1


def test_a_validation_passes_plain_jobs_that_wait_for_chat_between_two_slices(
    runner: Work, validations: Work, jobs: JobStore, engine: FakeEngine, clock: Clock
) -> None:
    engine.events[0] = lambda: chat_comes(engine)
    plain = jobs.create(new_job([0, 1]))
    clock.now += 1
    behind = jobs.create(job_of(OTHER, [2, 3]))
    with InBackground(runner):
        wait_until(lambda: read(jobs, plain).waiting_for == "chat")
        urgent = jobs.create(validation([7]))
        validations.run()
        assert read(jobs, urgent).status is JobStatus.COMPLETED
        # The one whose stage it needs ended first; the one that waited is waiting still.
        assert engine.begun == [[0, 1], [7]]
        chat_ends(engine)
    assert read(jobs, behind).status is JobStatus.COMPLETED


def test_validations_are_computed_alone_beside_chat(
    runner: Work, validations: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    chat_comes(engine)
    plain = jobs.create(new_job([0, 1]))
    ids = [jobs.create(validation(nonces, 1)) for nonces in ([5, 6, 7], [5])]
    validations.run()
    statuses = [read(jobs, job_id).status for job_id in (plain, *ids)]
    assert statuses == [JobStatus.QUEUED, JobStatus.COMPLETED, JobStatus.COMPLETED]
    assert [sorted(nonces) for nonces in engine.begun] == [[5, 5, 6, 7]]


def test_what_a_dead_worker_had_of_a_validation_is_taken_up(
    runner: Work, validations: Work, jobs: JobStore, workers: WorkerRegistry
) -> None:
    workers.heartbeat(worker_record("w2"))
    job_id = jobs.create(validation([0, 1, 2]))
    assert isinstance(lease_batch(jobs, job_id, 0, "w2"), Lease)
    validations.run()
    assert read(jobs, job_id).n_done == 1  # the other worker lives
    workers.remove("w2")
    free_lost(jobs)
    validations.run()
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_validations_wait_for_a_rounds_end(
    runner: Work, validations: Work, jobs: JobStore, rounds: RoundStore, engine: FakeEngine
) -> None:
    job_id = jobs.create(validation([0]))
    round_id = rounds.store(round_config(), RoundState.GENERATING)
    validations.run()
    assert engine.begun == []
    record = known(rounds.read(round_id))
    rounds.switch(record, RoundState.STOPPED)
    validations.run()
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_a_worker_that_is_to_end_takes_no_further_validation(
    runner: Work, validations: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    jobs.create(validation([0]))
    validations.leaving.set()
    validations.run()
    assert engine.begun == []


# Given back.


@pytest.mark.parametrize("by_round", [True, False], ids=["for a round", "for the worker's end"])
@pytest.mark.parametrize("between_slices", [False, True], ids=["not begun", "between two slices"])
def test_batches_that_wait_for_chat_are_given_back(
    runner: Work,
    jobs: JobStore,
    rounds: RoundStore,
    engine: FakeEngine,
    by_round: bool,
    between_slices: bool,
) -> None:
    if between_slices:
        engine.events[1] = lambda: chat_comes(engine)
    else:
        chat_comes(engine)
    job_id = jobs.create(new_job([0, 1, 2, 3], batch_size=2))
    with InBackground(runner):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        if by_round:
            rounds.store(round_config(), RoundState.GENERATING)
            wait_until(lambda: runner._round is not None)  # noqa: SLF001
            wait_until(lambda: pending(jobs, job_id) == [0, 1])
        runner.leaving.set()
    assert pending(jobs, job_id) == [0, 1]  # free, for whoever asks next
    wait_until(lambda: engine.is_idle)
    assert len(engine.ticks) <= 2  # of 4
    if not between_slices:
        assert read(jobs, job_id).status is JobStatus.QUEUED
        assert engine.begun == []


def test_a_worker_that_is_to_end_finishes_a_batch_that_need_not_wait(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.events[1] = runner.leaving.set
    job_id = jobs.create(new_job([0, 1, 2], batch_size=3))
    runner.run()
    assert read(jobs, job_id).status is JobStatus.COMPLETED


def test_a_cancelled_job_is_not_waited_with(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    chat_comes(engine)
    job_id = jobs.create(new_job([0, 1], batch_size=2))
    with InBackground(runner):
        wait_until(lambda: read(jobs, job_id).waiting_for == "chat")
        jobs.cancel(job_id)
    chat_ends(engine)
    assert engine.begun == []


@pytest.mark.parametrize(
    ("policy", "n_nonces", "cancelled_in"),
    [("yield", 2, 0), (None, 900, 1)],
    ids=["slices", "parts"],
)
def test_a_cancelled_job_frees_the_engine_before_its_last_slice(
    make_runner: MakeRunner,
    jobs: JobStore,
    engine: FakeEngine,
    policy: str | None,
    n_nonces: int,
    cancelled_in: int,
) -> None:
    runner = make_runner(policy)
    given_up = threading.Event()
    job_id = jobs.create(new_job(list(range(n_nonces)), batch_size=n_nonces))
    engine.said_s = 1.0  # so that layers go one by one
    engine.events[cancelled_in] = lambda: jobs.cancel(job_id)
    engine.events[cancelled_in + 1] = lambda: given_up.wait(60)
    runner.run()
    given_up.set()
    wait_until(lambda: engine.is_idle)
    assert len(engine.ticks) <= cancelled_in + 2  # of 4 and more


def test_jobs_that_were_merged_with_a_cancelled_one_are_computed(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.layer_s = 0.03
    cancelled, other = jobs.create(new_job([0, 1])), jobs.create(new_job([2, 3]))
    engine.events[0] = lambda: jobs.cancel(cancelled)
    runner.run()
    assert artifacts(jobs, other) == expected([2, 3])
    assert read(jobs, cancelled).status is JobStatus.CANCELLED


# Engines that fail.


def lose() -> None:
    raise EngineLostError("The engine does not answer.")


@pytest.mark.usefixtures("exits")
def test_a_lost_engine_gives_all_claims_back(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.events[2] = lose
    first, second = jobs.create(new_job([0, 1, 2])), jobs.create(new_job([3]))
    with pytest.raises(SystemExit) as ended:
        runner.run()
    assert ended.value.code == ENGINE_LOST_STATUS
    assert [pending(jobs, job_id) for job_id in (first, second)] == [[0, 1], [0]]
    assert [read(jobs, job_id).status for job_id in (first, second)] == [JobStatus.RUNNING] * 2


@pytest.mark.usefixtures("exits")
def test_a_worker_whose_engine_is_lost_leases_nothing_more(
    runner: Work,
    validations: Work,
    jobs: JobStore,
    store: WorkStore,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the first failure and the process's end, on whichever thread."""
    release = store.release

    def meanwhile(*args: Any, **named: Any) -> bool:
        waits = release(*args, **named)
        urgent.append(jobs.create(validation([5])))
        validations.run()
        return waits

    monkeypatch.setattr(store, "release", meanwhile)
    job_id = jobs.create(new_job([0, 1]))
    urgent: list[str] = []
    engine.events[0] = lose
    with pytest.raises(SystemExit):
        runner.run()
    assert engine.begun == [[0, 1]]
    statuses = [read(jobs, one).status for one in (job_id, *urgent)]
    assert statuses == [JobStatus.RUNNING, JobStatus.QUEUED]


def test_an_engine_that_died_while_it_was_idle_is_given_nothing(
    runner: Work, jobs: JobStore, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "check", lose)
    job_id = jobs.create(new_job([0]))
    runner.run()
    assert engine.begun == []
    assert pending(jobs, job_id) == [0]


def test_a_spec_that_no_engine_can_follow_fails_every_job_that_has_it(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.refuse["block"] = "k_dim must be at most 128."
    job_ids = [jobs.create(new_job([0, 1, 2])), jobs.create(new_job([3]))]
    runner.run()
    for job_id in job_ids:
        record = read(jobs, job_id)
        assert (record.status, record.error) == (JobStatus.FAILED, "k_dim must be at most 128.")


def break_down() -> None:
    raise ProoflineError("CUDA error")


def mistake() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", [break_down, mistake])
def test_an_engine_or_a_worker_that_fails_once_costs_nothing_but_time(
    runner: Work, jobs: JobStore, engine: FakeEngine, fails: Callable[[], None]
) -> None:
    engine.events[1] = fails
    job_id = jobs.create(new_job([0, 1, 2, 3]))
    runner.run()
    assert artifacts(jobs, job_id) == expected(range(4))
    assert engine.begun == [[0, 1, 2, 3], [0, 1], [2, 3]]  # what was lost once is computed alone


@pytest.mark.usefixtures("exits")
def test_an_engine_that_fails_again_and_again_is_replaced(
    runner: Work, jobs: JobStore, engine: FakeEngine
) -> None:
    engine.events = dict.fromkeys(range(9), break_down)
    first, second = jobs.create(new_job([0])), jobs.create(job_of(OTHER, [1]))
    with pytest.raises(SystemExit) as ended:
        runner.run()
    assert ended.value.code == ENGINE_LOST_STATUS
    assert [read(jobs, job_id).status for job_id in (first, second)] == [JobStatus.RUNNING] * 2


def test_a_batch_that_cannot_be_stored_fails_its_job_and_no_other(
    runner: Work, jobs: JobStore, store: WorkStore, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (jobs.create(new_job([n])) for n in range(3))
    complete = store.complete

    def spoilt(lease: Lease, values: Sequence[JsonValue]) -> bool:
        if lease.owner_id == first:
            redis.delete(f"poc:job:{first}:nonces")
        return complete(lease, values)

    monkeypatch.setattr(store, "complete", spoilt)
    runner.run()
    statuses = [read(jobs, job_id).status for job_id in (first, second, third)]
    assert statuses == [JobStatus.FAILED, JobStatus.COMPLETED, JobStatus.COMPLETED]
    assert "A batch cannot be stored" in str(read(jobs, first).error)


def test_a_finish_without_redis_costs_no_other_batch(
    runner: Work, jobs: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = jobs.create(new_job([0])), jobs.create(new_job([1]))
    finish = jobs.finish

    def away_once(job_id: str) -> bool:
        if job_id == first:
            raise ConnectionError("away")
        return finish(job_id)

    monkeypatch.setattr(jobs, "finish", away_once)
    runner.run()
    statuses = [read(jobs, job_id).status for job_id in (first, second)]
    assert statuses == [JobStatus.RUNNING, JobStatus.COMPLETED]


# What the worker's heartbeats tell of leases.


def test_a_batch_is_in_hand_before_it_is_claimed_until_it_is_done(
    runner: Work, jobs: JobStore, store: WorkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, completed = [], []
    together, complete = scripts.together, store.complete

    def in_hand() -> tuple[int, list[int]]:
        n_asked, _, numbers = store.hand.summary().partition(":")
        return int(n_asked), [int(number) for number in numbers.split()]

    def ask(*args: Any) -> Any:
        requests.append(in_hand())
        return together(*args)

    def finish(lease: Lease, values: Sequence[JsonValue]) -> bool:
        completed.append((lease.number, in_hand()[1]))
        return complete(lease, values)

    monkeypatch.setattr(scripts, "together", ask)
    monkeypatch.setattr(store, "complete", finish)
    jobs.create(new_job([0, 1, 2]))
    runner.run()
    assert len(requests) >= len(completed) == 2  # batches of nonces 0 and 1, and of 2
    assert all(n_asked in numbers for n_asked, numbers in requests)
    assert all(number in numbers for number, numbers in completed)
    assert in_hand()[1] == []


def test_a_batch_that_could_not_be_given_back_is_not_in_hand(
    runner: Work,
    jobs: JobStore,
    engine: FakeEngine,
    store: WorkStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(*_args: object, **_named: object) -> bool:
        raise ConnectionError("away")

    monkeypatch.setattr(store, "release", away)
    engine.events[0] = break_down
    job_id = jobs.create(new_job([0, 1]))
    runner.run()
    assert pending(jobs, job_id) == []  # as Redis believes
    assert store.hand.summary().endswith(":")


def test_what_redis_forgot_that_it_was_claimed_is_taken_once_all_the_same(
    runner: Work, jobs: JobStore, engine: FakeEngine, redis: Redis, workers: WorkerRegistry
) -> None:
    workers.heartbeat(worker_record("w2"))
    job_id = jobs.create(new_job([0, 1, 2]))

    def forget() -> None:
        redis.delete(f"poc:job:{job_id}:leases")
        redis.hdel(f"poc:job:{job_id}", "next")
        assert isinstance(lease_batch(jobs, job_id, 0, "w2"), Lease)  # whoever asks next

    engine.events[1] = forget
    runner.run()
    assert artifacts(jobs, job_id) == expected([0, 1, 2])
    assert not complete_batch(jobs, job_id, 0, ["x", "x"])
    assert (jobs.total_processed(), jobs.queued_nonces()) == (3, 0)
