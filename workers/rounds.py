"""A worker's part in a round: lease nonces, compute them, put the values into the outbox, over
and over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from pydantic import JsonValue
from redis.exceptions import RedisError

from poc_core.errors import ProoflineError
from poc_core.records import RoundRecord, RoundState
from poc_core.state.rounds import Lease, LeaseRefusal, RoundStore
from workers.patience import until_redis_answers
from workers.proofs import Computation, Proofs

logger = logging.getLogger(__name__)

# Seconds between two looks at a full outbox.
_FULL_PAUSE_S = 0.2
# Seconds between two looks whether the round goes on: so much later than it could does /stop take
# effect.
_LOOK_S = 0.02
# Seconds to wait for chat before looking at the clock and the round again.
_CHAT_WAIT_S = 0.5
# Seconds of one task of a round: far below the broker's visibility timeout, and so long that the
# few ms between two tasks do not show.
STEP_S = 10.0
# Seconds between two lines in the log about a full outbox.
_FULL_LOG_S = 10.0


class _InHand(NamedTuple):
    lease: Lease
    computation: Computation


class RoundRunner:
    """Computes for the current round on this process's engine; one step at a time, whoever asks."""

    def __init__(
        self,
        proofs: Proofs,
        worker_id: str,
        rounds: RoundStore,
        publish_step: Callable[[str], None],
        step_s: float = STEP_S,
    ) -> None:
        """`publish_step(round_id)` queues the next step for this worker; each takes about
        `step_s` seconds.
        """
        self._proofs = proofs
        self._worker_id = worker_id
        self._rounds = rounds
        self._publish_step = publish_step
        self._step_s = step_s
        self._in_step = threading.Lock()
        self._leaving = threading.Event()
        self._in_hand: deque[_InHand] = (
            deque()
        )  # of one round, oldest first; kept from step to step
        self._full_logged_at = 0.0
        self._n_done = 0  # nonces since the last line in the log
        self._logged_at = time.monotonic()

    @property
    def is_in_step(self) -> bool:
        return self._in_step.locked()

    def leave(self) -> None:
        """The worker is to end: no further micro-batch begins. For signal handlers; does not
        wait.
        """
        self._leaving.set()

    def step(self, round_id: str) -> None:
        """Compute for about `step_s`, then queue the next step; returns at once when a step is
        under way.
        """
        if not self._in_step.acquire(blocking=False):
            return
        try:
            goes_on = self._step(round_id)
        finally:
            self._in_step.release()
        if goes_on and not self._leaving.is_set():
            self._publish_step(round_id)

    def _step(self, round_id: str) -> bool:
        """Whether another step is to follow; else nothing of a round is left in hand."""
        goes_on = False
        try:
            self._drop_others(round_id)
            record = until_redis_answers(lambda: self._rounds.read(round_id))
            goes_on = (
                record is not None
                and record.state is RoundState.GENERATING
                and self._run(record, time.monotonic() + self._step_s)
            )
            return goes_on
        finally:
            if not goes_on:
                self._proofs.set_computes_round(False)  # first: giving back may fail
                self._drop_others(None)

    def _run(self, record: RoundRecord, deadline: float) -> bool:
        """Leases and computes until the deadline (True) or until there is nothing more to do
        (False).

        As many micro-batches are in hand as keep every stage of the engine busy while values go to
        Redis.
        """
        self._proofs.set_computes_round(
            True
        )  # before the first look at the gate: `exclusive` does not wait for chat
        if not self._in_hand:
            self._n_done, self._logged_at = 0, time.monotonic()
        more = True
        while time.monotonic() < deadline and not self._leaving.is_set():
            if more:
                more = self._lease_more(record)
            if self._in_hand:
                if not self._wait_for_oldest(record):
                    return False
            elif not more or not (
                self._proofs.chat_allows(_CHAT_WAIT_S) or self._generates(record)
            ):
                return False
        if self._leaving.is_set():
            while self._in_hand and self._proofs.chat_allows(0) and self._wait_for_oldest(record):
                pass
            return False
        self._log(record)
        return True

    def _lease_more(self, record: RoundRecord) -> bool:
        """Fills the hand while chat lets it be computed. False: the round has nothing more to
        lease.
        """
        while len(self._in_hand) < self._proofs.depth and self._proofs.chat_allows(0):
            size = self._proofs.batch_size(record.config.spec)
            held = [in_hand.lease for in_hand in self._in_hand]
            lease = until_redis_answers(
                partial(self._rounds.lease, record, self._worker_id, size, held)
            )
            if lease is LeaseRefusal.FULL:
                if not self._in_hand:
                    self._wait_for_room(record.round_id)
                return True
            if not isinstance(lease, Lease):
                return False
            try:
                self._in_hand.append(
                    _InHand(lease, self._proofs.submit(record.config.spec, lease.nonces))
                )
            except ProoflineError as error:
                self._release(lease)
                self._fail(record, error)
                return False
        return True

    def _wait_for_oldest(self, record: RoundRecord) -> bool:
        """Brings the oldest micro-batch home when it ends within _LOOK_S. False: the round is
        over.
        """
        lease, computation = self._in_hand[0]
        try:
            values = computation.result(_LOOK_S)
        except ProoflineError as error:
            self._drop_others(None)
            return self._fail(record, error)
        if values is None:
            return self._generates(record)
        self._in_hand.popleft()
        self._complete(lease, values)
        return True

    def _generates(self, record: RoundRecord) -> bool:
        try:
            return self._rounds.generating(record.config.model) == record.round_id
        except RedisError:
            return True  # when it is back, the next lease tells

    def _complete(self, lease: Lease, values: list[JsonValue]) -> None:
        taken = until_redis_answers(lambda: self._rounds.complete(lease, self._worker_id, values))
        if not taken:
            logger.info(
                "places %d .. of the round were computed by another worker too", lease.first
            )
        self._n_done += len(values)

    def _fail(self, record: RoundRecord, error: ProoflineError) -> bool:
        """True: try again. What no engine can compute ends the round; one engine's failure does
        not, for the round has others: they go on while this one tries again or is replaced.
        """
        if self._proofs.judge(error):
            return True
        logger.error("the round stops: %s", error)
        until_redis_answers(lambda: self._rounds.switch(record, RoundState.STOPPED, str(error)))
        return False

    def _drop_others(self, round_id: str | None) -> None:
        """Gives back what is in hand of other rounds than this one."""
        while self._in_hand and self._in_hand[0].lease.round_id != round_id:
            lease, computation = self._in_hand.popleft()
            self._proofs.cancel(computation)
            self._release(lease)

    def _release(self, lease: Lease) -> None:
        until_redis_answers(partial(self._rounds.release, lease, self._worker_id))

    def _wait_for_room(self, round_id: str) -> None:
        if time.monotonic() - self._full_logged_at > _FULL_LOG_S:
            self._full_logged_at = time.monotonic()
            logger.error(
                "the outbox of round %s is full (POC_OUTBOX_MAX_BYTES): generation pauses until"
                " the receiver takes what waits",
                round_id,
            )
        self._leaving.wait(_FULL_PAUSE_S)

    def _log(self, record: RoundRecord) -> None:
        """One line a step."""
        now = time.monotonic()
        logger.info(
            "round %s: %d nonces in %.0f s, %.1f nonces/s%s; %d wait in the outbox",
            record.round_id,
            self._n_done,
            now - self._logged_at,
            self._n_done / max(now - self._logged_at, 1e-3),
            "" if self._proofs.chat_allows(0) else ", waits for chat",
            until_redis_answers(lambda: self._rounds.waiting_artifacts(record.round_id)),
        )
        self._n_done, self._logged_at = 0, now
