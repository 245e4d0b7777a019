"""A worker's part in jobs: claims batches, as many as its engine holds at a time, and brings
their values to the jobs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from pydantic import JsonValue
from redis.exceptions import RedisError

from poc_core.errors import ProoflineError, SpecError
from poc_core.state.client import is_transient
from poc_core.state.hand import Hand
from poc_core.state.jobs import Claim, JobStore
from workers.patience import until_redis_answers
from workers.proofs import Computation, Proofs
from workers.queue.job_queue import JobQueue

logger = logging.getLogger(__name__)

# Seconds between two looks whether what is computed is still wanted: so much later than it could
# does /stop take effect.
_LOOK_S = 0.05
# Seconds that chat keeps the engine before clients are told that their job waits for it.
_CHAT_WAIT_S = 1.0


class JobRunner:
    """Runs batches of jobs, on whichever thread a task comes."""

    def __init__(
        self, proofs: Proofs, worker_id: str, jobs: JobStore, queue: JobQueue, hand: Hand
    ) -> None:
        """`hand`: of this worker, as its heartbeats tell."""
        self._proofs = proofs
        self._worker_id = worker_id
        self._jobs = jobs
        self._queue = queue
        self._hand = hand
        self._leaving = threading.Event()

    def leave(self) -> None:
        """The worker is to end: batches that wait for chat go back. For signal handlers; does
        not wait.
        """
        self._leaving.set()

    def run_batch(self, job_id: str, batch_index: int) -> None:
        """Compute a batch of a job, unless somebody else has it, a round has the engine or the
        job has ended; and beside it as many further batches of the same spec as the engine
        holds.
        """
        if not self._chat_allows(job_id):
            if self._leaving.is_set():
                self._queue.publish(job_id, [batch_index])
            return
        lease = self._hand.take()
        try:
            claims = self._claim(job_id, batch_index, lease)
            if claims:
                self._run(claims)
        finally:
            self._hand.drop(lease)

    def _run(self, claims: Sequence[Claim]) -> None:
        try:
            values = self._compute(claims)
        except SpecError as error:
            for job in _jobs_of(claims):
                logger.error("job %s failed: %s", job, error)
                self._jobs.fail(job, str(error))
        except ProoflineError as error:
            try:
                self._give_back(claims, lost_engine=True)
            finally:
                self._proofs.judge(error)
        except BaseException:
            self._give_back(claims)
            raise
        else:
            self._complete(claims, values)

    def _chat_allows(self, job_id: str) -> bool:
        """Waits before anything is claimed, so that a worker whose chat is idle may take it.
        False: it is not to be run here.
        """
        if self._proofs.chat_allows(_CHAT_WAIT_S):
            return True
        while (
            until_redis_answers(lambda: self._jobs.note_waiting(job_id, "chat"))
            and not self._leaving.is_set()
        ):
            if self._proofs.chat_allows(_CHAT_WAIT_S):
                until_redis_answers(lambda: self._jobs.note_waiting(job_id, ""))
                return True
        return False

    def _claim(self, job_id: str, batch_index: int, lease: str) -> list[Claim]:
        claim = until_redis_answers(
            lambda: self._jobs.claim(job_id, batch_index, self._worker_id, lease)
        )
        if not isinstance(claim, Claim):
            logger.debug("batch %d of job %s not run here: %s", batch_index, job_id, claim)
            return []
        room = self._proofs.batch_size(claim.spec) - len(claim.nonces)
        return [claim, *until_redis_answers(lambda: self._jobs.claim_more(claim, lease, room))]

    def _compute(self, claims: Sequence[Claim]) -> list[JsonValue] | None:
        """The values of all their nonces, in order. None: they are not wanted any more, or the
        worker is to end.
        """
        spec, nonces = claims[0].spec, [nonce for claim in claims for nonce in claim.nonces]
        values: list[JsonValue] = []
        parts: deque[Computation] = deque()
        first = 0
        try:
            while len(values) < len(nonces):
                while first < len(nonces) and len(parts) < self._proofs.depth:
                    size = self._proofs.batch_size(spec)
                    parts.append(self._proofs.submit(spec, nonces[first : first + size]))
                    first += size
                found = self._await(parts[0], claims)
                if found is None:
                    return None
                values += found
                parts.popleft()
            return values
        finally:
            for part in parts:
                self._proofs.cancel(part)

    def _await(self, computation: Computation, claims: Sequence[Claim]) -> list[JsonValue] | None:
        jobs = _jobs_of(claims)
        waits_since: float | None = None
        said = False  # to the jobs' clients, that they wait
        while (values := computation.result(_LOOK_S)) is None:
            try:
                if not self._jobs.any_active(jobs):
                    return None
                if self._proofs.chat_allows(0):
                    waits_since = None
                    said = said and not self._note(jobs, "")
                    continue
                if self._leaving.is_set():
                    return None
                waits_since = waits_since or time.monotonic()
                if time.monotonic() - waits_since > _CHAT_WAIT_S:
                    waits_since, said = time.monotonic(), True
                    if not self._note(jobs, "chat"):
                        return None
            except RedisError as error:
                logger.warning("could not look whether a job is still wanted: %s", error)
        return values

    def _note(self, jobs: Sequence[str], what: str) -> bool:
        """Shows the jobs' clients what they wait for. False: none of them is to be computed now."""
        wanted = [self._jobs.note_waiting(job, what) for job in jobs]
        return any(wanted)

    def _complete(self, claims: Sequence[Claim], values: list[JsonValue] | None) -> None:
        if values is None:
            self._give_back(claims)
            return
        first = 0
        for claim in claims:
            own = values[first : first + len(claim.nonces)]
            first += len(claim.nonces)
            try:
                if until_redis_answers(
                    partial(self._jobs.complete, claim.job_id, claim.batch_index, own)
                ):
                    finish_or_fail(self._jobs, claim.job_id)
            except Exception as error:  # of this batch, not of the others
                self._not_completed(claim.job_id, error)

    def _not_completed(self, job_id: str, error: Exception) -> None:
        if is_transient(error):
            logger.warning("job %s is finished when Redis is back: %s", job_id, error)
            return
        logger.error("a batch of job %s cannot be stored", job_id, exc_info=error)
        try:
            self._jobs.fail(
                job_id, f"A batch cannot be stored: {error!r}. Report this with the worker's log."
            )
        except RedisError as again:
            logger.error("job %s cannot even be failed: %s", job_id, again)

    def _give_back(self, claims: Sequence[Claim], lost_engine: bool = False) -> None:
        for claim in claims:
            if self._jobs.release(
                claim.job_id, claim.batch_index, self._worker_id, lost_engine=lost_engine
            ):
                self._queue.publish(claim.job_id, [claim.batch_index])


def finish_or_fail(jobs: JobStore, job_id: str) -> None:
    """Build the answer of a job whose batches are all done. What would go wrong again with
    every try fails the job; while Redis is in trouble its error is raised, and housekeeping
    tries again.
    """
    try:
        jobs.finish(job_id)
    except Exception as error:
        if is_transient(error):
            raise
        logger.exception("the answer of job %s cannot be built", job_id)
        jobs.fail(
            job_id, f"The answer cannot be built: {error!r}. Report this with the worker's log."
        )


def _jobs_of(claims: Sequence[Claim]) -> list[str]:
    return list(dict.fromkeys(claim.job_id for claim in claims))
