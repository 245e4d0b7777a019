"""A worker's periodic tasks: checks its engine, looks for work and recovers stuck jobs."""

import logging
import random
import socket
import time
from collections.abc import Callable
from functools import lru_cache

from poc_core.periodic import Periodic
from poc_core.redis_at.connections import is_transient
from poc_core.settings import Settings
from poc_core.state.work import WorkStore
from workers.engines import base
from workers.heartbeat import Heartbeat
from workers.proofs import Proofs
from workers.work import Turns, finish_or_fail

logger = logging.getLogger(__name__)

# Seconds after which queued nonces are recounted even without an expired job. If all workers of a
# model have ended, no worker notices that a job of this model has expired.
_RECOUNT_S = 60.0

# Seconds to wait for the chat port's answer.
_ANSWER_S = 2.0


class Housekeeper:
    """A thread that regularly checks the engine, wakes an idle worker, and recovers stuck jobs."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        store: WorkStore,
        proofs: Proofs,
        turns: Turns,
        settings: Settings,
        chat_port: int | None,
    ) -> None:
        self._heartbeat = heartbeat
        self._settings = settings
        self._model = heartbeat.record.model
        self._store = store
        self._proofs = proofs
        self._turns = turns
        self._chat_at = None if chat_port is None else (settings.chat_host, chat_port)
        self._work = Periodic("housekeeping", settings.heartbeat_s, self._keep_house)
        self._watchdog = Watchdog(settings.engine_hung_s, longest_look_s=2 * settings.heartbeat_s)
        self._next_reap_s = 0.0
        self._next_recount_s = 0.0

    def start(self) -> None:
        self._work.start()

    def stop(self) -> None:
        self._work.stop(self._settings.heartbeat_s)

    def _keep_house(self) -> None:
        self._check_engine()
        if self._chat_at is not None:
            self._heartbeat.chat_answers(_answers(*self._chat_at))
        if self._heartbeat.is_draining:
            return
        self._turns.look()
        if time.monotonic() >= self._next_reap_s:
            # Jitter, so that workers do not check at the same moment.
            interval_s = self._settings.reap_interval_s * random.uniform(0.8, 1.2)
            self._next_reap_s = time.monotonic() + interval_s
            if self._store.take_turn(self._model):
                self._reap()
                self._turns.wake.trim()
                self._store.rounds.forget_followed()

    def _check_engine(self) -> None:
        """Ends this worker process if its engine died or hangs; clients then use other workers."""
        engine = self._proofs.engine
        try:
            engine.check()
        except base.EngineLostError as error:
            self._proofs.exit_without_engine(error)
        is_hung = self._watchdog.is_hung(engine.pulse())
        self._heartbeat.engine_stands_still(self._watchdog.still_s)
        if is_hung:
            self._heartbeat.hung()
            seconds = f"{self._settings.engine_hung_s:g} s (POC_ENGINE_HUNG_S)"
            self._proofs.exit_without_engine(
                base.EngineLostError(
                    f"The engine hangs: it has made no step for {seconds}"
                    " while requests wait for it."
                )
            )

    def _reap(self) -> None:
        """Frees batches of dead workers, finishes complete jobs, and fails unreadable jobs."""
        n_dropped, jobs = 0, self._store.jobs
        for found in self._store.stuck(self._model):
            if self._work.is_stopping:
                return
            n_dropped += found.n_dropped
            if found.n_freed:
                logger.warning("%d batches are queued again: no worker has them", found.n_freed)
            for job_id in found.broken:
                self._guarded(
                    job_id, lambda job_id: jobs.fail(job_id, "Its record in Redis cannot be read.")
                )
            for job_id in found.unfinished:
                self._guarded(job_id, lambda job_id: finish_or_fail(jobs, job_id))
        if n_dropped or time.monotonic() >= self._next_recount_s:
            self._next_recount_s = time.monotonic() + _RECOUNT_S
            jobs.recount()

    def _guarded(self, job_id: str, step: Callable[[str], object]) -> None:
        """Runs `step(job_id)`. Logs an error of this job, but raises a temporary error of Redis."""
        try:
            step(job_id)
        except Exception as error:
            if is_transient(error):
                raise  # not the error of a single job
            _log_once(job_id)


class Watchdog:
    """Detects an engine that hangs. One thread calls it periodically."""

    def __init__(
        self,
        hung_after_s: float,
        longest_look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`longest_look_s`: one check adds at most this many seconds to the time without
        progress.
        """
        self._hung_after_s = hung_after_s
        self._longest_look_s = longest_look_s
        self._clock = clock
        self._beats: int | None = None
        self._looked_at = 0.0
        self.still_s = 0.0  # seconds without progress while requests waited, by the last check

    def is_hung(self, pulse: base.Pulse) -> bool:
        """Returns True if requests waited `hung_after_s` seconds without the engine's progress."""
        now = self._clock()
        if pulse.beats != self._beats or not pulse.waits:
            self.still_s = 0.0
        else:
            self.still_s += min(now - self._looked_at, self._longest_look_s)
        self._beats, self._looked_at = pulse.beats, now
        return self.still_s >= self._hung_after_s


@lru_cache(maxsize=1000)
def _log_once(job_id: str) -> None:
    logger.exception("job %s cannot be checked", job_id)


def _answers(host: str, port: int) -> bool:
    """Returns whether the server at this host and port answers an HTTP request in time."""
    try:
        with socket.create_connection((host, port), _ANSWER_S) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            return bool(connection.recv(1))
    except OSError:
        return False
