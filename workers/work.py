"""A worker's part in its model's work: leases nonces, of a round before those of jobs, and stores
values.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from pydantic import JsonValue
from redis.exceptions import RedisError

from poc_core.errors import ProoflineError
from poc_core.records import Lease, Refusal, RoundRecord, RoundState
from poc_core.state.client import is_transient
from poc_core.state.held_leases import HeldLeases
from poc_core.state.jobs import JobStore
from poc_core.state.rounds import RoundStore
from workers.patience import until_redis_answers
from workers.proofs import Proofs
from workers.runner import Runner

logger = logging.getLogger(__name__)

# Seconds that chat uses the engine before clients see that their job waits for chat.
_CHAT_WAIT_S = 1.0
# Seconds between two checks of a full outbox, and between two log lines about one.
_FULL_PAUSE_S = 0.2
_FULL_LOG_S = 10.0

_Done = tuple[Lease, Sequence[JsonValue]]
"""A lease and its values."""


class Work:
    """Computes its model's work on this process's engine, turn by turn.

    `urgent`: computes only validations, without waiting for chat; not for the thread that takes
    turns.
    """

    def __init__(
        self,
        proofs: Proofs,
        worker_id: str,
        jobs: JobStore,
        rounds: RoundStore,
        hand: HeldLeases,
        urgent: bool = False,
        pass_on: Callable[[], None] = lambda: None,
    ) -> None:
        """`hand`: this worker's leases, reported in its heartbeats.

        `pass_on`: wakes another worker.
        """
        self.leaving = threading.Event()
        self._proofs = proofs
        self._worker_id = worker_id
        self._model = proofs.engine.info.name
        self._jobs = jobs
        self._rounds = rounds
        self._hand = hand
        self._urgent = urgent
        self._pass_on = pass_on
        self._runner = Runner(proofs, self)  # keeps leases between turns
        self._held: Counter[str] = Counter()  # batches in progress, by the names of their leases
        self._round: RoundRecord | None = None  # the round whose nonces are leased
        # Computed values of a round, stored with the next lease request, which follows immediately.
        self._done: _Done | None = None
        self._counts: Counter[str] = Counter()
        # monotonic time; None if work does not wait for chat
        self._waits_since: float | None = None
        self._said = False  # whether the jobs' clients were informed that they wait
        self._full_logged_at = 0.0

    def run(self, deadline: float = math.inf) -> bool:
        """Computes until `deadline` (time.monotonic).

        Returns False if no work is left and none is held.
        """
        self._passes_on = True
        goes_on = False
        try:
            goes_on = self._runner.run(
                lambda: time.monotonic() >= deadline and not self.leaving.is_set()
            )
            self._store_done()
        finally:
            if not goes_on:
                self._end_round()
        return goes_on

    def give_back(self) -> None:
        """Gives all held leases back."""
        self._end_round()
        self._store_done()
        self._runner.give_back()

    def has_some(self) -> bool:
        """Returns whether there is work, or a round to end."""
        return (
            self._round is not None
            or self._rounds.generating(self._model) is not None
            or self._jobs.next_in_line(self._model) is not None
        )

    def take_counts(self) -> dict[str, int]:
        """Returns the nonces computed since the last call, by job or round."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    # Methods for the runner, see Source.

    def next(self, held: Sequence[Lease]) -> Sequence[Lease] | None:
        if self.leaving.is_set() or self._proofs.is_lost:
            return None
        chat_allows = self._urgent or self._proofs.chat_allows(0)
        if not chat_allows and held:
            return []
        if self._round is not None:
            return self._next_of_round(self._round, held) if chat_allows else self._wait_for_chat()
        leases = self._next_of_jobs(only_validations=self._urgent or not chat_allows)
        if leases or (not self._urgent and self._begin_round()):
            return leases
        if held:
            return []  # new work joins the work in progress
        return None if chat_allows else self._wait_for_chat()

    def is_wanted(self, leases: Sequence[Lease]) -> bool:
        self._store_done()
        try:
            return self._is_wanted(leases)
        except RedisError as error:
            logger.warning("could not look whether work is still wanted: %s", error)
            return True

    def complete(self, lease: Lease, values: Sequence[JsonValue]) -> None:
        if lease.of_round:
            self._store_done()
            self._done = lease, values
        else:
            self._complete_batch(lease, values)
        kind = "round" if lease.of_round else "validation" if lease.urgent else "job"
        self._counts[f"{kind} {lease.owner_id}"] += len(values)

    def release(self, lease: Lease, lost_engine: bool) -> None:
        if lease.of_round:
            until_redis_answers(lambda: self._rounds.release(lease, self._worker_id))
            return
        try:
            self._jobs.release(lease.owner_id, lease.place, self._worker_id, lost_engine)
        except RedisError as error:  # the batch is freed once the heartbeats do not contain it
            logger.warning("could not give back a batch of job %s: %s", lease.owner_id, error)
        finally:
            self._drop(lease.name)

    def fail(self, leases: Sequence[Lease], error: ProoflineError) -> None:
        for lease in {lease.owner_id: lease for lease in leases}.values():
            logger.error("%s failed: %s", lease.owner_id, error)
            if lease.of_round:
                self._stop_round(lease.owner_id, error)
            else:
                self._jobs.fail(lease.owner_id, str(error))

    # Methods for jobs.

    def _next_of_jobs(self, only_validations: bool) -> list[Lease]:
        name = self._hand.take()
        leases: list[Lease] = []
        try:
            first = self._jobs.lease(self._model, name, only_validations)
            if first is not None:
                leases.append(first)
                room = self._proofs.batch_size(first.spec) - len(first.nonces)
                leases += self._jobs.lease_more(first, room)
        except RedisError as error:
            if not is_transient(error):
                raise
            # Leases whose answer was lost are freed once the name is dropped.
            logger.warning("could not lease what is next: %s", error)
        finally:
            self._held[name] = len(leases)
            self._drop(name, 0)
        return leases

    def _complete_batch(self, lease: Lease, values: Sequence[JsonValue]) -> None:
        job_id = lease.owner_id
        try:
            if until_redis_answers(lambda: self._jobs.complete(job_id, lease.place, values)):
                finish_or_fail(self._jobs, job_id)
        except Exception as error:  # of this batch, not of the others
            self._not_completed(job_id, error)
        finally:
            self._drop(lease.name)

    def _drop(self, name: str, n_batches: int = 1) -> None:
        """Removes `n_batches` from the batches in progress that were leased under this name."""
        self._held[name] -= n_batches
        if not self._held[name]:
            del self._held[name]
            self._hand.drop(name)

    def _not_completed(self, job_id: str, error: Exception) -> None:
        if is_transient(error):
            logger.warning("job %s is finished when Redis is back: %s", job_id, error)
            return
        logger.error("a batch of job %s cannot be stored", job_id, exc_info=error)
        why = f"A batch cannot be stored: {error!r}. Report this with the worker's log."
        try:
            self._jobs.fail(job_id, why)
        except RedisError as again:
            logger.error("job %s cannot even be failed: %s", job_id, again)

    # Methods for a round.

    def _begin_round(self) -> bool:
        """Returns whether a round is generating; the next leases are then the round's."""
        round_id = until_redis_answers(lambda: self._rounds.generating(self._model))
        record = round_id and until_redis_answers(lambda: self._rounds.read(round_id))
        if not record or record.state is not RoundState.GENERATING:
            return False
        self._round = record
        # Before the next check of the gate: `exclusive` does not wait for chat.
        self._proofs.set_computes_round(True)
        return True

    def _end_round(self) -> None:
        if self._round is not None:
            self._round = None
            self._proofs.set_computes_round(False)

    def _next_of_round(self, record: RoundRecord, held: Sequence[Lease]) -> Sequence[Lease] | None:
        done, self._done = self._done, None
        of_it = [lease for lease in held if lease.owner_id == record.round_id]
        lease = until_redis_answers(lambda: self._ask(done, record, of_it))
        if isinstance(lease, Lease):
            return [lease]
        if lease is Refusal.EXHAUSTED:
            return None
        if lease is Refusal.STOPPED:
            self._end_round()
        elif not held:
            self._wait_for_room(record.round_id)
        return []

    def _ask(
        self, done: _Done | None, record: RoundRecord, held: Sequence[Lease]
    ) -> Lease | Refusal:
        """Requests the next lease, and stores available values in the same call."""
        size = self._proofs.batch_size(record.config.spec)
        if done is None:
            return self._rounds.lease(record, self._worker_id, size, held)
        _, lease = self._rounds.turn(*done, record, self._worker_id, size, held)
        return lease

    def _store_done(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            lease, values = done
            until_redis_answers(lambda: self._rounds.complete(lease, self._worker_id, values))

    def _stop_round(self, round_id: str, error: ProoflineError) -> None:
        record = until_redis_answers(lambda: self._rounds.read(round_id))
        if record is not None:
            why = str(error)
            until_redis_answers(lambda: self._rounds.switch(record, RoundState.STOPPED, why))

    def _wait_for_room(self, round_id: str) -> None:
        if time.monotonic() - self._full_logged_at > _FULL_LOG_S:
            self._full_logged_at = time.monotonic()
            logger.error(
                "the outbox of round %s is full (POC_OUTBOX_MAX_BYTES): generation pauses until"
                " the receiver takes what waits",
                round_id,
            )
        self.leaving.wait(_FULL_PAUSE_S)

    # Methods for chat.

    def _wait_for_chat(self) -> Sequence[Lease] | None:
        """Waits for chat before leasing anything, so that a worker with idle chat may take the
        work.
        """
        self._store_done()
        if self._round is None:
            job_id = until_redis_answers(lambda: self._jobs.next_in_line(self._model))
            if job_id is None:
                return None
            if self._passes_on:  # this worker may have taken the only message
                self._passes_on = False
                self._pass_on()
            if not self._proofs.chat_allows(_CHAT_WAIT_S):
                until_redis_answers(lambda: self._jobs.note_waiting(job_id, "chat"))
        elif not self._proofs.chat_allows(_CHAT_WAIT_S):
            round_id = until_redis_answers(lambda: self._rounds.generating(self._model))
            if round_id != self._round.round_id:
                self._end_round()
        return []

    def _is_wanted(self, leases: Sequence[Lease]) -> bool:
        ids, of_round = list(dict.fromkeys(lease.owner_id for lease in leases)), leases[0].of_round
        if of_round and self._rounds.generating(self._model) != ids[0]:
            return False
        if not of_round and not self._jobs.any_active(ids):
            return False
        if leases[0].urgent or self._proofs.chat_allows(0):
            self._waits_since = None
            self._said = self._said and not self._note(ids, "")
            return True
        if self.leaving.is_set():
            return False
        self._waits_since = self._waits_since or time.monotonic()
        if not of_round and time.monotonic() - self._waits_since > _CHAT_WAIT_S:
            self._waits_since, self._said = time.monotonic(), True
            return self._note(ids, "chat")
        return True

    def _note(self, job_ids: Sequence[str], what: str) -> bool:
        """Shows the jobs' clients what they wait for.

        Returns False if no job is to be computed now.
        """
        wanted = [self._jobs.note_waiting(job_id, what) for job_id in job_ids]
        return any(wanted)


def finish_or_fail(jobs: JobStore, job_id: str) -> None:
    """Builds the answer of a job whose batches are all done.

    A permanent error fails the job. An error of Redis is raised, and housekeeping retries.
    """
    try:
        jobs.finish(job_id)
    except Exception as error:
        if is_transient(error):
            raise
        logger.exception("the answer of job %s cannot be built", job_id)
        why = f"The answer cannot be built: {error!r}. Report this with the worker's log."
        jobs.fail(job_id, why)
