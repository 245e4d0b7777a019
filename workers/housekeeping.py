"""A worker's periodic work: joins rounds, recovers lost work."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Callable

from kombu.exceptions import OperationalError

from poc_core.periodic import Periodic
from poc_core.records import WorkerRecord
from poc_core.settings import Settings
from poc_core.state.client import is_transient
from poc_core.state.hand import Hand
from poc_core.state.jobs import JobStore
from poc_core.state.registry import WorkerRegistry
from poc_core.state.rounds import RoundStore
from workers.engines.ticks import EngineLostError
from workers.heartbeat import Heartbeat
from workers.jobs import finish_or_fail
from workers.proofs import Proofs
from workers.queue.job_queue import JobQueue, StepQueue
from workers.rounds import RoundSteps
from workers.watchdog import Watchdog

logger = logging.getLogger(__name__)

# Messages of one job published again at a time, as its own may still come; and of all jobs.
_MOST_REPUBLISHED = 1000
_MOST_REPUBLISHED_IN_ALL = 4000

# Seconds after which waiting nonces are counted anew without an expired job: nobody else sees those
# of a model whose workers are all gone.
_RECOUNT_S = 60.0

# Seconds for the chat port's answer.
_ANSWER_S = 2.0

# Jobs whose trouble was logged, to log it once.
_MOST_REMEMBERED = 1000


class Housekeeper:
    """A thread beside the heartbeat's that keeps this worker's model moving."""

    def __init__(
        self,
        record: WorkerRecord,
        registry: WorkerRegistry,
        jobs: JobStore,
        queue: JobQueue,
        rounds: RoundStore,
        steps: StepQueue,
        hand: Hand,
        settings: Settings,
    ) -> None:
        self._worker_id = record.id
        self._model = record.model
        self._heartbeat = Heartbeat(record, registry, hand, settings.heartbeat_s)
        self._jobs = jobs
        self._queue = queue
        self._rounds = rounds
        self._steps = steps
        self._proofs: Proofs | None = None
        self._runner: RoundSteps | None = None
        self._chat_host = settings.chat_host
        self._chat_at: tuple[str, int] | None = None
        self._interval_s = settings.heartbeat_s
        self._work = Periodic("housekeeping", settings.heartbeat_s, self._keep_house)
        self._hung_after_s = settings.engine_hung_s
        self._watchdog = Watchdog(settings.engine_hung_s, longest_look_s=2 * settings.heartbeat_s)
        self._reap_interval_s = settings.reap_interval_s
        self._next_reap_s = 0.0
        self._next_recount_s = 0.0
        self._logged: dict[str, None] = {}  # job ids, oldest first

    def start(self) -> None:
        self._heartbeat.start()
        self._work.start()

    def ready(self, proofs: Proofs, runner: RoundSteps, chat_port: int | None) -> None:
        """Offers the loaded engine to clients, and joins the current round."""
        self._runner = runner
        self._proofs = proofs
        self._chat_at = None if chat_port is None else (self._chat_host, chat_port)
        self._heartbeat.ready(proofs, chat_port)

    def beat(self) -> None:
        """Sends a heartbeat at once."""
        self._heartbeat.beat()

    def drain(self) -> None:
        """Turns new work away from the next heartbeat on. For signal handlers; does not wait."""
        self._heartbeat.drain()

    def stop(self) -> None:
        """Leaves the registry at once, so that nobody waits for this worker."""
        self._work.stop(self._interval_s)
        self._heartbeat.stop()

    def _keep_house(self) -> None:
        if self._proofs is None or self._runner is None:
            return
        self._check_engine(self._proofs)
        if self._chat_at is not None:
            self._heartbeat.chat_answers(_answers(*self._chat_at))
        if self._heartbeat.is_draining:
            return
        self._join_round(self._proofs, self._runner)
        if time.monotonic() >= self._next_reap_s:
            # Jitter: many workers should not look at the same moment.
            self._next_reap_s = time.monotonic() + self._reap_interval_s * random.uniform(0.8, 1.2)
            if self._jobs.survey.take_turn(self._model, self._worker_id):
                self._reap()
                self._rounds.forget_followed()

    def _check_engine(self, proofs: Proofs) -> None:
        """Ends an idle worker whose engine died: clients would be offered it for ever."""
        try:
            proofs.engine.check()
        except EngineLostError as error:
            proofs.exit_without_engine(error)
        is_hung = self._watchdog.is_hung(proofs.engine.pulse())
        self._heartbeat.engine_stands_still(self._watchdog.still_s)
        if is_hung:
            self._heartbeat.hung()
            hung = (
                f"The engine hangs: it has not gone on for {self._hung_after_s:g} s"
                " (POC_ENGINE_HUNG_S)"
            )
            proofs.exit_without_engine(EngineLostError(f"{hung} while requests wait for it."))

    def _join_round(self, proofs: Proofs, runner: RoundSteps) -> None:
        """Queues this worker's next step when a round generates and no step runs.

        The round begins, or the step's message was lost.
        """
        round_id = self._rounds.generating(self._model)
        if runner.is_in_step:
            return
        if round_id is None:
            # The round ended between two steps, and the message of the next was lost.
            proofs.set_computes_round(False)
        elif self._steps.is_empty():
            self._steps.publish(round_id)

    def _reap(self) -> None:
        """Brings stuck jobs on: batches of dead workers, lost messages, missed finishes."""
        waiting: list[str] = []
        n_dropped = 0
        for found in self._jobs.survey.stuck(self._model):
            if self._work.is_stopping:
                return
            n_dropped += found.n_dropped
            for job_id in found.broken:
                self._guarded(
                    job_id,
                    lambda job_id: self._jobs.fail(job_id, "Its record in Redis cannot be read."),
                )
            for job_id in found.unfinished:
                self._guarded(job_id, lambda job_id: finish_or_fail(self._jobs, job_id))
            for job_id in found.orphaned:
                self._guarded(job_id, self._bring_back)
            if len(waiting) < _MOST_REPUBLISHED_IN_ALL:
                waiting += found.waiting
        if n_dropped or time.monotonic() >= self._next_recount_s:
            self._next_recount_s = time.monotonic() + _RECOUNT_S
            self._jobs.recount()
        # Jobs wait for a round's end; their messages are taken meanwhile, and dropped.
        is_free = self._rounds.generating(self._model) is None
        if not waiting or not is_free or self._publish_lost(waiting):
            self._jobs.survey.note_stood(self._model, self._queue.newest())

    def _publish_lost(self, waiting: list[str]) -> bool:
        """Publishes again what waits without a message. False: it may wait behind others' messages.

        A message in some worker's hands counts as lost: it then comes twice, which does no harm.
        """
        survey, most = self._jobs.survey, _MOST_REPUBLISHED_IN_ALL
        stood = survey.stood(self._model)
        if not self._queue.is_empty():
            if stood is None:
                return True
            if not self._queue.holds(stood.message):
                waiting = survey.of_then(self._model, stood, waiting)
            elif survey.is_overdue(stood):
                most = _MOST_REPUBLISHED
            else:
                return False
        self._publish_again(waiting, most)
        return True

    def _bring_back(self, job_id: str) -> None:
        lost = self._jobs.orphans(job_id)
        if lost:
            logger.warning(
                "job %s: %d batches that nobody computes any more are queued again",
                job_id,
                len(lost),
            )
            self._queue.publish(job_id, lost)

    def _publish_again(self, job_ids: list[str], most: int) -> None:
        """Publishes at most `most` waiting batches, the oldest jobs' first."""
        n_published = 0

        def publish(job_id: str) -> None:
            nonlocal n_published
            batches = self._jobs.pending(job_id, min(_MOST_REPUBLISHED, most - n_published))
            self._queue.publish(job_id, batches)
            n_published += len(batches)

        for job_id in job_ids:
            if n_published >= most:
                return
            self._guarded(job_id, publish)

    def _guarded(self, job_id: str, step: Callable[[str], object]) -> None:
        """Runs a step for one job; a bad record must not keep others from being looked after."""
        try:
            step(job_id)
        except Exception as error:
            if isinstance(error, OperationalError) or is_transient(error):
                raise  # not about a single job
            if job_id not in self._logged:
                logger.exception("job %s cannot be looked after", job_id)
                self._logged[job_id] = None
            while len(self._logged) > _MOST_REMEMBERED:
                del self._logged[next(iter(self._logged))]


def _answers(host: str, port: int) -> bool:
    """True if anything answers there, as a client that nobody knows is."""
    try:
        with socket.create_connection((host, port), _ANSWER_S) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            return bool(connection.recv(1))
    except OSError:
        return False
