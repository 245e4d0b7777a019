"""A worker's part in jobs: leases as many batches as its engine holds, and stores their values."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

from pydantic import JsonValue
from redis.exceptions import RedisError

from poc_core.errors import ProoflineError
from poc_core.records import Lease
from poc_core.state.client import is_transient
from poc_core.state.hand import Hand
from poc_core.state.jobs import JobStore
from workers.patience import until_redis_answers
from workers.proofs import Proofs
from workers.queue.job_queue import JobQueue
from workers.runner import Runner

logger = logging.getLogger(__name__)

# Seconds between two looks whether the work is still wanted; delays /stop by as much.
_LOOK_S = 0.05
# Seconds that chat keeps the engine before clients are told that their job waits for it.
_CHAT_WAIT_S = 1.0
# Seconds for which a task keeps its thread in a process whose engine is lost and that is about to
# end: else it would take the message that it has just handed on.
_LOST_PAUSE_S = 1.0


class JobBatches:
    """Runs batches of jobs, on whichever thread a task comes."""

    def __init__(
        self, proofs: Proofs, worker_id: str, jobs: JobStore, queue: JobQueue, hand: Hand
    ) -> None:
        """`hand`: of this worker, as its heartbeats tell."""
        self.proofs = proofs
        self.worker_id = worker_id
        self.jobs = jobs
        self.queue = queue
        self.hand = hand
        self.leaving = threading.Event()

    def leave(self) -> None:
        """At a worker's end gives back batches that wait for chat. For signal handlers."""
        self.leaving.set()

    def run_batch(self, job_id: str, batch_index: int) -> None:
        """Computes a batch, and further ones of the same spec that the engine has room for.

        Does nothing where somebody else has the batch, a round has the engine or the job has ended.
        """
        if self.proofs.is_lost:  # another worker is to have it
            self.queue.publish(job_id, [batch_index])
            self.leaving.wait(_LOST_PAUSE_S)
            return
        if not self._chat_allows(job_id):
            if self.leaving.is_set():
                self.queue.publish(job_id, [batch_index])
            return
        self._run(iter([(job_id, batch_index)]))

    def run_validations(self) -> None:
        """Computes what nobody computes of validations, however many jobs wait before them.

        Their messages wait behind those of plain jobs, or died with a worker.
        """
        if (first := self._next_validation()) is not None:
            rest = iter(lambda: until_redis_answers(self._next_validation), None)
            self._run(chain([first], rest))

    def note(self, job_ids: Sequence[str], what: str) -> bool:
        """Shows the jobs' clients what they wait for. False: none of them is to be computed now."""
        wanted = [self.jobs.note_waiting(job_id, what) for job_id in job_ids]
        return any(wanted)

    def _next_validation(self) -> tuple[str, int] | None:
        if self.leaving.is_set() or self.proofs.is_lost:
            return None
        return self.jobs.next_validation(self.proofs.engine.info.name)

    def _run(self, places: Iterator[tuple[str, int]]) -> None:
        source = _Neighbours(self, places)
        try:
            Runner(self.proofs, source).run(is_over=lambda: False)
        finally:
            for name in source.names:
                self.hand.drop(name)

    def _chat_allows(self, job_id: str) -> bool:
        """Waits for chat before anything is leased: a worker with idle chat may take the job.

        False: the job is not to be run here. A validation has its share at once.
        """
        if self.proofs.chat_allows(0) or until_redis_answers(
            lambda: self.jobs.is_validation(job_id)
        ):
            return True
        if self.proofs.chat_allows(_CHAT_WAIT_S):
            return True
        while (
            until_redis_answers(lambda: self.note([job_id], "chat")) and not self.leaving.is_set()
        ):
            if self.proofs.chat_allows(_CHAT_WAIT_S):
                until_redis_answers(lambda: self.note([job_id], ""))
                return True
        return False


class _Neighbours:
    """Source of named batches, and of those beside each: gives each lease once."""

    cuts = True

    def __init__(self, worker: JobBatches, places: Iterator[tuple[str, int]]) -> None:
        """`places`: jobs and batches of theirs."""
        self._worker = worker
        self._jobs = worker.jobs
        self._places = places
        self.names: list[str] = []  # of the leases
        self.look_s = _LOOK_S
        self._waits_since: float | None = None  # monotonic time; None: chat is not waited for
        self._said = False  # to the jobs' clients, that they wait

    def next(self, held: Sequence[Lease]) -> Sequence[Lease] | None:
        for job_id, index in self._places:
            self.names.append(name := self._worker.hand.take())
            lease = until_redis_answers(
                partial(self._jobs.lease, job_id, index, self._worker.worker_id, name)
            )
            if isinstance(lease, Lease):
                room = self._worker.proofs.batch_size(lease.spec) - len(lease.nonces)
                more = until_redis_answers(partial(self._jobs.lease_more, lease, name, room))
                return [lease, *more]
            logger.debug("batch %d of job %s not run here: %s", index, job_id, lease)
        return None

    def is_wanted(self, leases: Sequence[Lease]) -> bool:
        job_ids = _jobs_of(leases)
        try:
            if not self._jobs.any_active(job_ids):
                return False
            if leases[0].urgent or self._worker.proofs.chat_allows(0):
                self._waits_since = None
                self._said = self._said and not self._worker.note(job_ids, "")
                return True
            if self._worker.leaving.is_set():
                return False
            self._waits_since = self._waits_since or time.monotonic()
            if time.monotonic() - self._waits_since > _CHAT_WAIT_S:
                self._waits_since, self._said = time.monotonic(), True
                return self._worker.note(job_ids, "chat")
        except RedisError as error:
            logger.warning("could not look whether a job is still wanted: %s", error)
        return True

    def complete(self, lease: Lease, values: Sequence[JsonValue]) -> None:
        try:
            if until_redis_answers(
                lambda: self._jobs.complete(lease.owner_id, lease.place, values)
            ):
                finish_or_fail(self._jobs, lease.owner_id)
        except Exception as error:  # of this batch, not of the others
            self._not_completed(lease.owner_id, error)

    def release(self, lease: Lease, lost_engine: bool) -> None:
        job_id, index = lease.owner_id, lease.place
        if self._jobs.release(job_id, index, self._worker.worker_id, lost_engine=lost_engine):
            self._worker.queue.publish(job_id, [index])

    def fail(self, leases: Sequence[Lease], error: ProoflineError) -> None:
        for job_id in _jobs_of(leases):
            logger.error("job %s failed: %s", job_id, error)
            self._jobs.fail(job_id, str(error))

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
