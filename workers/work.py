"""Leases a model's nonces for a worker and stores their values; rounds precede jobs."""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from pydantic import JsonValue
from redis.exceptions import RedisError

from poc_core import records
from poc_core.errors import ProoflineError
from poc_core.redis_at.connections import is_transient
from poc_core.state.jobs import JobStore
from poc_core.state.work import WorkStore
from workers.patience import PAUSE_S, until_redis_answers
from workers.proofs import Proofs
from workers.queue.wake import Wake
from workers.runner import Runner

logger = logging.getLogger(__name__)

# Seconds that chat uses the engine before clients see that their job waits for chat.
_CHAT_WAIT_S = 1.0
# Seconds between two checks of a full outbox, and between two log lines about a full outbox.
_FULL_PAUSE_S = 0.2
_FULL_LOG_S = 10.0

# Seconds of one turn: far below the broker's visibility timeout.
TURN_S = 10.0
# Jobs and rounds named in a turn's report.
_MOST_NAMED = 10

_Done = tuple[records.Lease, Sequence[JsonValue]]
"""A lease and its values."""


class Work:
    """A model's work, which a worker leases, computes and stores. `urgent`: only validations."""

    def __init__(
        self,
        proofs: Proofs,
        store: WorkStore,
        urgent: bool = False,
        pass_on: Callable[[], None] = lambda: None,
    ) -> None:
        """`pass_on()` wakes another worker of the model."""
        self.leaving = threading.Event()
        self._proofs = proofs
        self._model = proofs.engine.info.name
        self._store = store
        self._jobs = store.jobs
        self._rounds = store.rounds
        self._urgent = urgent
        self._pass_on = pass_on
        self._runner = Runner(proofs, self)  # keeps leases between turns
        self._round: records.RoundRecord | None = None  # the round whose nonces are leased
        # Computed values of a round, stored with the next lease request, which follows immediately.
        self._done: _Done | None = None
        self._counts: Counter[str] = Counter()
        # Monotonic time; None if work does not wait for chat.
        self._waits_since: float | None = None
        self._passes_on = True  # once a turn
        self._full_logged_at = 0.0

    def run(self, deadline: float = math.inf) -> bool:
        """Computes until `deadline` (time.monotonic) and returns True. Returns False if the turn
        ended earlier: no work is left, the worker is ending, or the work failed.
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
        self._end_round()
        self._store_done()
        self._runner.give_back()

    def has_some(self) -> bool:
        """Returns True if there is work to lease, or if this worker holds leases or a round."""
        return (
            self._round is not None
            or self._runner.is_under_way
            or self._rounds.generating(self._model) is not None
            or self._jobs.next_in_line(self._model) is not None
        )

    def take_counts(self) -> dict[str, int]:
        """Returns the numbers of computed nonces by job, validation or round, and resets them."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    # Methods for the runner, see Source.

    def next(self, held: Sequence[records.Lease]) -> Sequence[records.Lease] | None:
        if self.leaving.is_set() or self._proofs.is_lost:
            return None
        chat_allows = self._urgent or self._proofs.chat_allows(0)
        if not chat_allows and held:
            return []
        try:
            found = self._lease(chat_allows)
        except RedisError as error:
            if not is_transient(error):
                raise
            # Leases whose answer was lost are free once the heartbeats do not list them.
            logger.warning("could not lease what is next: %s", error)
            if self._urgent:
                return None
            self.leaving.wait(PAUSE_S)
            return []
        if found is records.Refusal.EXHAUSTED:
            return None
        if found is records.Refusal.ROUND:
            return [] if not self._urgent and self._begin_round() else None
        if found is records.Refusal.FULL:
            if not held:
                self._wait_for_room() if chat_allows else self._proofs.chat_allows(_CHAT_WAIT_S)
            return []
        if not (found and found[0].of_round):
            self._end_round()
        if found or held:
            return found  # new work joins the work in progress
        return None if chat_allows else self._wait_for_chat()

    def is_wanted(self, leases: Sequence[records.Lease]) -> bool:
        self._store_done()
        try:
            return self._is_wanted(leases)
        except RedisError as error:
            logger.warning("could not look whether work is still wanted: %s", error)
            return True

    def complete(self, lease: records.Lease, values: Sequence[JsonValue]) -> None:
        if lease.of_round:
            try:
                self._store_done()
            finally:
                self._done = lease, values
        else:
            self._complete(lease, values)
        kind = "round" if lease.of_round else "validation" if lease.urgent else "job"
        self._counts[f"{kind} {lease.owner_id}"] += len(values)

    def release(self, lease: records.Lease, lost_engine: bool) -> None:
        try:
            self._store_done()  # a lost engine ends the process after the last release
            self._store.release(lease, lost_engine)
        except RedisError as error:  # heartbeats stop listing the lease, which frees it
            logger.warning("could not give back a lease of %s: %s", lease.owner_id, error)
        finally:
            self._store.hand.drop(lease.number)

    def fail(self, leases: Sequence[records.Lease], error: ProoflineError) -> None:
        for lease in {lease.owner_id: lease for lease in leases}.values():
            logger.error("%s failed: %s", lease.owner_id, error)
            if lease.of_round:
                self._stop_round(lease.owner_id, error)
            else:
                self._jobs.fail(lease.owner_id, str(error))

    def _lease(self, chat_allows: bool) -> list[records.Lease] | records.Refusal:
        """Leases the next nonces. The same request to Redis stores a round's computed values."""
        done, places = self._done, 0
        if self._round is not None and chat_allows:
            places = self._proofs.batch_size(self._round.config.spec)
        only_validations = self._urgent or not chat_allows
        try:
            found = self._store.lease(self._model, only_validations, self._round, places, done)
        except Exception as error:
            if not is_transient(error):
                self._store_done()  # in a separate request, because these values may be the cause
            raise
        self._forget_done()
        if isinstance(found, list) and found and not found[0].of_round:
            try:
                room = self._proofs.batch_size(found[0].spec) - len(found[0].nonces)
                found += self._store.lease_more(found[0], room)
            except Exception as error:
                logger.warning("could not lease more of the same: %s", error)
        return found

    def _store_done(self) -> None:
        """Stores a round's values that are not stored yet. If that fails, stops the round."""
        if self._done is not None:
            lease, values = self._done
            try:
                until_redis_answers(lambda: self._store.complete(lease, values))
            except Exception as error:
                logger.exception("values of round %s cannot be stored", lease.owner_id)
                self._stop_round(lease.owner_id, ProoflineError(_unstorable("Values", error)))
            finally:
                self._forget_done()

    def _forget_done(self) -> None:
        if self._done is not None:
            self._store.hand.drop(self._done[0].number)
            self._done = None

    # Methods for jobs.

    def _complete(self, lease: records.Lease, values: Sequence[JsonValue]) -> None:
        job_id = lease.owner_id
        try:
            if until_redis_answers(lambda: self._store.complete(lease, values)):
                finish_or_fail(self._jobs, job_id)
        except Exception as error:  # concerns only this batch
            self._not_completed(job_id, error)
        finally:
            self._store.hand.drop(lease.number)

    def _not_completed(self, job_id: str, error: Exception) -> None:
        if is_transient(error):
            logger.warning("job %s is finished when Redis is available again: %s", job_id, error)
            return
        logger.error("a batch of job %s cannot be stored", job_id, exc_info=error)
        try:
            self._jobs.fail(job_id, _unstorable("A batch", error))
        except RedisError as again:
            logger.error("job %s cannot be marked as failed: %s", job_id, again)

    # Methods for a round.

    def _begin_round(self) -> bool:
        """Assigns this worker to the model's generating round. Returns False if there is none."""
        round_id = until_redis_answers(lambda: self._rounds.generating(self._model))
        record = round_id and until_redis_answers(lambda: self._rounds.read(round_id))
        if not record or record.state is not records.RoundState.GENERATING:
            return False
        self._round = record
        # Before the next check of the gate: `exclusive` does not wait for chat.
        self._proofs.set_computes_round(True)
        return True

    def _end_round(self) -> None:
        if self._round is not None:
            self._round = None
            self._proofs.set_computes_round(False)

    def _stop_round(self, round_id: str, error: ProoflineError) -> None:
        record = until_redis_answers(lambda: self._rounds.read(round_id))
        if record is not None:
            why = str(error)
            until_redis_answers(
                lambda: self._rounds.switch(record, records.RoundState.STOPPED, why)
            )

    def _wait_for_room(self) -> None:
        if time.monotonic() - self._full_logged_at > _FULL_LOG_S:
            self._full_logged_at = time.monotonic()
            logger.error(
                "the outbox of the round is full (POC_OUTBOX_MAX_BYTES): generation pauses until"
                " the receiver takes what waits"
            )
        self.leaving.wait(_FULL_PAUSE_S)

    # Methods for chat.

    def _wait_for_chat(self) -> Sequence[records.Lease] | None:
        """Waits up to _CHAT_WAIT_S for this worker's chat to end. Meanwhile a worker without chat
        can lease the next job. Then returns [], and the caller tries to lease again. Returns None
        at once if no job is waiting.
        """
        job_id = until_redis_answers(lambda: self._jobs.next_in_line(self._model))
        if job_id is None:
            return None
        if self._passes_on:  # this worker may have taken the only message
            self._passes_on = False
            self._pass_on()
        if not self._proofs.chat_allows(_CHAT_WAIT_S):
            until_redis_answers(lambda: self._jobs.note_waiting([job_id], "chat"))
        return []

    def _is_wanted(self, leases: Sequence[records.Lease]) -> bool:
        waits = not (leases[0].urgent or self._proofs.chat_allows(0))
        if waits and self.leaving.is_set():
            return False
        if leases[0].of_round:
            return self._rounds.generating(self._model) == leases[0].owner_id
        now = time.monotonic()
        self._waits_since = (self._waits_since or now) if waits else None
        waits_long = self._waits_since is not None and now - self._waits_since > _CHAT_WAIT_S
        job_ids = list(dict.fromkeys(lease.owner_id for lease in leases))
        return self._jobs.note_waiting(job_ids, "chat" if waits_long else "")


class Turns:
    """Computes its model's jobs and rounds in turns of 10 s, each a Celery task."""

    def __init__(
        self, model: str, work: Work, validations: Work, wake: Wake, turn_s: float = TURN_S
    ) -> None:
        """`validations`: work that a separate thread computes; the turns' reports include it."""
        self._model = model
        self._work = work
        self._validations = validations
        self.wake = wake
        self._turn_s = turn_s
        self._in_turn = threading.Lock()

    def leave(self) -> None:
        """Stops leasing new work because the worker is ending. Signal handlers may call it."""
        self._work.leaving.set()
        self._validations.leaving.set()

    def take(self) -> str:
        """Computes for one turn, and queues the next turn if work is left. Returns a report for
        Flower, or "" if another turn is running.
        """
        if not self._in_turn.acquire(blocking=False):
            return ""
        began = time.monotonic()
        try:
            goes_on = self._work.run(began + self._turn_s)
        finally:
            self._in_turn.release()
        if goes_on and not self._work.leaving.is_set():
            self.wake.myself()
        report = self._report(goes_on)
        logger.info("%s in %.1f s", report, time.monotonic() - began)
        return report

    def look(self) -> None:
        """Queues a turn if this worker is idle although there is work: its message was lost."""
        if not self._in_turn.locked() and not self.wake.waits() and self._work.has_some():
            self.wake.myself()

    def end(self) -> None:
        """Gives back the leases that the worker holds between two turns."""
        self._work.give_back()

    def _report(self, goes_on: bool) -> str:
        done = Counter(self._work.take_counts()) + Counter(self._validations.take_counts())
        named = [f"{n} nonces of {what}" for what, n in done.items()]
        if len(named) > _MOST_NAMED:
            n_left = sum(list(done.values())[_MOST_NAMED:])
            named[_MOST_NAMED:] = [f"{n_left} nonces of {len(named) - _MOST_NAMED} more"]
        none = "no nonces finished yet" if goes_on else "nothing to compute"
        return f"{self._model}: {', '.join(named) or none}"


def _unstorable(what: str, error: Exception) -> str:
    return f"{what} cannot be stored: {error!r}. Report this with the worker's log."


def finish_or_fail(jobs: JobStore, job_id: str) -> None:
    """Finishes a job whose batches are all done. Fails the job if its answer cannot be built."""
    try:
        jobs.finish(job_id)
    except Exception as error:
        if is_transient(error):
            raise
        logger.exception("the answer of job %s cannot be built", job_id)
        why = f"The answer cannot be built: {error!r}. Report this with the worker's log."
        jobs.fail(job_id, why)
