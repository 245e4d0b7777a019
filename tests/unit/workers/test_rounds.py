"""A worker's part in a round, on an engine that does what a test tells it to."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import fakeredis
import pytest
from pydantic import JsonValue
from redis import Redis
from redis.exceptions import ConnectionError

from poc_core.errors import ProoflineError, SpecError
from poc_core.records import ModelInfo, ProofSpec, RoundRecord, RoundState
from poc_core.settings import ChatPolicy, Settings
from poc_core.state import JobStore, RoundStore, WorkerRegistry, entries
from poc_core.state.rounds import Lease, LeaseRefusal
from tests.samples import MODEL, Clock, round_config, worker_record
from workers import host as host_module
from workers import patience
from workers.chat_gate import ChatGate
from workers.engines.base import Engine, EngineLostError
from workers.host import Chat, EngineHost
from workers.housekeeping import Housekeeper
from workers.queue.job_queue import JobQueue, StepQueue
from workers.rounds import RoundRunner
from workers.step_size import StepSize

MICRO_BATCH_S = 0.02
STEP_S = 0.25
LONG_STEP_S = 1.0  # for what goes on again in the same step


class FakeEngine(Engine):
    """Takes MICRO_BATCH_S a call; `events` holds what is to happen inside the n-th call, from 0."""

    def __init__(self) -> None:
        self.info = ModelInfo(MODEL, 128, 4, 1024, max_batch_tokens=8192, dtype="float32")
        self.calls: list[list[int]] = []
        self.events: dict[int, Callable[[], object]] = {}
        self.closed = False

    def compute(self, spec: ProofSpec, nonces: Sequence[int]) -> list[JsonValue]:
        self.calls.append(list(nonces))
        event = self.events.get(len(self.calls) - 1)
        if event is not None:
            event()
        time.sleep(MICRO_BATCH_S)
        return [f"v{nonce}" for nonce in nonces]

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0.01)


@pytest.fixture
def server() -> fakeredis.FakeServer:
    return fakeredis.FakeServer()


@pytest.fixture
def redis(server: fakeredis.FakeServer) -> Iterator[Redis]:
    client = fakeredis.FakeRedis(server=server)
    yield client
    client.close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def published() -> list[str]:
    return []


@pytest.fixture
def host(engine: FakeEngine, jobs: JobStore) -> EngineHost:
    return EngineHost(engine, "w1", jobs, cast(JobQueue, None))


@pytest.fixture
def runner(host: EngineHost, rounds: RoundStore, published: list[str]) -> RoundRunner:
    return RoundRunner(host, rounds, published.append, STEP_S)


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


def processed(rounds: RoundStore, record: RoundRecord) -> int:
    read = rounds.read(record.round_id)
    assert read is not None
    return read.n_processed


def test_a_step_computes_one_lease_after_the_other(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    engine.events[4] = stop(rounds, record)
    runner.step(record.round_id)
    assert engine.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    assert arrived(redis, record) == list(range(20))


def test_a_step_ends_in_time_and_queues_the_next(
    runner: RoundRunner, record: RoundRecord, published: list[str]
) -> None:
    began = time.monotonic()
    runner.step(record.round_id)
    assert 0.25 <= time.monotonic() - began < 1.0
    assert published == [record.round_id]


def test_the_next_step_goes_on_where_the_last_ended(
    runner: RoundRunner, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    runner.step(record.round_id)
    runner.step(record.round_id)
    nonces = arrived(redis, record)
    assert nonces == list(range(len(nonces)))
    assert processed(rounds, record) == len(nonces)


def test_nothing_is_left_in_hand_at_a_steps_end(
    runner: RoundRunner, engine: FakeEngine, redis: Redis, record: RoundRecord
) -> None:
    runner.step(record.round_id)
    assert arrived(redis, record) == [nonce for call in engine.calls for nonce in call]


def test_a_lease_is_no_larger_than_the_engine_holds(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, record: RoundRecord
) -> None:
    engine.info = ModelInfo(MODEL, 128, 4, 1024, max_batch_tokens=3 * 64, dtype="float32")
    engine.events[0] = stop(rounds, record)
    runner.step(record.round_id)
    assert engine.calls == [[0, 1, 2]]


def test_a_second_step_beside_the_first_does_nothing(
    runner: RoundRunner, engine: FakeEngine, record: RoundRecord, published: list[str]
) -> None:
    first = threading.Thread(target=runner.step, args=(record.round_id,))
    first.start()
    while not engine.calls:
        time.sleep(0.01)
    began = time.monotonic()
    runner.step(record.round_id)
    assert time.monotonic() - began < 0.1
    first.join()
    assert published == [record.round_id]


@pytest.mark.parametrize("round_id", ["0" * 32, None], ids=["unknown", "stopped"])
def test_a_step_of_a_round_that_does_not_run_does_nothing(
    runner: RoundRunner,
    engine: FakeEngine,
    rounds: RoundStore,
    record: RoundRecord,
    published: list[str],
    round_id: str | None,
) -> None:
    stop(rounds, record)()
    runner.step(round_id or record.round_id)
    assert (engine.calls, published) == ([], [])


# Stopping.


def test_a_stop_takes_effect_within_one_micro_batch(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, record: RoundRecord
) -> None:
    stopped_at: list[float] = []

    def stop_now() -> None:
        stop(rounds, record)()
        stopped_at.append(time.monotonic())

    engine.events[3] = stop_now
    runner.step(record.round_id)
    assert time.monotonic() - stopped_at[0] < MICRO_BATCH_S + 0.2
    assert len(engine.calls) == 4


def test_what_was_in_hand_at_the_stop_is_delivered(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    engine.events[3] = stop(rounds, record)
    runner.step(record.round_id)
    assert arrived(redis, record) == list(range(16))


def test_after_a_stop_no_further_step_is_queued(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, record: RoundRecord, published: list[str]
) -> None:
    engine.events[0] = stop(rounds, record)
    runner.step(record.round_id)
    assert published == []


def test_validating_pauses_generation(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, record: RoundRecord, published: list[str]
) -> None:
    engine.events[1] = lambda: rounds.switch(record, RoundState.VALIDATING)
    runner.step(record.round_id)
    assert (len(engine.calls), published) == (2, [])


def test_a_worker_that_is_to_end_finishes_its_micro_batch_and_leaves_the_round_to_others(
    runner: RoundRunner,
    engine: FakeEngine,
    rounds: RoundStore,
    redis: Redis,
    record: RoundRecord,
    published: list[str],
) -> None:
    engine.events[2] = runner.leave
    runner.step(record.round_id)
    assert (arrived(redis, record), published) == (list(range(12)), [])
    lease = rounds.lease(record, "w2", 4)
    assert isinstance(lease, Lease)
    assert lease.first == 12


# Redis.


def test_a_redis_that_is_away_in_the_middle_is_waited_for(
    host: EngineHost,
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
    RoundRunner(host, rounds, lambda _: None, LONG_STEP_S).step(record.round_id)
    assert arrived(redis, record) == list(range(20))


class LosesAnswers(RoundStore):
    """Every third call reaches Redis, but its answer does not come back."""

    calls = 0

    def _lose_some(self) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            raise ConnectionError("the answer was lost")

    def lease(self, *args: Any) -> Lease | LeaseRefusal:
        answer = super().lease(*args)
        self._lose_some()
        return answer

    def complete(self, *args: Any) -> bool:
        answer = super().complete(*args)
        self._lose_some()
        return answer


def test_answers_that_are_lost_on_the_way_make_neither_gaps_nor_doubles(
    host: EngineHost, engine: FakeEngine, redis: Redis, settings: Settings, clock: Clock, record: RoundRecord
) -> None:
    unsteady = LosesAnswers(redis, settings, clock)
    engine.events[9] = stop(unsteady, record)
    RoundRunner(host, unsteady, lambda _: None, LONG_STEP_S).step(record.round_id)
    assert arrived(redis, record) == list(range(40))


def test_a_full_outbox_pauses_the_round_and_says_so_loudly(
    host: EngineHost,
    engine: FakeEngine,
    redis: Redis,
    settings: Settings,
    clock: Clock,
    record: RoundRecord,
    caplog: pytest.LogCaptureFixture,
) -> None:
    small = RoundStore(redis, settings.model_copy(update={"outbox_max_artifacts": 8}), clock)
    RoundRunner(host, small, lambda _: None, STEP_S).step(record.round_id)
    assert len(engine.calls) == 3  # one lease was in hand when the limit was reached
    (line,) = [entry for entry in caplog.records if "is full (POC_OUTBOX_MAX_ARTIFACTS)" in entry.message]
    assert line.levelno == logging.ERROR


def test_a_round_whose_outbox_has_room_again_goes_on(
    host: EngineHost,
    engine: FakeEngine,
    redis: Redis,
    settings: Settings,
    clock: Clock,
    record: RoundRecord,
) -> None:
    small = RoundStore(redis, settings.model_copy(update={"outbox_max_artifacts": 8}), clock)
    delivery = threading.Timer(0.1, lambda: redis.hset(f"poc:outbox:{record.round_id}", "waiting", "0"))
    delivery.start()
    RoundRunner(host, small, lambda _: None, LONG_STEP_S).step(record.round_id)
    assert len(engine.calls) > 3


# Engines.


def test_a_lost_engine_ends_the_process_and_its_lease_goes_to_another(
    host: EngineHost,
    engine: FakeEngine,
    rounds: RoundStore,
    redis: Redis,
    record: RoundRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose() -> None:
        raise EngineLostError("The engine does not answer.")

    monkeypatch.setattr(host_module.os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    engine.events[2] = lose
    with pytest.raises(SystemExit) as ended:
        RoundRunner(host, rounds, lambda _: None, LONG_STEP_S).step(record.round_id)
    assert ended.value.code == host_module.ENGINE_LOST_STATUS
    assert arrived(redis, record) == list(range(8))
    lease = rounds.lease(record, "w2", 4)
    assert isinstance(lease, Lease)
    assert list(lease.nonces) == [8, 9, 10, 11]


def test_a_lost_engine_does_not_stop_the_round(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, record: RoundRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose() -> None:
        raise EngineLostError("The engine does not answer.")

    monkeypatch.setattr(host_module.os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    engine.events[0] = lose
    with pytest.raises(SystemExit):
        runner.step(record.round_id)
    assert rounds.generating(MODEL) == record.round_id


def refuse() -> None:
    raise SpecError("k_dim must be at most 128.")


def test_an_engine_that_refuses_the_spec_stops_the_round_with_its_words(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, record: RoundRecord, published: list[str]
) -> None:
    engine.events[1] = refuse
    with pytest.raises(SpecError):
        runner.step(record.round_id)
    stopped = rounds.read(record.round_id)
    assert stopped is not None
    assert (stopped.state, stopped.error) == (RoundState.STOPPED, "k_dim must be at most 128.")
    assert published == []


def break_down() -> None:
    raise ProoflineError("CUDA out of memory")


def test_an_engine_that_fails_now_and_then_leaves_the_round_to_go_on(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    engine.events = {1: break_down, 2: break_down, 4: break_down, 6: stop(rounds, record)}
    for _ in range(3):
        with pytest.raises(ProoflineError, match="out of memory"):
            runner.step(record.round_id)
    runner.step(record.round_id)
    assert arrived(redis, record) == list(range(16))


def test_an_engine_that_fails_again_and_again_is_replaced(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, record: RoundRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module.os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    engine.events = dict.fromkeys(range(3), break_down)
    for _ in range(2):
        with pytest.raises(ProoflineError, match="out of memory"):
            runner.step(record.round_id)
    with pytest.raises(SystemExit):
        runner.step(record.round_id)
    assert rounds.generating(MODEL) == record.round_id


def test_a_mistake_in_the_engine_neither_stops_the_round_nor_keeps_the_lease(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, record: RoundRecord
) -> None:
    def break_down() -> None:
        raise ZeroDivisionError

    engine.events[0] = break_down
    with pytest.raises(ZeroDivisionError):
        runner.step(record.round_id)
    assert rounds.generating(MODEL) == record.round_id
    lease = rounds.lease(record, "w2", 4)
    assert isinstance(lease, Lease)
    assert lease.first == 0


def test_after_an_error_a_new_step_can_run(
    runner: RoundRunner, engine: FakeEngine, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    def break_down() -> None:
        raise ZeroDivisionError

    engine.events[1] = break_down
    engine.events[3] = stop(rounds, record)
    with pytest.raises(ZeroDivisionError):
        runner.step(record.round_id)
    runner.step(record.round_id)
    assert arrived(redis, record) == list(range(12))


# Chat beside a round.


@pytest.fixture
def exclusive(engine: FakeEngine, jobs: JobStore, rounds: RoundStore) -> tuple[ChatGate, RoundRunner]:
    """A worker whose gate refuses chat while a round runs."""
    gate = ChatGate(ChatPolicy("exclusive"))
    host = EngineHost(engine, "w1", jobs, cast(JobQueue, None), Chat(gate, StepSize(engine.info, 1000)))
    return gate, RoundRunner(host, rounds, lambda _: None, STEP_S)


def test_exclusive_does_not_wait_for_chat_to_pause(
    exclusive: tuple[ChatGate, RoundRunner], engine: FakeEngine, rounds: RoundStore, record: RoundRecord
) -> None:
    gate, runner = exclusive
    assert gate.enter_chat()
    engine.events[1] = stop(rounds, record)
    runner.step(record.round_id)
    assert len(engine.calls) == 2


def test_chat_is_let_in_again_after_a_stop(
    exclusive: tuple[ChatGate, RoundRunner], engine: FakeEngine, rounds: RoundStore, record: RoundRecord
) -> None:
    gate, runner = exclusive
    let_in: list[bool] = []
    engine.events[1] = lambda: let_in.append(gate.enter_chat())
    engine.events[2] = stop(rounds, record)
    runner.step(record.round_id)
    assert [*let_in, gate.enter_chat()] == [False, True]


def test_chat_is_let_in_again_after_a_round_that_stopped_by_itself(
    exclusive: tuple[ChatGate, RoundRunner], engine: FakeEngine, record: RoundRecord
) -> None:
    gate, runner = exclusive
    engine.events[1] = refuse
    with pytest.raises(SpecError):
        runner.step(record.round_id)
    assert gate.enter_chat()


# Joining.


class Messages:
    """Stands in for the queue of one worker's steps."""

    def __init__(self) -> None:
        self.waiting: list[str] = []

    def publish(self, round_id: str) -> None:
        self.waiting.append(round_id)

    def is_empty(self) -> bool:
        return not self.waiting


class FakeJobQueue:
    def publish(self, job_id: str, batch_indexes: object) -> None: ...

    def is_empty(self) -> bool:
        return True


@pytest.fixture
def messages() -> Messages:
    return Messages()


@pytest.fixture
def housekeeper(
    jobs: JobStore,
    workers: WorkerRegistry,
    rounds: RoundStore,
    messages: Messages,
) -> Iterator[Housekeeper]:
    settings = Settings(heartbeat_s=0.01)
    queue, steps = cast(JobQueue, FakeJobQueue()), cast(StepQueue, messages)
    keeper = Housekeeper(worker_record("w1", state="starting"), workers, jobs, queue, rounds, steps, settings)
    keeper.start()
    yield keeper
    keeper.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_a_worker_that_starts_during_a_round_joins_it(
    housekeeper: Housekeeper, host: EngineHost, runner: RoundRunner, messages: Messages, record: RoundRecord
) -> None:
    housekeeper.ready(host, runner, None)
    wait_until(lambda: messages.waiting == [record.round_id])


def test_a_worker_that_still_loads_does_not_join(
    housekeeper: Housekeeper, messages: Messages, record: RoundRecord
) -> None:
    time.sleep(0.1)
    assert messages.waiting == []


def test_a_step_that_waits_is_not_queued_twice(
    housekeeper: Housekeeper, host: EngineHost, runner: RoundRunner, messages: Messages, record: RoundRecord
) -> None:
    housekeeper.ready(host, runner, None)
    wait_until(lambda: bool(messages.waiting))
    time.sleep(0.1)
    assert len(messages.waiting) == 1


def test_a_step_whose_message_was_lost_is_queued_again(
    housekeeper: Housekeeper, host: EngineHost, runner: RoundRunner, messages: Messages, record: RoundRecord
) -> None:
    housekeeper.ready(host, runner, None)
    wait_until(lambda: bool(messages.waiting))
    messages.waiting.clear()
    wait_until(lambda: messages.waiting == [record.round_id])


def test_no_step_is_queued_while_one_runs(
    housekeeper: Housekeeper,
    host: EngineHost,
    runner: RoundRunner,
    engine: FakeEngine,
    messages: Messages,
    record: RoundRecord,
) -> None:
    step = threading.Thread(target=runner.step, args=(record.round_id,))
    step.start()
    while not engine.calls:
        time.sleep(0.01)
    housekeeper.ready(host, runner, None)
    time.sleep(0.2)
    assert messages.waiting == []
    step.join()


def test_chat_is_let_in_again_when_the_round_ended_and_no_step_came(
    housekeeper: Housekeeper, exclusive: tuple[ChatGate, RoundRunner], engine: FakeEngine, jobs: JobStore
) -> None:
    gate, runner = exclusive
    gate.round_runs(True)
    host = EngineHost(engine, "w1", jobs, cast(JobQueue, None), Chat(gate, StepSize(engine.info, 1000)))
    housekeeper.ready(host, runner, None)
    wait_until(gate.enter_chat)


def test_a_worker_that_is_to_end_takes_nothing_new(
    housekeeper: Housekeeper,
    host: EngineHost,
    runner: RoundRunner,
    messages: Messages,
    workers: WorkerRegistry,
    record: RoundRecord,
) -> None:
    housekeeper.ready(host, runner, None)
    wait_until(lambda: bool(messages.waiting))
    housekeeper.drain()
    wait_until(lambda: workers.live()[0].state == "draining")
    messages.waiting.clear()
    time.sleep(0.1)
    assert messages.waiting == []
    assert workers.is_alive("w1")  # what it still computes is its own


def test_a_worker_does_not_join_a_round_of_another_model(
    housekeeper: Housekeeper, host: EngineHost, runner: RoundRunner, messages: Messages, rounds: RoundStore
) -> None:
    rounds.store(round_config(model="other"), RoundState.GENERATING)
    housekeeper.ready(host, runner, None)
    time.sleep(0.1)
    assert messages.waiting == []
