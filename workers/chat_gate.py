"""The chat gate: decides before each slice whether proofs or chat have the engine now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from poc_core.settings import ChatPolicy

# Seconds between two looks at the engine while chat has it.
_POLL_S = 0.005
# Seconds without a question after which nobody waits for chat to end.
_GIVEN_UP_S = 5.0
# The part of the time that a validation gets beside chat: the chain waits two minutes for it.
VALIDATION_SHARE = 0.5


@dataclass(frozen=True)
class Starvation:
    """The proofs' share under constant chat by policy `yield` (POC_CHAT_POLICY).

    `share` of the time, once they have had none for `after_s` seconds.
    """

    after_s: float = 60.0
    share: float = 0.05


@dataclass(frozen=True)
class GateStats:
    """Counters since the process began."""

    chat_active: int  # chat requests under way
    chat_total: int
    chat_refused: int  # answered 503, by policy `exclusive`
    skips: int  # times proofs began to wait for chat
    proof_busy_s: float  # time of the engine that proofs took


class _Pace:
    """When the next slice beside chat may begin, so that slices have `share` of the time."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.not_before = 0.0

    def ran(self, started: float, busy_s: float) -> None:
        # From when the slice should have begun, so that the share holds although each is late.
        # At most one period back: time that chat did not want is not held against proofs.
        period_s = busy_s / self._share
        self.not_before = min(started, max(self.not_before, started - period_s)) + period_s


class ChatGate:
    """Gate between proofs and chat, asked before each slice by the thread that computes proofs.

    `yield`: a slice runs only while the engine has no unfinished chat request; under constant chat
    it is as `share` with the starvation's share, until chat is idle again. `share`: slices also run
    beside chat, but so seldom that proofs have the fraction F of the time. `exclusive`: proofs
    never wait, chat is refused while a round runs, and what is under way then is ended; without a
    round, as `yield`. Under each,
    urgent slices (validations) have half of the time at least.
    """

    def __init__(
        self,
        policy: ChatPolicy,
        unfinished: Callable[[], int],
        starvation: Starvation = Starvation(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unfinished`: chat requests that the engine works on, not what clients have to read."""
        self._policy = policy
        self._unfinished = unfinished
        self._starvation = starvation
        self._clock = clock
        self._changed = threading.Condition()
        self._active = 0
        self._total = 0
        self._refused = 0
        self._skips = 0
        self._proof_busy_s = 0.0
        self._computes_round = False
        # Called, on whichever thread, when chat that was let in is to end: a round has the engine.
        self.on_exclusive: Callable[[], None] = lambda: None
        share = policy.fraction if policy.mode == "share" else starvation.share
        self._pace = _Pace(share)
        self._urgent_pace = _Pace(max(share, VALIDATION_SHARE))
        # `yield`: when chat took the engine from proofs that want it.
        self._denied_since: float | None = None
        self._asked_at = 0.0

    # The chat server's side.

    def enter_chat(self) -> bool:
        """Lets a chat request in, which must `leave_chat` later; False: refuse it."""
        with self._changed:
            if self._policy.mode == "exclusive" and self._computes_round:
                self._refused += 1
                return False
            self._active += 1
            self._total += 1
            return True

    def leave_chat(self) -> None:
        """The request's answer was sent, or its client left."""
        with self._changed:
            self._active -= 1
            if self._active == 0:  # idle, although maybe nobody asks now
                self._denied_since = None

    # The proofs' side.

    def set_computes_round(self, computes: bool) -> None:
        """Whether this worker computes for a round, which is when `exclusive` refuses chat."""
        with self._changed:
            self._computes_round = computes
            self._changed.notify_all()
            is_exclusive = self._is_exclusive_now()
        if is_exclusive:
            self.on_exclusive()

    def chat_waits(self) -> bool:
        """True if a slice would run beside chat now."""
        return not self._is_exclusive_now() and self._unfinished() > 0

    def wait(self, timeout_s: float, urgent: bool = False) -> bool:
        """Waits until a slice may run, at most `timeout_s`; False: it may not.

        With 0 it only asks, which does not count as a skip.
        """
        deadline = self._clock() + timeout_s
        with self._changed:
            if timeout_s > 0 and self._wait_s(urgent) > 0:
                self._skips += 1
            while (wait_s := self._wait_s(urgent)) > 0:
                left_s = deadline - self._clock()
                if left_s <= 0:
                    return False
                self._changed.wait(min(wait_s, left_s, _POLL_S))
            return True

    def ran(self, started: float, busy_s: float) -> None:
        """Slices that began at `started` (this gate's clock) kept the engine busy for `busy_s`."""
        with self._changed:
            self._proof_busy_s += busy_s
            self._pace.ran(started, busy_s)
            self._urgent_pace.ran(started, busy_s)

    def stats(self) -> GateStats:
        with self._changed:
            return GateStats(
                self._active, self._total, self._refused, self._skips, self._proof_busy_s
            )

    def _is_exclusive_now(self) -> bool:
        return self._policy.mode == "exclusive" and self._computes_round

    def _wait_s(self, urgent: bool) -> float:
        """Seconds a slice has to wait as things stand; infinite until something changes."""
        if self._is_exclusive_now() or self._unfinished() == 0:
            self._denied_since = None
            return 0.0
        now = self._clock()
        if urgent:
            return self._urgent_pace.not_before - now
        if self._policy.mode != "share":
            if self._denied_since is None or now - self._asked_at > _GIVEN_UP_S:
                self._denied_since = now
            self._asked_at = now
            if now - self._denied_since < self._starvation.after_s:
                return float("inf")
        return self._pace.not_before - now
