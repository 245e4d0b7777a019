"""A worker's part in a round, on an engine that a test directs."""

import dataclasses
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import fakeredis
import pytest
from redis import Redis
from redis.exceptions import ConnectionError

from poc_core.records import Lease, RoundRecord, RoundState
from poc_core.settings import ChatPolicy, Settings
from poc_core.state import entries, scripts
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from tests.harness.samples import MODEL, Clock, lease_nonces, round_config, work_of, worker_record
from tests.harness.waiting import wait_until
from tests.peers.fake_engine import FakeEngine
from workers import patience
from workers.chat_gate import ChatGate
from workers.engines.base import EngineLostError
from workers.proofs import ENGINE_LOST_STATUS, Proofs
from workers.work import Work

MICRO_BATCH_S = 0.02
STEP_S = 0.25  # of steps that end in time
N_SLICES = 5  # of short steps
TWO_LEASES = 100  # bytes: more than a lease of 4 nonces takes in the outbox, less than two do
LONG_STEP_S = 60.0  # of steps that end by what happens in them, on a machine with other work too


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0.01)


def engine_for_four(n_stages: int = 1, layers: int = 1) -> FakeEngine:
    """One that holds four nonces at a time."""
    engine = FakeEngine(n_stages, layers, layer_s=MICRO_BATCH_S)
    engine.info = dataclasses.replace(engine.info, max_batch_tokens=4 * 64)
    return engine


@pytest.fixture
def engine() -> FakeEngine:
    return engine_for_four()


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


@pytest.fixture
def record(rounds: RoundStore, workers: WorkerRegistry) -> RoundRecord:
    workers.heartbeat(worker_record("w1"))
    workers.heartbeat(worker_record("w2"))
    started = rounds.read(rounds.store(round_config(), RoundState.GENERATING))
    assert started is not None
    return started


def stop(rounds: RoundStore, record: RoundRecord) -> Callable[[], object]:
    return lambda: rounds.switch(record, RoundState.STOPPED)


def arrived(redis: Redis, record: RoundRecord) -> list[int]:
    """The nonces whose values wait for the receiver."""
    waiting = cast(list[bytes], redis.lrange(f"poc:outbox:{record.round_id}:entries", 0, -1))
    return [nonce for nonce, _ in entries.unpack(entries.without_count(entry) for entry in waiting)]


def leases(redis: Redis, record: RoundRecord) -> int:
    """Micro-batches that somebody has in hand."""
    return redis.hlen(f"poc:round:{record.round_id}:leases")


@contextmanager
def under_way(runner: RoundSteps, rounds: RoundStore, record: RoundRecord) -> Iterator[None]:
    """A step on a thread of its own, which ends with the round."""
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(runner.step, record.round_id)
        try:
            yield
        finally:
            stop(rounds, record)()
        step.result(LONG_STEP_S)


def lease_of(rounds: RoundStore, record: RoundRecord, worker: str) -> Lease:
    lease = lease_nonces(rounds, record, worker, 4)
    assert isinstance(lease, Lease)
    return lease


def read(rounds: RoundStore, record: RoundRecord) -> RoundRecord:
    found = rounds.read(record.round_id)
    assert found is not None
    return found


def assert_first(nonces: list[int], least: int) -> None:
    """The first nonces of the round, in order; how many more than `least` depends on where in a
    look or a slice the end came.
    """
    assert nonces == list(range(len(nonces)))
    assert len(nonces) >= least


def test_a_step_computes_one_lease_after_the_other(
    runner: RoundSteps, engine: FakeEngine, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    engine.events[4] = stop(rounds, record)
    runner.step(record.round_id)
    assert engine.begun[:5] == [list(range(first, first + 4)) for first in range(0, 20, 4)]
    assert_first(arrived(redis, record), 16)


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
    nonces = arrived(redis, record)
    assert nonces == list(range(len(nonces)))
    assert read(rounds, record).n_processed == len(nonces)


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
    n_arrived = len(arrived(redis, record))
    assert arrived(redis, record) == list(range(n_arrived))
    assert 0 <= 4 * len(engine.begun) - n_arrived <= 4 * proofs.depth


def test_what_is_in_hand_after_the_last_step_goes_back(
    short_runner: RoundSteps, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    short_runner.step(record.round_id)
    assert leases(redis, record) > 0
    rounds.switch(record, RoundState.VALIDATING)
    short_runner.step(record.round_id)
    n_arrived = len(arrived(redis, record))
    rounds.switch(record, RoundState.GENERATING)
    assert lease_of(rounds, record, "w2").place == n_arrived


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
    assert_first(arrived(redis, second), 0)


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


# Stopping.


def test_a_stop_takes_effect_within_a_look_and_two_slices(
    rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    engine = engine_for_four(layers=20)
    engine.said_s, is_over = 1.0, threading.Event()  # so that layers go one by one
    proofs = Proofs(engine, ChatGate(ChatPolicy("yield"), engine.unfinished_chat))
    # The look comes with a slice under way, however busy the machine is.
    engine.events = {5: stop(rounds, record), 6: lambda: is_over.wait(60)}
    RoundSteps(proofs, "w1", rounds, lambda _: None, LONG_STEP_S).step(record.round_id)
    is_over.set()
    wait_until(lambda: engine.is_idle)
    proofs.stop()
    assert len(engine.ticks) == 5 + 2  # of 20
    assert arrived(redis, record) == []
    assert leases(redis, record) == 0


def test_validating_pauses_generation(
    runner: RoundSteps,
    engine: FakeEngine,
    rounds: RoundStore,
    record: RoundRecord,
    published: list[str],
) -> None:
    engine.events[1] = lambda: rounds.switch(record, RoundState.VALIDATING)
    runner.step(record.round_id)
    assert len(engine.begun) <= 3
    assert published == []


def test_a_worker_that_is_to_end_finishes_what_it_has_in_hand_and_leaves_the_round_to_others(
    runner: RoundSteps,
    engine: FakeEngine,
    rounds: RoundStore,
    redis: Redis,
    record: RoundRecord,
    published: list[str],
) -> None:
    engine.events[2] = runner.leave
    runner.step(record.round_id)
    assert_first(arrived(redis, record), 12)
    assert arrived(redis, record) == [nonce for nonces in engine.begun for nonce in nonces]
    assert published == []
    assert lease_of(rounds, record, "w2").place == len(arrived(redis, record))


# Redis.


def test_a_redis_that_is_away_in_the_middle_is_waited_for(
    runner: RoundSteps,
    engine: FakeEngine,
    rounds: RoundStore,
    redis: Redis,
    record: RoundRecord,
    server: fakeredis.FakeServer,
) -> None:
    def redis_goes() -> None:
        server.connected = False
        threading.Timer(0.2, lambda: setattr(server, "connected", True)).start()

    engine.events[2] = redis_goes
    engine.events[4] = stop(rounds, record)
    runner.step(record.round_id)
    assert_first(arrived(redis, record), 16)


def test_values_go_to_redis_with_the_question_for_the_next_lease(
    runner: RoundSteps,
    engine: FakeEngine,
    rounds: RoundStore,
    redis: Redis,
    record: RoundRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Counter[int] = Counter()
    together = scripts.together

    def counted(redis: Any, *calls: Any) -> list[Any]:
        asked[len(calls)] += 1
        return together(redis, *calls)

    monkeypatch.setattr(scripts, "together", counted)
    engine.events[20] = stop(rounds, record)
    runner.step(record.round_id)
    n_batches = len(arrived(redis, record)) // 4
    assert n_batches >= 20
    assert asked[2] >= n_batches - 4  # the last ones come home alone
    assert asked[1] <= 8  # to fill the engine, and at the end


def test_answers_that_are_lost_on_the_way_make_no_doubles(
    runner: RoundSteps,
    engine: FakeEngine,
    rounds: RoundStore,
    redis: Redis,
    record: RoundRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third call reaches Redis, but its answer does not come back."""
    calls = itertools.count(1)
    together = scripts.together

    def unsteady(*given: Any) -> list[Any]:
        answers = together(*given)
        if next(calls) % 3 == 0:
            raise ConnectionError("the answer was lost")
        return answers

    monkeypatch.setattr(scripts, "together", unsteady)
    engine.events[9] = stop(rounds, record)
    runner.step(record.round_id)
    nonces = arrived(redis, record)
    assert len(nonces) >= 36
    assert len(set(nonces)) == len(nonces) == read(rounds, record).n_processed


def test_a_full_outbox_pauses_the_round_says_so_loudly_and_goes_on_when_it_has_room(
    proofs: Proofs,
    engine: FakeEngine,
    redis: Redis,
    settings: Settings,
    clock: Clock,
    record: RoundRecord,
    caplog: pytest.LogCaptureFixture,
) -> None:
    small = RoundStore(redis, settings.model_copy(update={"outbox_max_bytes": TWO_LEASES}), clock)

    def said() -> list[int]:
        full = "is full (POC_OUTBOX_MAX_BYTES)"
        return [entry.levelno for entry in caplog.records if full in entry.message]

    with under_way(RoundSteps(proofs, "w1", small, lambda _: None, LONG_STEP_S), small, record):
        wait_until(said)
        assert len(engine.begun) == 3  # one lease was in hand when the limit was reached
        wait_until(lambda: len(arrived(redis, record)) == 12)
        assert said() == [logging.ERROR]
        redis.hset(f"poc:outbox:{record.round_id}", "bytes", "0")
        wait_until(lambda: len(engine.begun) > 3)


# Engines.


@pytest.mark.usefixtures("exits")
def test_a_lost_engine_ends_the_process_and_its_lease_goes_to_another(
    runner: RoundSteps, engine: FakeEngine, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    def lose() -> None:
        raise EngineLostError("The engine does not answer.")

    engine.events[2] = lose
    with pytest.raises(SystemExit) as ended:
        runner.step(record.round_id)
    assert ended.value.code == ENGINE_LOST_STATUS
    assert arrived(redis, record) == list(range(8))
    assert rounds.generating(MODEL) == record.round_id
    assert list(lease_of(rounds, record, "w2").nonces) == [8, 9, 10, 11]


def refusal(engine: FakeEngine) -> Callable[[], object]:
    return lambda: engine.refuse.update(block="k_dim must be at most 128.")


def test_an_engine_that_refuses_the_spec_stops_the_round_with_its_words(
    runner: RoundSteps,
    engine: FakeEngine,
    rounds: RoundStore,
    record: RoundRecord,
    published: list[str],
) -> None:
    engine.events[0] = refusal(engine)
    runner.step(record.round_id)
    stopped = read(rounds, record)
    assert (stopped.state, stopped.error) == (RoundState.STOPPED, "k_dim must be at most 128.")
    assert published == []


def test_values_that_cannot_be_stored_stop_the_round_and_leave_no_lease(
    runner: RoundSteps,
    rounds: RoundStore,
    record: RoundRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*given: Any) -> list[str]:
        raise ValueError("no such value")

    with monkeypatch.context() as patch:
        patch.setattr(entries, "packed", broken)
        with pytest.raises(ValueError, match="no such value"):
            runner.step(record.round_id)
    stopped = read(rounds, record)
    assert stopped.state is RoundState.STOPPED
    assert "Values cannot be stored" in str(stopped.error)
    runner.step(record.round_id)  # it is free for other work
    assert runner.held() == ""


def test_a_round_beyond_the_engines_limits_is_stopped_with_its_words(
    runner: RoundSteps, engine: FakeEngine, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    engine.info = dataclasses.replace(engine.info, max_batch_tokens=63)  # less than one nonce
    runner.step(record.round_id)
    stopped = read(rounds, record)
    assert stopped.state is RoundState.STOPPED
    assert "seq_len must be from 1 to 63" in str(stopped.error)
    assert leases(redis, record) == 0


def test_after_an_error_of_the_worker_a_new_step_can_run(
    runner: RoundSteps,
    engine: FakeEngine,
    rounds: RoundStore,
    redis: Redis,
    record: RoundRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mistake(*_: object) -> bool:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(scripts, "together", mistake)
        with pytest.raises(ZeroDivisionError):
            runner.step(record.round_id)
    assert rounds.generating(MODEL) == record.round_id
    engine.events[len(engine.ticks) + 2] = stop(rounds, record)
    runner.step(record.round_id)
    assert_first(arrived(redis, record), 8)


# Chat beside a round.


@pytest.fixture
def exclusive(
    engine: FakeEngine, rounds: RoundStore
) -> Iterator[tuple[ChatGate, Proofs, RoundSteps]]:
    """A worker whose gate refuses chat while a round runs."""
    gate = ChatGate(ChatPolicy("exclusive"), engine.unfinished_chat)
    proofs = Proofs(engine, gate)
    yield gate, proofs, RoundSteps(proofs, "w1", rounds, lambda _: None, LONG_STEP_S)
    proofs.stop()


def test_exclusive_does_not_wait_for_chat_to_pause(
    exclusive: tuple[ChatGate, Proofs, RoundSteps],
    engine: FakeEngine,
    rounds: RoundStore,
    record: RoundRecord,
) -> None:
    gate, _, runner = exclusive
    assert gate.enter_chat()
    engine.chat = 1
    engine.events[1] = stop(rounds, record)
    runner.step(record.round_id)
    assert len(engine.begun) >= 2


def test_chat_is_let_in_again_after_a_stop(
    exclusive: tuple[ChatGate, Proofs, RoundSteps],
    engine: FakeEngine,
    rounds: RoundStore,
    record: RoundRecord,
) -> None:
    gate, _, runner = exclusive
    let_in: list[bool] = []
    engine.events[1] = lambda: let_in.append(gate.enter_chat())
    engine.events[2] = stop(rounds, record)
    runner.step(record.round_id)
    assert [*let_in, gate.enter_chat()] == [False, True]


def test_chat_is_let_in_again_after_a_round_that_stopped_by_itself(
    exclusive: tuple[ChatGate, Proofs, RoundSteps],
    engine: FakeEngine,
    rounds: RoundStore,
    record: RoundRecord,
) -> None:
    gate, _, runner = exclusive
    engine.events[0] = refusal(engine)
    runner.step(record.round_id)
    assert rounds.generating(MODEL) is None
    assert gate.enter_chat()


def test_while_chat_has_the_engine_nothing_is_leased_and_the_next_step_is_queued(
    engine: FakeEngine,
    rounds: RoundStore,
    redis: Redis,
    record: RoundRecord,
    published: list[str],
) -> None:
    proofs = Proofs(engine, ChatGate(ChatPolicy("yield"), engine.unfinished_chat))
    engine.chat = 1
    RoundSteps(proofs, "w1", rounds, published.append, STEP_S).step(record.round_id)
    proofs.stop()
    assert engine.begun == []
    assert leases(redis, record) == 0
    assert published == [record.round_id]


def test_a_stop_while_chat_has_the_engine_gives_back_what_is_in_hand(
    engine: FakeEngine, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    proofs = Proofs(engine, ChatGate(ChatPolicy("yield"), engine.unfinished_chat))

    def chat_comes_for_good() -> None:
        engine.chat = 1
        threading.Timer(0.2, stop(rounds, record)).start()

    engine.events[2] = chat_comes_for_good
    RoundSteps(proofs, "w1", rounds, lambda _: None, LONG_STEP_S).step(record.round_id)
    wait_until(lambda: engine.is_idle)
    proofs.stop()
    assert_first(arrived(redis, record), 12)
    assert len(engine.begun) == 3
    assert leases(redis, record) == 0


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
