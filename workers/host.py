"""The engine host: the engine of a worker process, and the batches of jobs that run on it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from pydantic import JsonValue
from redis.exceptions import RedisError

from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from poc_core.state.jobs import Claim, JobStore
from workers.chat_gate import ChatGate
from workers.engines.base import Engine, EngineLostError
from workers.patience import until_redis_answers
from workers.queue.job_queue import JobQueue
from workers.step_size import StepSize

logger = logging.getLogger(__name__)

# Exit status of a worker whose engine died (EX_SOFTWARE), so that its supervisor and its log tell it from a crash.
ENGINE_LOST_STATUS = 70


# Seconds a job's batch waits for chat before it looks whether it is still wanted.
_CHAT_SLICE_S = 1.0


class ChatBusyError(ProoflineError):
    """Chat left a job no time within its patience."""


@dataclass(frozen=True)
class Chat:
    """What a worker whose engine serves chat has beside the engine."""

    gate: ChatGate
    step_size: StepSize


class EngineHost:
    """Runs claimed batches on the engine, one at a time, and brings the values to the job.

    Tasks come on several threads, so that one batch computes while another's values are written.
    """

    def __init__(
        self,
        engine: Engine,
        worker_id: str,
        jobs: JobStore,
        queue: JobQueue,
        chat: Chat | None = None,
        patience_s: float = 60.0,
    ) -> None:
        """`chat`: None where the engine has none. `patience_s`: how long a job's batch waits for chat."""
        self.engine = engine
        self.worker_id = worker_id
        self._jobs = jobs
        self._queue = queue
        self._chat = chat
        self._patience_s = patience_s
        self._engine_lock = threading.Lock()
        self._leaving = threading.Event()

    def leave(self) -> None:
        """The worker is to end: batches that wait for chat go back. For signal handlers; does not wait."""
        self._leaving.set()

    def step_size(self, spec: ProofSpec) -> int:
        """Nonces of the next micro-batch: one that chat, where this engine has it, need not wait long for."""
        return self._chat.step_size.next(spec) if self._chat else self.engine.info.max_batch(spec.seq_len)

    def chat_allows(self, wait_s: float) -> bool:
        """Whether a micro-batch may run, after waiting for chat for at most `wait_s`."""
        return self._chat is None or self._chat.gate.wait(wait_s)

    def round_runs(self, runs: bool) -> None:
        """Tells the gate whether this worker computes for a round."""
        if self._chat is not None:
            self._chat.gate.round_runs(runs)

    def step(self, spec: ProofSpec, nonces: Sequence[int], wait_s: float) -> list[JsonValue] | None:
        """The values of one micro-batch (see Engine.compute). None: chat kept the engine for `wait_s`."""
        if self._chat is None:
            with self._engine_lock:
                return self.engine.compute(spec, nonces)
        deadline = time.monotonic() + wait_s
        while self.chat_allows(max(0.0, deadline - time.monotonic())):
            with self._engine_lock:
                # Asked again: a chat request may have come while another thread had the engine.
                if self.chat_allows(0):
                    started = time.monotonic()
                    values = self.engine.compute(spec, nonces)
                    self._chat.gate.ran(started, self.engine.busy_s)
                    self._chat.step_size.ran(spec, len(nonces), self.engine.busy_s)
                    return values
        return None

    def _compute_batch(self, claim: Claim) -> list[JsonValue] | None:
        """The values of a job's batch, in micro-batches between chat requests. None: the job or a round took it back,
        or it waits for chat and this worker is to end.

        ChatBusyError when chat kept the engine for longer than a job's patience.
        """
        values: list[JsonValue] = []
        waiting_since: float | None = None
        while len(values) < len(claim.nonces):
            nonces = claim.nonces[len(values) : len(values) + self.step_size(claim.spec)]
            step = self.step(claim.spec, nonces, _CHAT_SLICE_S)
            if step is not None:
                values += step
                if waiting_since is not None:
                    waiting_since = None
                    until_redis_answers(lambda: self._jobs.note_waiting(claim.job_id, ""))
                continue
            if self._leaving.is_set():
                return None
            waiting_since = waiting_since or time.monotonic() - _CHAT_SLICE_S
            if time.monotonic() - waiting_since > self._patience_s:
                raise ChatBusyError(
                    f"Chat kept the engine busy for {self._patience_s:g} s (POC_GENERATE_CHUNK_TIMEOUT_SEC); send the "
                    "request again when there is less chat, or let the operator set POC_CHAT_POLICY=share:F."
                )
            if not until_redis_answers(lambda: self._jobs.note_waiting(claim.job_id, "chat")):
                return None
        return values

    def run_batch(self, job_id: str, batch_index: int) -> None:
        """Compute one batch of a job, unless somebody else has it, a round has the engine or the job has ended."""
        lease = self._jobs.new_lease(self.worker_id)
        claim = until_redis_answers(lambda: self._jobs.claim(job_id, batch_index, self.worker_id, lease))
        if not isinstance(claim, Claim):
            logger.debug("batch %d of job %s not run here: %s", batch_index, job_id, claim)
            return
        try:
            values = self._compute_batch(claim)
        except EngineLostError as error:
            try:
                self._give_back(job_id, batch_index, lost_engine=True)
            finally:
                self.exit_without_engine(error)
        except ProoflineError as error:
            # The engine lives and says no: another try elsewhere would end the same.
            logger.error("job %s failed: %s", job_id, error)
            self._jobs.fail(job_id, str(error))
        except BaseException:
            self._give_back(job_id, batch_index)
            raise
        else:
            if values is None and self._leaving.is_set():
                self._give_back(job_id, batch_index)
            elif values is None:
                self._jobs.release(job_id, batch_index, self.worker_id)  # the reaper queues it again after a round
            elif until_redis_answers(lambda: self._jobs.complete(job_id, batch_index, values)):
                self.finish(job_id)

    def finish(self, job_id: str) -> None:
        """Build the answer of a job whose batches are all done."""
        try:
            self._jobs.finish(job_id)
        except RedisError:
            raise  # a worker's housekeeping finishes the job when Redis is back
        except Exception as error:
            logger.exception("the answer of job %s cannot be built", job_id)
            self._jobs.fail(job_id, f"The answer cannot be built: {error!r}. Report this with the worker's log.")

    def exit_without_engine(self, error: EngineLostError) -> NoReturn:
        """End this process, so that its supervisor starts a fresh one; its batches go to other workers."""
        logger.critical("%s This worker exits with status %d; its batches run elsewhere.", error, ENGINE_LOST_STATUS)
        try:
            self.engine.close()
        finally:
            # Not sys.exit: Celery would catch it in a task's thread and go on without an engine.
            os._exit(ENGINE_LOST_STATUS)

    def _give_back(self, job_id: str, batch_index: int, lost_engine: bool = False) -> None:
        if self._jobs.release(job_id, batch_index, self.worker_id, lost_engine=lost_engine):
            self._queue.publish(job_id, [batch_index])

    def chat_stats(self) -> dict[str, JsonValue]:
        """For the heartbeat: what the gate counted."""
        return dict(vars(self._chat.gate.stats())) if self._chat is not None else {}
