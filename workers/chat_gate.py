"""Decides before each slice (a short piece of proof work) whether proofs or chat use the engine."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from poc_core.settings.chat import ChatPolicy

# Seconds between two checks of the engine while chat uses it.
_POLL_S = 0.005
# Seconds without a call of `wait` after which proofs no longer count as waiting.
_GIVEN_UP_S = 5.0
# Share of the time that a validation gets during chat: the chain waits two minutes for its result.
VALIDATION_SHARE = 0.5


@dataclass(frozen=True)
class Starvation:
    """A rule for constant chat: once chat has blocked proofs for `after_s` seconds, proofs get the
    fraction `share` of the engine's time.
    """

    after_s: float = 60.0
    share: float = 0.05


@dataclass(frozen=True)
class GateStats:
    """Statistics of a chat gate: requests in progress, and counters since the process started."""

    chat_active: int  # chat requests in progress
    chat_total: int
    chat_refused: int  # answered with 503 by the policy `exclusive`
    skips: int  # times that proofs began to wait for chat
    proof_busy_s: float  # engine time used by proofs


class _Pace:
    """A schedule that limits slices during chat to the fraction `share` of the time."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.not_before = 0.0

    def ran(self, started: float, busy_s: float) -> None:
        # The period begins when the slice should have started, so that late slices do not lower
        # the share. A start more than one period ago does not count: chat was idle in between.
        period_s = busy_s / self._share
        self.not_before = min(started, max(self.not_before, started - period_s)) + period_s


class ChatGate:
    """A gate that decides before each slice of proof work whether the slice runs or waits for chat.

    Policy `yield`: slices run only while the engine has no unfinished chat request; for constant
    chat, see Starvation. Policy `share`: slices also run during chat, but only for the policy's
    fraction of the time. Policy `exclusive`: during a round, slices never wait, new chat requests
    are refused, and those in progress are ended; without a round, the policy works like `yield`.
    Under each policy, urgent slices (validations) get at least half of the time.
    """

    def __init__(
        self,
        policy: ChatPolicy,
        unfinished: Callable[[], int],
        starvation: Starvation = Starvation(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unfinished()` returns the number of chat requests that the engine still computes."""
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
        # Called, on any thread, when admitted chat must end because a round takes the engine.
        self.on_exclusive: Callable[[], None] = lambda: None
        share = policy.fraction if policy.mode == "share" else starvation.share
        self._pace = _Pace(share)
        self._urgent_pace = _Pace(max(share, VALIDATION_SHARE))
        # `yield`: when chat began to block waiting proofs.
        self._denied_since: float | None = None
        self._asked_at = 0.0

    # Called by the chat server.

    def enter_chat(self) -> bool:
        """Registers a chat request, until `leave_chat` is called. Returns False if the request must
        be refused instead.
        """
        with self._changed:
            if self._policy.mode == "exclusive" and self._computes_round:
                self._refused += 1
                return False
            self._active += 1
            self._total += 1
            return True

    def leave_chat(self) -> None:
        """Records that a chat request ended: its answer was sent, or its client disconnected."""
        with self._changed:
            self._active -= 1
            if self._active == 0:  # also resets the time if no proofs are waiting
                self._denied_since = None

    # Called by the proofs' thread.

    def set_computes_round(self, computes: bool) -> None:
        """Sets whether this worker computes a round. With policy `exclusive`, a round ends chat."""
        with self._changed:
            self._computes_round = computes
            self._changed.notify_all()
            is_exclusive = self._is_exclusive_now()
        if is_exclusive:
            self.on_exclusive()

    def chat_waits(self) -> bool:
        """Returns whether a slice that begins now would delay a chat request."""
        return not self._is_exclusive_now() and self._unfinished() > 0

    def wait(self, timeout_s: float, urgent: bool = False) -> bool:
        """Waits up to `timeout_s` seconds until a slice may run. Returns False on timeout."""
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
        """Records that slices began at `started` (this gate's clock) and took `busy_s` seconds."""
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
        """Returns the seconds until a slice may run; infinity if it must wait for chat to end."""
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
