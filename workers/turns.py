"""A worker's turns: some seconds of whatever is next, a round before jobs, for each message."""

from __future__ import annotations

import threading
import time
from collections import Counter

from poc_core.state.rounds import RoundStore
from workers.jobs import JobWork
from workers.patience import until_redis_answers
from workers.queue.wake import Wake
from workers.rounds import RoundWork

# Seconds of one turn: far below the broker's visibility timeout, and so long that the few ms
# between two turns do not show.
TURN_S = 10.0
# Jobs and rounds that are named in what a turn did.
_MOST_NAMED = 10


class Turns:
    """Computes what is next of a model on this process's engine, one turn at a time."""

    def __init__(
        self,
        model: str,
        jobs: JobWork,
        validations: JobWork,
        rounds: RoundWork,
        round_store: RoundStore,
        wake: Wake,
        turn_s: float = TURN_S,
    ) -> None:
        """`validations`: what another thread computes alongside, to be told with the turns."""
        self._model = model
        self._jobs = jobs
        self._validations = validations
        self._rounds = rounds
        self._round_store = round_store
        self.wake = wake
        self._turn_s = turn_s
        self._in_turn = threading.Lock()
        self._leaving = threading.Event()

    def leave(self) -> None:
        """Takes no more work: the worker ends. For signal handlers; does not wait."""
        self._leaving.set()
        self._jobs.leaving.set()
        self._validations.leaving.set()
        self._rounds.leave()

    def take(self) -> str:
        """Takes a turn, and publishes the next one while there is work; nothing during another.

        Returns what was computed, in words.
        """
        if not self._in_turn.acquire(blocking=False):
            return ""
        try:
            goes_on = self._compute(time.monotonic() + self._turn_s)
        finally:
            self._in_turn.release()
        if goes_on and not self._leaving.is_set():
            self.wake.myself()
        return self._told()

    def look(self) -> None:
        """Publishes a turn of this worker if it has work and takes none: messages may be lost."""
        if self._in_turn.locked() or self.wake.waits():
            return
        if (
            self._rounds.is_begun
            or self._round_store.generating(self._model) is not None
            or self._jobs.store.next_in_line(self._model) is not None
        ):
            self.wake.myself()

    def end(self) -> None:
        """Gives back what is held between two turns."""
        self._jobs.give_back()

    def _compute(self, deadline: float) -> bool:
        """True if there is more to do."""
        if self._jobs.holds and self._jobs.run(deadline):  # else a round has come
            return True
        round_id = until_redis_answers(lambda: self._round_store.generating(self._model))
        if round_id is not None and self._rounds.run(round_id, deadline):
            return True
        if self._rounds.is_begun:  # it ended between two turns
            self._rounds.end()
        return self._jobs.run(deadline)

    def _told(self) -> str:
        done: Counter[str] = Counter()
        for source in (self._rounds, self._jobs, self._validations):
            done.update(source.take_counts())
        named = [f"{n} nonces of {what}" for what, n in done.items()]
        if len(named) > _MOST_NAMED:
            n_left = sum(list(done.values())[_MOST_NAMED:])
            named[_MOST_NAMED:] = [f"{n_left} nonces of {len(named) - _MOST_NAMED} more"]
        return f"{self._model}: {', '.join(named) or 'nothing to compute'}"
