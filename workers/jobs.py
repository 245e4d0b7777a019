"""A worker's part in jobs: leases what is next in line, and stores its values."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence

from pydantic import JsonValue
from redis.exceptions import RedisError

from poc_core.errors import ProoflineError
from poc_core.records import Lease
from poc_core.state.client import is_transient
from poc_core.state.hand import Hand
from poc_core.state.jobs import JobStore
from workers.patience import until_redis_answers
from workers.proofs import Proofs
from workers.runner import Runner

logger = logging.getLogger(__name__)

# Seconds between two looks whether the work is still wanted; delays /stop by as much.
_LOOK_S = 0.05
# Seconds that chat keeps the engine before clients are told that their job waits for it.
_CHAT_WAIT_S = 1.0


class JobWork:
    """Computes batches of its model's jobs, turn by turn; source of their leases.

    `urgent`: of validations alone, at once whatever chat does: not for the thread that takes turns.
    """

    look_s = _LOOK_S
    cuts = True

    def __init__(
        self, proofs: Proofs, worker_id: str, store: JobStore, hand: Hand, urgent: bool = False
    ) -> None:
        """`hand`: of this worker, as its heartbeats tell."""
        self.store = store
        self.leaving = threading.Event()
        self._proofs = proofs
        self._worker_id = worker_id
        self._model = proofs.engine.info.name
        self._hand = hand
        self._urgent = urgent
        self._runner = Runner(proofs, self)  # holds leases from turn to turn
        self._held: Counter[str] = Counter()  # batches in hand, by the names of their leases
        self._counts: Counter[str] = Counter()
        self._waits_since: float | None = None  # monotonic time; None: chat is not waited for
        self._said = False  # to the jobs' clients, that they wait

    @property
    def holds(self) -> bool:
        """True if leases are held between two turns."""
        return bool(self._runner.held)

    def run(self, deadline: float = math.inf) -> bool:
        """Computes until `deadline` (time.monotonic). False: nothing is left, and nothing held."""
        return self._runner.run(lambda: time.monotonic() >= deadline and not self.leaving.is_set())

    def give_back(self) -> None:
        """Gives all held leases back."""
        self._runner.give_back()

    def take_counts(self) -> dict[str, int]:
        """Nonces computed since it was asked last, by job."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    # What the runner asks for, see Source.

    def next(self, held: Sequence[Lease]) -> Sequence[Lease] | None:
        if self.leaving.is_set() or self._proofs.is_lost:
            return None
        chat_allows = self._urgent or self._proofs.chat_allows(0)
        if not chat_allows and held:
            return []
        if leases := self._lease(only_validations=self._urgent or not chat_allows):
            return leases
        if held:
            return []  # what comes meanwhile joins what is computed
        return None if chat_allows else self._wait_for_chat()

    def _lease(self, only_validations: bool) -> list[Lease]:
        name = self._hand.take()
        leases: list[Lease] = []
        try:
            first = self.store.lease(self._model, name, only_validations)
            if first is not None:
                leases.append(first)
                room = self._proofs.batch_size(first.spec) - len(first.nonces)
                leases += self.store.lease_more(first, room)
        except RedisError as error:
            if not is_transient(error):
                raise
            # Leases whose answer was lost are freed once the name is dropped.
            logger.warning("could not lease what is next: %s", error)
        finally:
            self._held[name] = len(leases)
            self._drop(name, 0)
        return leases

    def _wait_for_chat(self) -> Sequence[Lease] | None:
        """Before anything is leased: a worker with idle chat may take the job."""
        job_id = until_redis_answers(lambda: self.store.next_in_line(self._model))
        if job_id is None:
            return None
        if self._proofs.chat_allows(_CHAT_WAIT_S):
            return []
        return [] if until_redis_answers(lambda: self._note([job_id], "chat")) else None

    def is_wanted(self, leases: Sequence[Lease]) -> bool:
        job_ids = _jobs_of(leases)
        try:
            if not self.store.any_active(job_ids):
                return False
            if leases[0].urgent or self._proofs.chat_allows(0):
                self._waits_since = None
                self._said = self._said and not self._note(job_ids, "")
                return True
            if self.leaving.is_set():
                return False
            self._waits_since = self._waits_since or time.monotonic()
            if time.monotonic() - self._waits_since > _CHAT_WAIT_S:
                self._waits_since, self._said = time.monotonic(), True
                return self._note(job_ids, "chat")
        except RedisError as error:
            logger.warning("could not look whether a job is still wanted: %s", error)
        return True

    def complete(self, lease: Lease, values: Sequence[JsonValue]) -> None:
        try:
            if until_redis_answers(
                lambda: self.store.complete(lease.owner_id, lease.place, values)
            ):
                finish_or_fail(self.store, lease.owner_id)
        except Exception as error:  # of this batch, not of the others
            self._not_completed(lease.owner_id, error)
        finally:
            self._drop(lease.name)
        kind = "validation" if lease.urgent else "job"
        self._counts[f"{kind} {lease.owner_id}"] += len(values)

    def release(self, lease: Lease, lost_engine: bool) -> None:
        try:
            self.store.release(lease.owner_id, lease.place, self._worker_id, lost_engine)
        except RedisError as error:  # it is free once the heartbeats do not name it
            logger.warning("could not give back a batch of job %s: %s", lease.owner_id, error)
        finally:
            self._drop(lease.name)

    def fail(self, leases: Sequence[Lease], error: ProoflineError) -> None:
        for job_id in _jobs_of(leases):
            logger.error("job %s failed: %s", job_id, error)
            self.store.fail(job_id, str(error))

    def _drop(self, name: str, n_batches: int = 1) -> None:
        """So many batches are no longer in hand, of those leased under this name."""
        self._held[name] -= n_batches
        if not self._held[name]:
            del self._held[name]
            self._hand.drop(name)

    def _note(self, job_ids: Sequence[str], what: str) -> bool:
        """Shows the jobs' clients what they wait for. False: none of them is to be computed now."""
        wanted = [self.store.note_waiting(job_id, what) for job_id in job_ids]
        return any(wanted)

    def _not_completed(self, job_id: str, error: Exception) -> None:
        if is_transient(error):
            logger.warning("job %s is finished when Redis is back: %s", job_id, error)
            return
        logger.error("a batch of job %s cannot be stored", job_id, exc_info=error)
        why = f"A batch cannot be stored: {error!r}. Report this with the worker's log."
        try:
            self.store.fail(job_id, why)
        except RedisError as again:
            logger.error("job %s cannot even be failed: %s", job_id, again)


def finish_or_fail(jobs: JobStore, job_id: str) -> None:
    """Builds the answer of a job whose batches are all done.

    What would go wrong with every try fails the job. An error of Redis is raised, and housekeeping
    tries again.
    """
    try:
        jobs.finish(job_id)
    except Exception as error:
        if is_transient(error):
            raise
        logger.exception("the answer of job %s cannot be built", job_id)
        why = f"The answer cannot be built: {error!r}. Report this with the worker's log."
        jobs.fail(job_id, why)


def _jobs_of(leases: Sequence[Lease]) -> list[str]:
    return list(dict.fromkeys(lease.owner_id for lease in leases))
