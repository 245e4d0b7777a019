"""The thread that runs slices whenever chat lets it, and what becomes of an engine that fails."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from poc_core.errors import ProoflineError, SpecError
from poc_core.settings import parse_chat_policy
from tests.harness.samples import OTHER_SPEC, SPEC
from tests.harness.waiting import wait_until
from tests.peers.fake_engine import FakeEngine, break_down, values
from workers import proofs as proofs_module
from workers.chat_gate import ChatGate, Starvation
from workers.engines.base import EngineLostError, EngineMemoryError
from workers.engines.validations import Validations
from workers.proofs import ENGINE_LOST_STATUS, Proofs

Start = Callable[..., Proofs]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def start(engine: FakeEngine) -> Iterator[Start]:
    """Starts the thread: start() without chat, start("yield") with a gate."""
    started: list[Proofs] = []

    def begin(
        policy: str | None = None, starvation: Starvation | None = None, max_step_ms: float = 50
    ) -> Proofs:
        gate = None
        if policy is not None:
            starves = starvation or Starvation()
            gate = ChatGate(parse_chat_policy(policy), engine.unfinished_chat, starves)
        started.append(Proofs(engine, gate, max_step_ms))
        return started[-1]

    yield begin
    for proofs in started:
        proofs.stop()


# Computing.


@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_every_micro_batch_gets_its_own_values(
    engine: FakeEngine, start: Start, n_stages: int, late: bool
) -> None:
    engine.__init__(n_stages, late=late)  # type: ignore[misc]
    proofs = start()
    micro_batches = [proofs.submit(OTHER_SPEC if n % 2 else SPEC, [n, n + 50]) for n in range(10)]
    assert [one.result(60) for one in micro_batches] == [
        values(OTHER_SPEC if n % 2 else SPEC, [n, n + 50]) for n in range(10)
    ]
    assert engine.begun == [[n, n + 50] for n in range(10)]


def test_a_result_that_is_not_there_yet_is_none(engine: FakeEngine, start: Start) -> None:
    proofs = start("yield")
    engine.chat = 1
    micro_batch = proofs.submit(SPEC, [1])
    assert micro_batch.result(0.05) is None
    engine.chat = 0
    assert micro_batch.result(60) == values(SPEC, [1])


def test_as_many_micro_batches_are_in_hand_as_keep_every_stage_busy() -> None:
    depths = []
    for n_stages in (1, 2, 4):
        proofs = Proofs(FakeEngine(n_stages))
        depths.append(proofs.depth)
        proofs.stop()
    assert depths == [2, 3, 5]


def test_of_whole_micro_batches_on_a_gpu_a_third_is_in_hand_for_when_the_first_ends(
    engine: FakeEngine, start: Start
) -> None:
    engine.slices_in_flight = 2
    in_slices = start("yield")
    assert (in_slices.depth, start().depth) == (2, 3)


def test_micro_batches_are_what_the_engine_holds_and_less_beside_chat_where_layers_are_long(
    engine: FakeEngine, start: Start
) -> None:
    engine.said_s = 0.2
    alone, beside = start(), start("yield")
    for proofs in (alone, beside):
        assert proofs.batch_size(SPEC) == 128
        assert proofs.submit(SPEC, range(128)).result(60) is not None
    assert alone.batch_size(SPEC) == 128
    assert beside.batch_size(SPEC) == 32


def test_slices_in_flight_share_the_time_that_chat_waits(engine: FakeEngine, start: Start) -> None:
    engine.said_s, engine.slices_in_flight = 0.2, 2
    proofs = start("yield")
    proofs.submit(SPEC, range(128)).result(60)
    assert proofs.batch_size(SPEC) == 16


def test_a_spec_beyond_the_models_limits_is_refused_at_once(
    engine: FakeEngine, start: Start
) -> None:
    with pytest.raises(SpecError, match="from 1 to 1024"):
        start().submit(SPEC.model_copy(update={"seq_len": 2000}), [1])
    assert engine.ticks == []


def test_a_spec_that_the_engine_refuses_ends_its_micro_batch_alone(
    engine: FakeEngine, start: Start
) -> None:
    engine.refuse["other"] = "k_dim must be at most 128."
    proofs = start()
    refused, other = proofs.submit(OTHER_SPEC, [1]), proofs.submit(SPEC, [2])
    with pytest.raises(SpecError, match="at most 128"):
        refused.result(60)
    assert other.result(60) == values(SPEC, [2])


def test_memory_that_is_short_fails_nothing_and_is_told(engine: FakeEngine, start: Start) -> None:
    def out_of_memory() -> None:
        raise EngineMemoryError("out of memory")

    engine.memory, engine.memory_error = 1000, out_of_memory
    proofs = start()
    assert proofs.submit(SPEC, range(128)).result(60) == values(SPEC, range(128))
    assert proofs.engine.info.max_batch_tokens == 512  # what the heartbeat says from now on
    assert proofs.batch_size(SPEC) == 8


def test_idle_proofs_cost_nothing(engine: FakeEngine, start: Start) -> None:
    proofs = start("yield")
    proofs.submit(SPEC, [1]).result(60)

    def are_idle() -> bool:
        n_calls, cpu_s = len(engine.ticks) + len(engine.fetches), time.process_time()
        time.sleep(0.3)
        did_nothing = len(engine.ticks) + len(engine.fetches) == n_calls
        return did_nothing and time.process_time() - cpu_s < 0.2  # of 0.3 s of a busy thread

    wait_until(are_idle, "what is left to do after the last result, and then nothing")


# Cancelling and stopping.


def test_a_cancelled_micro_batch_never_ends_and_leaves_the_engine(
    engine: FakeEngine, start: Start
) -> None:
    engine.said_s = 1.0  # so that each layer goes alone
    proofs = start("yield")
    engine.events[1] = lambda: setattr(engine, "chat", 1)
    cancelled, other = proofs.submit(SPEC, [1]), proofs.submit(SPEC, [2])
    wait_until(lambda: len(engine.ticks) == 2)
    proofs.cancel(cancelled)
    engine.chat = 0
    assert other.result(60) == values(SPEC, [2])
    assert cancelled.result(0) is None
    ran = [one for one in engine.slices if one.micro_batch == cancelled.id]
    assert len(ran) <= 3  # one was on its way
    wait_until(lambda: engine.is_idle)


def test_what_is_cancelled_while_chat_has_the_engine_is_dropped_before_chat_ends(
    engine: FakeEngine, start: Start
) -> None:
    proofs = start("yield")
    engine.events[1] = lambda: setattr(engine, "chat", 1)
    micro_batch = proofs.submit(SPEC, [1])
    wait_until(lambda: len(engine.ticks) == 2)
    proofs.cancel(micro_batch)
    wait_until(lambda: engine.is_idle)
    assert engine.chat == 1


def test_stopping_launches_nothing_more(engine: FakeEngine, start: Start) -> None:
    proofs = start()
    begun, goes_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        goes_on.wait(60)

    engine.events[0] = first
    proofs.submit(SPEC, [1])
    assert begun.wait(60)
    for _ in range(3):
        proofs.submit(SPEC, [1])
    stopping = threading.Thread(target=proofs.stop)
    stopping.start()
    wait_until(lambda: vars(proofs)["_stopped"])  # and waits for the slice under way
    goes_on.set()
    stopping.join(60)
    assert (stopping.is_alive(), len(engine.ticks)) == (False, 1)


# Beside chat.


def test_chat_that_comes_between_two_slices_is_waited_for(engine: FakeEngine, start: Start) -> None:
    looks = 0

    def unfinished() -> int:
        nonlocal looks
        looks += 1
        return engine.chat

    engine.unfinished_chat = unfinished  # type: ignore[method-assign]
    proofs = start("yield")
    engine.events = dict.fromkeys(range(4), lambda: setattr(engine, "chat", 1))
    micro_batch = proofs.submit(SPEC, [1])
    for n_ticks in range(1, 5):
        wait_until(lambda: len(engine.ticks) == n_ticks and engine.chat)  # noqa: B023
        seen = looks
        wait_until(lambda: looks >= seen + 5 or n_ticks == 4)  # noqa: B023 - the last one
        assert len(engine.ticks) == n_ticks
        engine.chat = 0
    assert micro_batch.result(60) == values(SPEC, [1])


def test_values_that_are_there_come_also_while_chat_has_the_engine(
    engine: FakeEngine, start: Start
) -> None:
    engine.late = True
    proofs = start("yield")
    engine.events[3] = lambda: setattr(engine, "chat", 1)  # with the last slice
    first, second = proofs.submit(SPEC, [1]), proofs.submit(SPEC, [2])
    assert first.result(60) == values(SPEC, [1])
    assert second.result(0.05) is None
    assert engine.chat == 1


def test_a_client_that_reads_slowly_does_not_hold_proofs(engine: FakeEngine, start: Start) -> None:
    proofs = start("yield")
    assert proofs.gate is not None
    proofs.gate.enter_chat()
    assert proofs.submit(SPEC, [1]).result(60) == values(SPEC, [1])
    assert proofs.gate.stats().chat_active == 1


def test_beside_chat_each_slice_is_waited_for_and_else_none(
    engine: FakeEngine, start: Start
) -> None:
    proofs = start("share:0.5")
    proofs.submit(SPEC, [1]).result(60)
    assert not any(tick.wait for tick in engine.ticks)
    engine.ticks.clear()
    engine.chat = 1
    proofs.submit(SPEC, [1]).result(60)
    assert all(tick.wait for tick in engine.ticks)


def test_under_share_proofs_get_their_share_beside_chat(engine: FakeEngine, start: Start) -> None:
    engine.layer_s, engine.chat = 0.01, 1
    proofs = start("share:0.25", max_step_ms=1)
    began = time.monotonic()
    for _ in range(5):
        assert proofs.submit(SPEC, [1]).result(60) == values(SPEC, [1])
    assert time.monotonic() - began > 0.04 * 4.5 / 0.25


def test_constant_chat_slows_proofs_and_does_not_stop_them(
    engine: FakeEngine, start: Start
) -> None:
    began_at: list[float] = []
    engine.events[0] = lambda: began_at.append(time.monotonic())
    engine.chat = 1
    proofs = start("yield", Starvation(after_s=0.2, share=0.5))
    asked_at = time.monotonic()
    micro_batch = proofs.submit(SPEC, [1])
    assert micro_batch.result(60) == values(SPEC, [1])
    assert engine.chat == 1
    assert began_at[0] - asked_at >= 0.2


def test_what_the_gate_counted_goes_with_the_heartbeat(engine: FakeEngine, start: Start) -> None:
    engine.said_s = 0.02
    proofs = start("yield")
    proofs.submit(SPEC, [1]).result(60)
    stats = proofs.chat_stats()
    assert stats["proof_busy_s"] == pytest.approx(0.08)
    assert (stats["chat_active"], stats["skips"]) == (0, 0)
    assert stats["slices"] == 4
    assert start().chat_stats() == {"slices": 0}


def test_validations_of_chats_go_with_it(engine: FakeEngine, start: Start) -> None:
    engine.validations = Validations("steps")
    engine.validations.add("steps", 1.5)
    stats = start("yield").chat_stats()
    assert (stats["validations_steps"], stats["validation_steps_s"]) == (1, 1.5)
    assert (stats["validations_pass"], stats["validation_pass_s"]) == (0, 0)


def test_exclusive_does_not_wait_for_chat_in_a_round(engine: FakeEngine, start: Start) -> None:
    proofs = start("exclusive")
    engine.chat = 1
    micro_batch = proofs.submit(SPEC, [1])
    assert micro_batch.result(0.05) is None
    proofs.set_computes_round(True)
    assert micro_batch.result(60) == values(SPEC, [1])


# Engines that fail.


def test_a_failed_engine_fails_all_that_is_in_hand_and_goes_on(
    engine: FakeEngine, start: Start
) -> None:
    engine.said_s, in_hand = 1.0, threading.Event()
    engine.events = {0: lambda: in_hand.wait(60), 5: break_down}
    proofs = start("yield")
    first, second, third = (proofs.submit(SPEC, [n]) for n in range(3))
    in_hand.set()
    assert first.result(60) == values(SPEC, [0])
    for failed in (second, third):
        with pytest.raises(ProoflineError, match="CUDA error"):
            failed.result(60)
    assert proofs.submit(SPEC, [9]).result(60) == values(SPEC, [9])


def test_a_mistake_in_the_worker_is_told_and_does_not_end_the_thread(
    engine: FakeEngine, start: Start
) -> None:
    def mistake() -> None:
        raise ZeroDivisionError("oops")

    engine.events[0] = mistake
    proofs = start()
    with pytest.raises(ProoflineError, match=r"ZeroDivisionError.*Report this"):
        proofs.submit(SPEC, [1]).result(60)
    assert proofs.submit(SPEC, [2]).result(60) == values(SPEC, [2])


@pytest.mark.usefixtures("exits")
@pytest.mark.parametrize(
    ("error", "n_before"), [(EngineLostError, 0), (ProoflineError, 2), (EngineMemoryError, 2)]
)
def test_an_engine_that_is_lost_or_fails_three_times_in_a_row_is_replaced(
    engine: FakeEngine, start: Start, error: type[ProoflineError], n_before: int
) -> None:
    proofs = start()
    assert [proofs.judge(error("CUDA error")) for _ in range(n_before)] == [True] * n_before
    with pytest.raises(SystemExit) as ended:
        proofs.judge(error("CUDA error"))
    assert ended.value.code == ENGINE_LOST_STATUS
    assert engine.closed


@pytest.mark.usefixtures("exits")
def test_a_success_in_between_begins_the_count_anew(engine: FakeEngine, start: Start) -> None:
    proofs = start()
    for _ in range(3):
        assert [proofs.judge(ProoflineError("CUDA error")) for _ in range(2)] == [True, True]
        proofs.submit(SPEC, [1]).result(60)
    assert not engine.closed


@pytest.mark.usefixtures("exits")
def test_a_refused_spec_neither_counts_nor_begins_the_count_anew(start: Start) -> None:
    proofs = start()
    errors = (ProoflineError("1"), SpecError("no"), ProoflineError("2"), SpecError("no"))
    # What no engine could compute is not repeated.
    assert [proofs.judge(error) for error in errors] == [True, False, True, False]
    with pytest.raises(SystemExit):
        proofs.judge(ProoflineError("3"))


def test_the_process_ends_also_when_the_engine_cannot_be_closed(
    engine: FakeEngine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(proofs_module.os, "_exit", ended.append)
    monkeypatch.setattr(engine, "close", break_down)
    with pytest.raises(ProoflineError):
        start().exit_without_engine(EngineLostError("gone"))
    assert ended == [ENGINE_LOST_STATUS]


def test_the_third_failure_in_a_row_loses_the_engine(start: Start) -> None:
    """Before the work is given back, so that a lost engine does not take it again."""
    proofs, are_lost = start(), []
    for number in range(3):
        error = ProoflineError(f"failure {number}")
        proofs.note(error)
        proofs.note(error)  # of another micro-batch that it ended: no further failure
        are_lost.append(proofs.is_lost)
    assert are_lost == [False, False, True]
