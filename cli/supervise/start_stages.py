"""Announces how long each stage of the workers' start took, in one line for all workers."""

import threading
import time
from collections.abc import Callable

from workers.engines import stages

FIRST = "starting Python"
# Seconds after which a long stage is announced. The interval doubles each time.
FIRST_WAIT_S = 60.0


class StartStages:
    """Measures the stages of `n` workers' start by their logs, and announces them. Thread-safe.

    A stage ends for good when all workers have begun a later stage. If a worker is restarted, only
    the time of the current stage begins again.
    """

    def __init__(
        self, n: int, announce: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._n = n
        self._announce = announce
        self._clock = clock
        self._lock = threading.Lock()
        self._stage = FIRST
        self._since = clock()
        self._next_word_s = FIRST_WAIT_S
        self._order = [FIRST]  # stages in the order of the fastest worker
        self._reached: dict[str, int] = {}  # worker -> index in the order
        self._speeds: dict[str, tuple[float, int]] = {}  # worker -> nonces/s, tokens of a nonce
        self.is_over = False

    def hear(self, worker: str, line: str) -> None:
        """Reads a worker's log line, which may begin a stage or report a speed."""
        if found := stages.BEGINS.search(line):
            with self._lock:
                if found[1] not in self._order:
                    self._order.append(found[1])
                if found[1] == self._stage and worker in self._reached:
                    self._since = self._clock()  # restarted after a crash
                self._reach(worker, self._order.index(found[1]))
        elif found := stages.SPEED.search(line):
            with self._lock:
                self._speeds[worker] = (float(found[1]), int(found[2]))

    def ready(self, worker: str) -> None:
        with self._lock:
            self._reach(worker, len(self._order))

    def wait(self) -> None:
        """Announces a long stage: after FIRST_WAIT_S, then at doubling intervals. Call it often."""
        with self._lock:
            waited_s = self._clock() - self._since
            if not self.is_over and waited_s >= self._next_word_s:
                self._next_word_s *= 2
                self._announce(f"{self._stage}: {waited_s:.0f} s so far")

    @property
    def speed(self) -> str:
        """A text with the sum of the workers' speeds in their self-tests; "" if none is known."""
        with self._lock:
            found = list(self._speeds.values())
        if not found:
            return ""
        total = sum(nonces_per_s for nonces_per_s, _ in found)
        return f"{total:,.0f} nonces/s of {found[0][1]} tokens in the self-test"

    def _reach(self, worker: str, index: int) -> None:
        self._reached[worker] = max(index, self._reached.get(worker, 0))
        if self.is_over or len(self._reached) < self._n:
            return
        slowest = min(self._reached.values())
        if slowest <= self._order.index(self._stage):
            return
        now = self._clock()
        self._announce(f"{self._stage}: {now - self._since:.1f} s")
        self.is_over = slowest == len(self._order)
        if not self.is_over:
            self._stage, self._since, self._next_word_s = self._order[slowest], now, FIRST_WAIT_S
