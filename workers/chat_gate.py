"""The chat gate: decides before each micro-batch whether proofs or chat have the engine now (POC_CHAT_POLICY)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from poc_core.settings import ChatPolicy


@dataclass(frozen=True)
class GateStats:
    """Counted since the process began."""

    chat_active: int  # chat requests under way
    chat_total: int
    chat_refused: int  # answered 503, by policy `exclusive`
    skips: int  # times proofs began to wait for chat
    proof_busy_s: float  # time of the engine that proofs took


class ChatGate:
    """Shared by the chat server, which says when requests begin and end, and the threads that compute proofs.

    `yield`: a micro-batch runs only while no chat request is under way. `share`: also beside chat, but then so seldom
    that proofs have the fraction F of the time. `exclusive`: proofs never wait, chat is refused while a round runs;
    without a round, as `yield`.
    """

    def __init__(self, policy: ChatPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._changed = threading.Condition()
        self._active = 0
        self._total = 0
        self._refused = 0
        self._skips = 0
        self._proof_busy_s = 0.0
        self._round_runs = False
        self._not_before = 0.0  # `share`: when the next micro-batch beside chat may begin

    # The chat server's side.

    def enter_chat(self) -> bool:
        """A request begins; False: it is to be refused. One that was let in must `leave_chat`."""
        with self._changed:
            if self._policy.mode == "exclusive" and self._round_runs:
                self._refused += 1
                return False
            self._active += 1
            self._total += 1
            return True

    def leave_chat(self) -> None:
        with self._changed:
            self._active -= 1
            if self._active == 0:
                self._changed.notify_all()

    # The proofs' side.

    def round_runs(self, runs: bool) -> None:
        """Whether this worker computes for a round, which is when `exclusive` refuses chat."""
        with self._changed:
            self._round_runs = runs
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Waits until a micro-batch may run, at most `timeout_s`; False: it may not. Sleeps until chat's last
        request ends. With 0 it only asks, which does not count as a skip."""
        deadline = self._clock() + timeout_s
        with self._changed:
            if timeout_s > 0 and self._wait_s() > 0:
                self._skips += 1
            while (wait_s := self._wait_s()) > 0:
                left_s = deadline - self._clock()
                if left_s <= 0:
                    return False
                self._changed.wait(min(wait_s, left_s))
            return True

    def ran(self, started: float, busy_s: float) -> None:
        """A micro-batch that began at `started` (this gate's clock) kept the engine busy for `busy_s`."""
        with self._changed:
            self._proof_busy_s += busy_s
            if self._policy.mode == "share":
                # From when it should have begun, so that the fraction holds although each one begins a little late;
                # but never more than one period back, and time that chat did not want is not held against proofs.
                period_s = busy_s / self._policy.fraction
                self._not_before = min(started, max(self._not_before, started - period_s)) + period_s

    def stats(self) -> GateStats:
        with self._changed:
            return GateStats(self._active, self._total, self._refused, self._skips, self._proof_busy_s)

    def _wait_s(self) -> float:
        """Seconds a micro-batch has to wait as things stand; infinite until something changes."""
        if self._active == 0 or (self._policy.mode == "exclusive" and self._round_runs):
            return 0.0
        if self._policy.mode == "share":
            return self._not_before - self._clock()
        return float("inf")
