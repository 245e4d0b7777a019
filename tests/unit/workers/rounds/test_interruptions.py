"""A step meets a stop, an unavailable Redis, a full outbox or a failing engine."""

import dataclasses
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import fakeredis
import pytest
from pydantic import JsonValue
from redis import Redis
from redis.exceptions import ConnectionError

from poc_core.records import Lease, RoundRecord, RoundState
from poc_core.settings import ChatPolicy, Settings
from poc_core.state import entries, scripts
from poc_core.state.rounds import RoundStore
from tests.harness.round_steps import (
    LONG_STEP_S,
    RoundSteps,
    assert_first,
    engine_for_four,
    leases,
    refusal,
    stop,
)
from tests.harness.samples import MODEL, Clock
from tests.harness.stored_rounds import in_outbox, read, take
from tests.harness.waiting import wait_until
from tests.peers.fake_engine import FakeEngine
from workers.chat_gate import ChatGate
from workers.engines.base import EngineLostError
from workers.proofs import ENGINE_LOST_STATUS, Proofs
from workers.work import Work

TWO_LEASES = 100  # bytes: more than a lease of 4 nonces takes in the outbox, less than two do


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
    assert in_outbox(redis, record) == []
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
    assert_first(in_outbox(redis, record), 12)
    assert in_outbox(redis, record) == [nonce for nonces in engine.begun for nonce in nonces]
    assert published == []
    assert take(rounds, record, "w2").place == len(in_outbox(redis, record))


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
    assert_first(in_outbox(redis, record), 16)


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
    n_batches = len(in_outbox(redis, record)) // 4
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
    nonces = in_outbox(redis, record)
    assert len(nonces) >= 36
    assert len(set(nonces)) == len(nonces) == read(rounds, record.round_id).n_processed


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
        wait_until(lambda: len(in_outbox(redis, record)) == 12)
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
    assert in_outbox(redis, record) == list(range(8))
    assert rounds.generating(MODEL) == record.round_id
    assert list(take(rounds, record, "w2").nonces) == [8, 9, 10, 11]


@pytest.mark.usefixtures("exits")
def test_what_was_computed_before_the_engine_was_lost_is_stored(
    runner: RoundSteps,
    engine: FakeEngine,
    redis: Redis,
    record: RoundRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_lost = threading.Event()
    complete = Work.complete

    def lose() -> None:
        is_lost.set()
        raise EngineLostError("The engine does not answer.")

    def check() -> None:
        if is_lost.is_set():
            raise EngineLostError("The engine does not answer.")

    def complete_late(work: Work, lease: Lease, values: Sequence[JsonValue]) -> None:
        complete(work, lease, values)
        assert is_lost.wait(60)

    engine.events[1] = lose
    monkeypatch.setattr(engine, "check", check)
    monkeypatch.setattr(Work, "complete", complete_late)
    with pytest.raises(SystemExit):
        runner.step(record.round_id)
    assert in_outbox(redis, record) == [0, 1, 2, 3]


def test_an_engine_that_refuses_the_spec_stops_the_round_with_its_words(
    runner: RoundSteps,
    engine: FakeEngine,
    rounds: RoundStore,
    record: RoundRecord,
    published: list[str],
) -> None:
    engine.events[0] = refusal(engine)
    runner.step(record.round_id)
    stopped = read(rounds, record.round_id)
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
    stopped = read(rounds, record.round_id)
    assert stopped.state is RoundState.STOPPED
    assert "Values cannot be stored" in str(stopped.error)
    runner.step(record.round_id)  # it is free for other work
    assert runner.held() == ""


def test_a_round_beyond_the_engines_limits_is_stopped_with_its_words(
    runner: RoundSteps, engine: FakeEngine, rounds: RoundStore, redis: Redis, record: RoundRecord
) -> None:
    engine.info = dataclasses.replace(engine.info, max_batch_tokens=63)  # less than one nonce
    runner.step(record.round_id)
    stopped = read(rounds, record.round_id)
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
    assert_first(in_outbox(redis, record), 8)
