"""What a worker does beside its tasks: its heartbeat, and bringing back the batches that dead workers left behind."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time

from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from poc_core.records import WorkerRecord
from poc_core.settings import Settings
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from workers.engines.base import EngineLostError
from workers.proofs import Proofs
from workers.queue.job_queue import JobQueue, StepQueue
from workers.rounds import RoundRunner

logger = logging.getLogger(__name__)

# Messages of one job published again at a time: a large job's own may still be on their way.
_MOST_REPUBLISHED = 1000


class Housekeeper:
    """A thread that keeps this worker registered and its model's jobs moving."""

    def __init__(
        self,
        record: WorkerRecord,
        registry: WorkerRegistry,
        jobs: JobStore,
        queue: JobQueue,
        rounds: RoundStore,
        steps: StepQueue,
        settings: Settings,
    ) -> None:
        self._record = record
        self._registry = registry
        self._jobs = jobs
        self._queue = queue
        self._rounds = rounds
        self._steps = steps
        self._proofs: Proofs | None = None
        self._runner: RoundRunner | None = None
        self._draining = threading.Event()
        self._interval_s = settings.heartbeat_s
        self._reap_interval_s = settings.reap_interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="housekeeper", daemon=True)
        self._next_reap_s = 0.0

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def ready(self, proofs: Proofs, runner: RoundRunner, chat_port: int | None) -> None:
        """The engine is loaded: from now on clients may use this worker, and it joins the current round."""
        self._proofs = proofs
        self._runner = runner
        self._record = dataclasses.replace(self._record, state="ready", port=chat_port)
        self.beat()

    def drain(self) -> None:
        """Nobody sends this worker anything new from the next heartbeat on. For signal handlers; does not wait."""
        self._draining.set()

    def stop(self) -> None:
        """Leave the registry at once, so that nobody waits for this worker."""
        self._stop.set()
        self._thread.join(timeout=self._interval_s)
        try:
            self._registry.remove(self._record.id)
        except RedisError as error:
            logger.warning("could not leave the registry (%s); this worker's entry expires by itself", error)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._check_engine()
            self.beat()
            if self._proofs is None or self._runner is None or self._draining.is_set():
                continue
            self._join_round(self._proofs, self._runner)
            if time.monotonic() >= self._next_reap_s:
                self._reap()
                # Jitter, so that many workers do not look at the same moment.
                self._next_reap_s = time.monotonic() + self._reap_interval_s * random.uniform(0.8, 1.2)

    def _check_engine(self) -> None:
        """A worker that has nothing to do would not see that its engine died, and offer it to clients for ever."""
        if self._proofs is None:
            return
        try:
            self._proofs.engine.check()
        except EngineLostError as error:
            self._proofs.exit_without_engine(error)

    def beat(self) -> None:
        """Says at once what it would say with the next heartbeat."""
        try:
            if self._proofs is not None:
                info, stats = self._proofs.engine.info, self._proofs.chat_stats()
                self._record = dataclasses.replace(self._record, info=info, stats=stats)
            if self._draining.is_set():
                self._record = dataclasses.replace(self._record, state="draining")
            self._registry.heartbeat(self._record)
        except RedisError as error:
            logger.warning("no heartbeat: %s", error)

    def _join_round(self, proofs: Proofs, runner: RoundRunner) -> None:
        """Queue this worker's next step when a round generates and no step runs: it begins, or its message was lost."""
        try:
            round_id = self._rounds.generating(self._record.model)
            if runner.is_in_step:
                return
            if round_id is None:
                proofs.set_computes_round(False)  # it ended between two steps, and the message of the next was lost
            elif self._steps.is_empty():
                self._steps.publish(round_id)
        except (RedisError, OperationalError) as error:
            logger.warning("could not look for a round: %s", error)

    def _reap(self) -> None:
        """Bring this model's stuck jobs on: batches of dead workers, lost messages, a finish that never came."""
        try:
            self._jobs.recount()
            for job_id in self._jobs.unfinished(self._record.model):
                self._jobs.finish(job_id)
            for job_id in self._jobs.active_jobs(self._record.model):
                lost = self._jobs.orphans(job_id)
                if lost:
                    logger.warning("job %s: %d batches of dead workers are queued again", job_id, len(lost))
                    self._queue.publish(job_id, lost)
            if self._rounds.generating(self._record.model) is not None:
                return  # jobs wait for its end
            # An empty queue beside waiting batches: their messages were lost, or are in some worker's hands this
            # very moment and then come twice, which does no harm.
            if self._queue.is_empty():
                for job_id in self._jobs.active_jobs(self._record.model):
                    self._queue.publish(job_id, self._jobs.pending(job_id, _MOST_REPUBLISHED))
        except (RedisError, OperationalError) as error:
            logger.warning("could not look for stuck jobs: %s", error)
