"""A worker's part in a round: leases nonces, computes them, fills the outbox, in a loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence

from pydantic import JsonValue
from redis.exceptions import RedisError

from poc_core.errors import ProoflineError
from poc_core.records import Lease, Refusal, RoundRecord, RoundState
from poc_core.state.rounds import RoundStore
from workers.patience import until_redis_answers
from workers.proofs import Proofs
from workers.runner import Runner

logger = logging.getLogger(__name__)

# Seconds between two looks at a full outbox.
_FULL_PAUSE_S = 0.2
# Seconds between two looks whether the round goes on; delays /stop by as much. Of many workers with
# slow batches they are most of what Redis is asked.
_LOOK_S = 0.25
# Seconds to wait for chat before looking at the clock and the round again.
_CHAT_WAIT_S = 0.5
# Seconds between two lines in the log about a full outbox.
_FULL_LOG_S = 10.0


_Done = tuple[Lease, Sequence[JsonValue]]
"""A lease and its values."""


class RoundWork:
    """Computes the current round on this process's engine, turn by turn; source of its leases."""

    look_s = _LOOK_S
    cuts = False
    _record: RoundRecord  # of the round that is computed

    def __init__(
        self,
        proofs: Proofs,
        worker_id: str,
        rounds: RoundStore,
    ) -> None:
        self._proofs = proofs
        self._worker_id = worker_id
        self._rounds = rounds
        self._runner = Runner(proofs, self)  # holds leases of one round, from turn to turn
        # Computed, and told to Redis with the next question, which follows at once.
        self._done: _Done | None = None
        self._leaving = threading.Event()
        self.is_begun = False  # and not ended
        self._full_logged_at = 0.0
        self._n_done = 0  # nonces since the last line in the log
        self._counts: Counter[str] = Counter()
        self._logged_at = time.monotonic()

    def leave(self) -> None:
        """Begins no further micro-batch: the worker ends. For signal handlers; does not wait."""
        self._leaving.set()

    def end(self) -> None:
        """Gives back what is in hand: the round is over, or this worker's part in it."""
        self.is_begun = False
        self._proofs.set_computes_round(False)  # first: the others may fail
        self._bring_done()
        self._runner.give_back()

    def take_counts(self) -> dict[str, int]:
        """Nonces computed since it was asked last, by round."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def run(self, round_id: str, deadline: float) -> bool:
        """Computes until `deadline` (time.monotonic). Whether the round goes on; else nothing of it
        is left in hand.
        """
        goes_on = False
        try:
            goes_on = self._compute(round_id, deadline)
            return goes_on
        finally:
            if not goes_on:
                self.end()

    def _compute(self, round_id: str, deadline: float) -> bool:
        """True if another turn is to follow."""
        if any(lease.owner_id != round_id for lease in self._runner.held):
            self._runner.give_back()
        record = until_redis_answers(lambda: self._rounds.read(round_id))
        if record is None or record.state is not RoundState.GENERATING or self._proofs.is_lost:
            return False
        self._record = record
        # Before the first look at the gate: `exclusive` does not wait for chat.
        self._proofs.set_computes_round(True)
        self.is_begun = True
        if not self._runner.held:
            self._n_done, self._logged_at = 0, time.monotonic()
        if not self._runner.run(lambda: time.monotonic() >= deadline or self._leaving.is_set()):
            return False
        self._bring_done()
        if self._leaving.is_set():
            while self._runner.held and self._proofs.chat_allows(0) and self._runner.bring_home():
                pass
            return False
        self._log()
        return True

    # What the runner asks for, see Source.

    def next(self, held: Sequence[Lease]) -> Sequence[Lease] | None:
        if not self._proofs.chat_allows(0 if held or self._done else _CHAT_WAIT_S):
            return [] if held or self.is_wanted(held) else None
        done, self._done = self._done, None
        lease = until_redis_answers(lambda: self._turn(done, held))
        if isinstance(lease, Lease):
            return [lease]
        if lease is not Refusal.FULL:
            return None
        if not held:
            self._wait_for_room()
        return []

    def is_wanted(self, leases: Sequence[Lease]) -> bool:
        self._bring_done()
        try:
            return self._rounds.generating(self._record.config.model) == self._record.round_id
        except RedisError:
            return True  # the next lease tells when Redis is back

    def complete(self, lease: Lease, values: Sequence[JsonValue]) -> None:
        self._bring_done()
        self._done = lease, values
        self._n_done += len(values)
        self._counts[f"round {lease.owner_id}"] += len(values)

    def release(self, lease: Lease, lost_engine: bool) -> None:
        until_redis_answers(lambda: self._rounds.release(lease, self._worker_id))

    def fail(self, leases: Sequence[Lease], error: ProoflineError) -> None:
        """Ends the round where no engine can compute this; a single engine's failure does not."""
        logger.error("the round stops: %s", error)
        until_redis_answers(
            lambda: self._rounds.switch(self._record, RoundState.STOPPED, str(error))
        )

    def _turn(self, done: _Done | None, held: Sequence[Lease]) -> Lease | Refusal:
        """The next lease, asked for together with storing the values that are there."""
        record, me = self._record, self._worker_id
        size = self._proofs.batch_size(record.config.spec)
        if done is None:
            return self._rounds.lease(record, me, size, held)
        taken, lease = self._rounds.turn(*done, record, me, size, held)
        _note(done, taken)
        return lease

    def _bring_done(self) -> None:
        """Stores the values that are there."""
        done, self._done = self._done, None
        if done is not None:
            (lease, values), me = done, self._worker_id
            _note(done, until_redis_answers(lambda: self._rounds.complete(lease, me, values)))

    def _wait_for_room(self) -> None:
        if time.monotonic() - self._full_logged_at > _FULL_LOG_S:
            self._full_logged_at = time.monotonic()
            logger.error(
                "the outbox of round %s is full (POC_OUTBOX_MAX_BYTES): generation pauses until"
                " the receiver takes what waits",
                self._record.round_id,
            )
        self._leaving.wait(_FULL_PAUSE_S)

    def _log(self) -> None:
        """Logs one line a turn."""
        now, round_id = time.monotonic(), self._record.round_id
        logger.info(
            "round %s: %d nonces in %.0f s, %.1f nonces/s%s; %d wait in the outbox",
            round_id,
            self._n_done,
            now - self._logged_at,
            self._n_done / max(now - self._logged_at, 1e-3),
            "" if self._proofs.chat_allows(0) else ", waits for chat",
            until_redis_answers(lambda: self._rounds.waiting_artifacts(round_id)),
        )
        self._n_done, self._logged_at = 0, now


def _note(done: _Done, taken: bool) -> None:
    if not taken:
        place = done[0].place
        logger.info("places %d .. of the round were computed by another worker too", place)
