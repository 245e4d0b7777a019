"""Chat during a round."""

import threading
from collections.abc import Iterator

import pytest
from redis import Redis

from poc_core.records import RoundRecord
from poc_core.settings import ChatPolicy
from poc_core.state.rounds import RoundStore
from tests.harness.round_steps import (
    LONG_STEP_S,
    STEP_S,
    RoundSteps,
    assert_first,
    leases,
    refusal,
    stop,
)
from tests.harness.samples import MODEL
from tests.harness.stored_rounds import in_outbox
from tests.harness.waiting import wait_until
from tests.peers.fake_engine import FakeEngine
from workers.chat_gate import ChatGate
from workers.proofs import Proofs


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
    assert_first(in_outbox(redis, record), 12)
    assert len(engine.begun) == 3
    assert leases(redis, record) == 0
