"""The chat gate: when each policy lets a slice run, without spinning, and what it counts."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from poc_core.settings import Settings, parse_chat_policy
from tests.harness.samples import Clock
from workers.chat_gate import ChatGate, Starvation

STARVATION = Starvation()


class Gate(ChatGate):
    """A gate whose waiting moves the clock instead of taking time; `on_sleep` happens while it
    sleeps.
    """

    def __init__(self, policy: str, starvation: Starvation = STARVATION) -> None:
        self.clock = Clock()
        self.unfinished = 0  # requests that the engine has to work on
        super().__init__(parse_chat_policy(policy), lambda: self.unfinished, starvation, self.clock)
        self.sleeps: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None
        self._changed.wait = self._sleep  # type: ignore[method-assign, assignment]

    def _sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.clock.now += seconds
        self.on_sleep()

    def chat_comes(self) -> None:
        assert self.enter_chat()
        self.unfinished += 1

    def chat_ends(self) -> None:
        self.unfinished -= 1
        self.leave_chat()

    def run(self, busy_s: float) -> None:
        """A slice on the engine."""
        started = self.clock.now
        self.clock.now += busy_s
        self.ran(started, busy_s)

    def busy_share(self, seconds: float, busy_s: float, late_s: float = 0.0) -> float:
        """The share of the time that proofs get when they take what they may; each begins
        `late_s` late.
        """
        began, before = self.clock.now, self.stats().proof_busy_s
        while self.clock.now < began + seconds:
            assert self.wait(60)
            self.clock.now += late_s
            self.run(busy_s)
        return (self.stats().proof_busy_s - before) / (self.clock.now - began)


class TestEveryPolicy:
    @pytest.mark.parametrize("policy", ["yield", "share:0.3", "exclusive"])
    def test_without_chat_proofs_do_not_wait(self, policy: Any) -> None:
        gate = Gate(policy)
        assert gate.busy_share(10, 0.08) == pytest.approx(1.0)
        gate.chat_comes()
        gate.chat_ends()
        assert gate.wait(0)
        assert gate.sleeps == []
        assert gate.stats().skips == 0

    def test_counts_chat_and_the_time_of_proofs(self) -> None:
        gate = Gate("yield")
        assert [gate.enter_chat() for _ in range(3)] == [True] * 3
        gate.leave_chat()
        gate.run(0.25)
        gate.run(0.5)
        stats = gate.stats()
        assert (stats.chat_active, stats.chat_total, stats.chat_refused) == (2, 3, 0)
        assert stats.proof_busy_s == pytest.approx(0.75)

    @pytest.mark.parametrize("policy", ["yield", "share:0.3", "exclusive"])
    def test_a_client_that_reads_slowly_holds_up_nobody(self, policy: Any) -> None:
        gate = Gate(policy)
        gate.chat_comes()
        gate.unfinished -= 1  # the engine is done; the client has yet to read
        assert not gate.chat_waits()
        assert gate.busy_share(10, 0.08) == pytest.approx(1.0)
        assert gate.stats().chat_active == 1

    @pytest.mark.parametrize("policy", ["yield", "exclusive"])
    def test_what_the_engine_works_on_counts_also_when_its_client_has_left(
        self, policy: Any
    ) -> None:
        gate = Gate(policy)
        gate.chat_comes()
        gate.run(0.08)
        gate.leave_chat()
        assert gate.chat_waits()
        assert not gate.wait(0)


class TestYield:
    def test_proofs_wait_for_the_last_request_and_then_go_on(self) -> None:
        gate = Gate("yield")
        gate.chat_comes()
        gate.chat_comes()
        gate.chat_ends()
        assert not gate.wait(0)
        gate.on_sleep = gate.chat_ends
        assert gate.wait(60)
        assert gate.stats().chat_active == 0

    def test_waiting_ends_after_the_given_time(self) -> None:
        gate = Gate("yield")
        gate.chat_comes()
        began = gate.clock.now
        assert not gate.wait(0.5)
        assert gate.clock.now - began == pytest.approx(0.5)

    def test_proofs_go_on_within_milliseconds_of_chats_end(self) -> None:
        gate = Gate("yield")
        gate.chat_comes()
        gate.wait(0.5)
        assert max(gate.sleeps) <= 0.005

    def test_every_wait_is_one_skip_and_asking_is_none(self) -> None:
        gate = Gate("yield")
        gate.chat_comes()
        assert not gate.wait(0)
        assert gate.stats().skips == 0
        gate.wait(0.5)
        gate.wait(0.5)
        assert gate.stats().skips == 2
        gate.chat_ends()
        assert gate.wait(0.5)
        assert gate.stats().skips == 2

    def test_has_no_busy_spin_and_wakes_at_once(self) -> Any:
        clock_readings = looks_after_its_end = 0
        unfinished = 1

        def clock() -> float:
            nonlocal clock_readings
            clock_readings += 1
            return time.monotonic()

        def look() -> int:
            nonlocal looks_after_its_end
            seen = unfinished
            looks_after_its_end += not seen
            return seen

        gate = ChatGate(parse_chat_policy("yield"), look, clock=clock)

        def end_chat() -> None:
            nonlocal unfinished
            unfinished = 0

        threading.Timer(0.3, end_chat).start()
        began, cpu_s = time.monotonic(), time.thread_time()
        assert gate.wait(60)
        waited_s = time.monotonic() - began
        assert looks_after_its_end == 1
        assert time.thread_time() - cpu_s < 0.2 * waited_s
        assert clock_readings < 1000 * waited_s  # 60 looks in 0.3 s


class TestStarvation:
    """Constant chat under `yield`."""

    def starved(
        self, policy: str = "yield", rule: Starvation = STARVATION, waits_s: float = 59.5
    ) -> Gate:
        """A gate at which proofs waited for almost as long as they must before they get a share."""
        gate = Gate(policy, rule)
        gate.chat_comes()
        for _ in range(round(waits_s / 0.5)):
            assert not gate.wait(0.5)
        return gate

    def test_before_it_proofs_get_nothing(self) -> None:
        gate = self.starved()
        assert not gate.wait(0.4)
        assert gate.wait(0.2)

    @pytest.mark.parametrize("policy", ["yield", "exclusive"])
    @pytest.mark.parametrize(
        ("rule", "share", "late_s"),
        [
            (STARVATION, 0.05, 0.0),
            (Starvation(share=0.2), 0.2, 0.0),
            (Starvation(share=0.2), 0.2, 0.05),
        ],
    )
    def test_then_proofs_get_their_share_however_late_a_slice_begins(
        self, policy: Any, rule: Starvation, share: float, late_s: float
    ) -> None:
        gate = self.starved(policy, rule)
        assert gate.busy_share(200, 0.08, late_s) == pytest.approx(share, rel=0.1)

    def test_it_ends_when_chat_is_idle_and_takes_as_long_the_next_time(self) -> None:
        gate = self.starved()
        assert gate.wait(60)
        gate.run(0.08)
        gate.chat_ends()
        assert gate.wait(0)
        gate.run(0.08)
        gate.chat_comes()
        assert not gate.wait(59)
        assert gate.wait(60)

    def test_it_ends_also_when_nobody_asked_while_chat_was_idle(self) -> None:
        gate = self.starved()
        assert gate.wait(60)
        gate.run(0.08)
        gate.chat_ends()
        gate.chat_comes()
        gate.clock.now += 2
        assert not gate.wait(59)

    @pytest.mark.parametrize(("pause_s", "is_waiting"), [(4.99, True), (5.01, False)])
    def test_who_does_not_ask_for_5_seconds_has_not_waited(
        self, pause_s: float, is_waiting: bool
    ) -> None:
        """A job may be cancelled; a slice may take its time, or a Redis be slow."""
        gate = Gate("yield", Starvation(60.0, 0.05))
        gate.chat_comes()
        for _ in range(13):
            assert not gate.wait(0)
            gate.clock.now += pause_s
        assert gate.wait(0) == is_waiting

    def test_in_a_round_under_exclusive_there_is_none(self) -> None:
        gate = Gate("exclusive")
        gate.chat_comes()
        gate.set_computes_round(True)
        assert gate.busy_share(100, 0.08) == pytest.approx(1.0)


class TestShare:
    @pytest.mark.parametrize(
        ("policy", "share", "late_s"),
        [
            *(("share:0.3", 0.3, 0.0), ("share:0.5", 0.5, 0.0), ("share:0.05", 0.05, 0.0)),
            ("share:0.3", 0.3, 0.05),  # every slice begins late
        ],
    )
    def test_during_constant_chat_proofs_get_their_share_and_never_starve(
        self, policy: Any, share: float, late_s: float
    ) -> None:
        gate = Gate(policy, Starvation(1.0, 0.05))
        gate.chat_comes()
        assert gate.busy_share(200, 0.08, late_s) == pytest.approx(share, rel=0.05)

    def test_is_over_when_chat_ends(self) -> None:
        gate = Gate("share:0.3")
        gate.chat_comes()
        gate.busy_share(1, 0.08)
        gate.on_sleep = gate.chat_ends
        assert gate.wait(60)
        assert len(gate.sleeps) > 1
        gate.run(0.08)
        assert gate.wait(0)

    def test_what_proofs_had_while_chat_was_idle_is_not_held_against_them(self) -> None:
        gate = Gate("share:0.3")
        gate.busy_share(100, 0.08)
        gate.chat_comes()
        began = gate.clock.now
        assert gate.wait(60)
        assert gate.clock.now - began < 0.08 / 0.3

    def test_what_proofs_did_not_take_while_chat_was_busy_does_not_pile_up(self) -> None:
        gate = Gate("share:0.3")
        gate.chat_comes()
        gate.run(0.08)
        gate.clock.now += 100
        for _ in range(2):  # one that was due, and one for a period gone by
            assert gate.wait(0)
            gate.run(0.08)
        assert not gate.wait(0)


class TestUrgent:
    """Slices of validations, which have a deadline."""

    @pytest.mark.parametrize(
        ("policy", "share"),
        [("yield", 0.5), ("exclusive", 0.5), ("share:0.3", 0.5), ("share:0.8", 0.8)],
    )
    def test_they_have_half_of_the_time_from_the_first_on(self, policy: Any, share: Any) -> None:
        gate = Gate(policy)
        gate.chat_comes()
        assert gate.wait(0, urgent=True)
        began, before = gate.clock.now, gate.stats().proof_busy_s
        while gate.clock.now < began + 20:
            assert gate.wait(60, urgent=True)
            gate.run(0.08)
        busy_s = gate.stats().proof_busy_s - before
        assert busy_s / (gate.clock.now - began) == pytest.approx(share, rel=0.05)
        assert not gate.wait(0)  # the others wait as before

    def test_what_the_others_had_before_is_not_held_against_them(self) -> None:
        gate = Gate("share:0.05")
        gate.chat_comes()
        for _ in range(3):
            gate.run(0.08)
        gate.clock.now += 0.1
        assert not gate.wait(0)
        assert gate.wait(0, urgent=True)


class TestExclusive:
    def test_chat_is_refused_and_proofs_run_while_a_round_runs(self) -> None:
        gate = Gate("exclusive")
        gate.chat_comes()
        gate.set_computes_round(True)
        assert gate.wait(0)  # also beside the request that came before
        assert not gate.enter_chat()
        assert gate.stats().chat_refused == 1
        assert gate.stats().chat_active == 1
        assert gate.stats().skips == 0
        gate.set_computes_round(False)
        assert gate.enter_chat()

    def test_without_a_round_jobs_wait_for_chat(self) -> None:
        gate = Gate("exclusive")
        gate.chat_comes()
        assert not gate.wait(0.5)
        gate.on_sleep = lambda: gate.set_computes_round(True)
        assert gate.wait(0.5)

    @pytest.mark.parametrize("policy", ["yield", "share:0.3"])
    def test_other_policies_never_refuse(self, policy: Any) -> None:
        gate = Gate(policy)
        gate.set_computes_round(True)
        assert gate.enter_chat()
        assert gate.stats().chat_refused == 0


def test_a_workers_gate_opens_before_a_waiting_client_gives_up() -> None:
    from workers.main import _serve_chat

    engine: Any = SimpleNamespace(unfinished_chat=lambda: 1, serve_chat=lambda gate, *rest: 1)
    settings = Settings(generate_chunk_timeout_sec=60)
    gate, _ = _serve_chat(engine, settings, None)
    assert gate is not None
    clock = vars(gate)["_clock"] = Clock()
    began = clock()
    while not gate.wait(0):
        clock.now += 1
    assert 0 < clock() - began < 0.6 * settings.generate_chunk_timeout_sec
