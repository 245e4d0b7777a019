"""A worker's turns: each message makes the worker compute for some seconds."""

import logging
import threading
import time
from collections import Counter

from workers.queue.wake import Wake
from workers.work import Work

logger = logging.getLogger(__name__)

# Seconds of one turn: far below the broker's visibility timeout.
TURN_S = 10.0
# Jobs and rounds named in a turn's report.
_MOST_NAMED = 10


class Turns:
    """The turns of a worker: in each the worker computes its model's jobs and rounds for 10 s."""

    def __init__(
        self, model: str, work: Work, validations: Work, wake: Wake, turn_s: float = TURN_S
    ) -> None:
        """`validations`: work that another thread computes, and that the turns' reports include."""
        self._model = model
        self._work = work
        self._validations = validations
        self.wake = wake
        self._turn_s = turn_s
        self._in_turn = threading.Lock()

    def leave(self) -> None:
        """Stops leasing new work because the worker is ending. Signal handlers may call it."""
        self._work.leaving.set()
        self._validations.leaving.set()

    def take(self) -> str:
        """Computes for one turn, and queues the next turn if work is left. Returns a report for
        Flower, which is empty if another turn is running.
        """
        if not self._in_turn.acquire(blocking=False):
            return ""
        began = time.monotonic()
        try:
            goes_on = self._work.run(began + self._turn_s)
        finally:
            self._in_turn.release()
        if goes_on and not self._work.leaving.is_set():
            self.wake.myself()
        report = self._report()
        logger.info("%s in %.1f s", report, time.monotonic() - began)
        return report

    def look(self) -> None:
        """Queues a turn if this worker is idle although there is work: messages can get lost."""
        if not self._in_turn.locked() and not self.wake.waits() and self._work.has_some():
            self.wake.myself()

    def end(self) -> None:
        """Gives back the leases that the worker holds between two turns."""
        self._work.give_back()

    def _report(self) -> str:
        done = Counter(self._work.take_counts()) + Counter(self._validations.take_counts())
        named = [f"{n} nonces of {what}" for what, n in done.items()]
        if len(named) > _MOST_NAMED:
            n_left = sum(list(done.values())[_MOST_NAMED:])
            named[_MOST_NAMED:] = [f"{n_left} nonces of {len(named) - _MOST_NAMED} more"]
        return f"{self._model}: {', '.join(named) or 'nothing to compute'}"
