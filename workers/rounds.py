"""A worker's part in a round: lease nonces, compute them, put the values into the outbox, over and over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from pydantic import JsonValue

from poc_core.errors import SpecError
from poc_core.records import RoundRecord, RoundState
from poc_core.state.rounds import Lease, LeaseRefusal, RoundStore
from workers.engines.base import EngineLostError
from workers.host import EngineHost
from workers.patience import until_redis_answers

logger = logging.getLogger(__name__)

# Seconds between two looks at a full outbox.
_FULL_PAUSE_S = 0.2
# Seconds to wait for chat before looking at the clock and the round again.
_CHAT_SLICE_S = 0.5
# Seconds between two lines in the log about a full outbox.
_FULL_LOG_S = 10.0
# Micro-batches in a row that an engine may fail before it is replaced.
_MOST_FAILURES = 3


class _Computed(NamedTuple):
    lease: Lease
    values: list[JsonValue]


class RoundRunner:
    """Computes for the current round on this process's engine; one step at a time, whoever asks."""

    def __init__(
        self, host: EngineHost, rounds: RoundStore, publish_step: Callable[[str], None], step_s: float
    ) -> None:
        """`publish_step(round_id)` queues the next step for this worker; each takes about `step_s` seconds."""
        self._host = host
        self._rounds = rounds
        self._publish_step = publish_step
        self._step_s = step_s
        self._in_step = threading.Lock()
        self._leaving = threading.Event()
        self._engine_thread = ThreadPoolExecutor(1, "round-engine")
        self._full_logged_at = 0.0
        self._failures = 0

    @property
    def is_in_step(self) -> bool:
        return self._in_step.locked()

    def leave(self) -> None:
        """The worker is to end: no further micro-batch begins. For signal handlers; does not wait."""
        self._leaving.set()

    def step(self, round_id: str) -> None:
        """Compute for about `step_s`, then queue the next step; returns at once when a step is under way."""
        if not self._in_step.acquire(blocking=False):
            return
        goes_on = False
        try:
            record = until_redis_answers(lambda: self._rounds.read(round_id))
            goes_on = (
                record is not None
                and record.state is RoundState.GENERATING
                and self._run(record, time.monotonic() + self._step_s)
            )
        finally:
            if not goes_on:
                self._host.round_runs(False)
            self._in_step.release()
        if goes_on and not self._leaving.is_set():
            self._publish_step(round_id)

    def _run(self, record: RoundRecord, deadline: float) -> bool:
        """Leases and computes until the deadline (True) or until there is nothing more to do (False).

        While one lease computes, the values of the one before it go to Redis. The next lease is taken only when the
        engine is free: so /stop takes effect within one micro-batch.
        """
        config = record.config
        self._host.round_runs(True)  # before the first look at the gate: `exclusive` does not wait for chat to pause
        done: _Computed | None = None
        goes_on = True
        while time.monotonic() < deadline and not self._leaving.is_set():
            if not self._host.chat_allows(0):
                if done is not None:
                    self._complete(done)
                    done = None
                if not self._host.chat_allows(_CHAT_SLICE_S):
                    continue
            places = min(config.batch_size, self._host.step_size(config.spec))
            in_hand = done.lease if done else None
            lease = until_redis_answers(partial(self._rounds.lease, record, self._host.worker_id, places, in_hand))
            if not isinstance(lease, Lease) and done is not None:
                self._complete(done)
                done = None
            if lease is LeaseRefusal.FULL:
                self._wait_for_room(record.round_id)
                continue
            if not isinstance(lease, Lease):
                goes_on = False
                break
            computing = self._engine_thread.submit(self._host.step, config.spec, lease.nonces, _CHAT_SLICE_S)
            if done is not None:
                self._complete(done)
                done = None
            try:
                values = computing.result()
            except BaseException as error:
                self._give_up(record, lease, error)
                raise
            if values is None:  # chat came in between
                until_redis_answers(partial(self._rounds.release, lease, self._host.worker_id))
            else:
                done = _Computed(lease, values)
                self._failures = 0
        if done is not None:
            self._complete(done)
        return goes_on

    def _complete(self, computed: _Computed) -> None:
        lease, values = computed
        taken = until_redis_answers(lambda: self._rounds.complete(lease, self._host.worker_id, values))
        if not taken:
            logger.info("places %d .. of the round were computed by another worker too", lease.first)

    def _give_up(self, record: RoundRecord, lease: Lease, error: BaseException) -> None:
        """Hands the lease back. What no engine can compute ends the round; one engine's failure does not, for the round
        has others: they go on while this one tries again or, when that does not help, is replaced."""
        until_redis_answers(lambda: self._rounds.release(lease, self._host.worker_id))
        if isinstance(error, EngineLostError):
            self._host.exit_without_engine(error)
        if isinstance(error, SpecError):
            logger.error("the round stops: %s", error)
            until_redis_answers(lambda: self._rounds.switch(record, RoundState.STOPPED, str(error)))
            return
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            self._host.exit_without_engine(
                EngineLostError(f"The engine failed {self._failures} micro-batches in a row: {error}.")
            )

    def _wait_for_room(self, round_id: str) -> None:
        if time.monotonic() - self._full_logged_at > _FULL_LOG_S:
            self._full_logged_at = time.monotonic()
            logger.error(
                "the outbox of round %s is full (POC_OUTBOX_MAX_ARTIFACTS): generation pauses until the receiver takes "
                "what waits",
                round_id,
            )
        self._leaving.wait(_FULL_PAUSE_S)
