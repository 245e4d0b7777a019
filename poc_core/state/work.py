"""A worker's operations in Redis: leasing work, storing values, and returning leases.

Each nonce is leased to one worker, and a lease's values count only once. A lease also ends when its
worker's heartbeat expires, or no longer lists the lease. The second case happens if Redis was
killed and has lost the lease's values, or the return of the lease.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue
from redis import Redis

from poc_core import records
from poc_core.schemes.contract import contract_of
from poc_core.settings import Settings
from poc_core.state import entries, keys, scripts
from poc_core.state.client import Store
from poc_core.state.jobs import JobStore
from poc_core.state.rounds import RoundStore

# If so many workers die or lose their engine during a batch, the batch is the cause: its job fails.
MAX_LOSSES = 3
# Most jobs of other specs that are skipped in the search for batches to compute together.
_MOST_PASSED = 16
# Most reported nonces stored for a /status that lists them: about 5 MB. Callbacks contain all.
_MOST_KEPT = 100_000

# Jobs checked per script call: about 3 ms of Redis' time.
_CHUNK = 500
# After one worker's check of the jobs, no worker checks the jobs for this share of reap_interval_s.
# The share is below a worker's shortest pause between two checks.
_TURN = 0.75

# Ranges of scores in a model's line.
_VALIDATIONS, _OTHERS, _ALL = ("-inf", "(0"), ("0", "+inf"), ("-inf", "+inf")


class HeldLeases:
    """A worker's leases in progress, each with the number of its request. Thread-safe. Heartbeats
    list these numbers, and the highest number so far. Redis frees a lease if its number is not
    listed and is not above the highest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_asked = 0
        self._held: dict[int, int] = {}  # number -> leases and requests in progress

    def ask(self) -> int:
        """Returns the number of a new lease request. Heartbeats list it before Redis answers."""
        with self._lock:
            self._n_asked += 1
            self._held[self._n_asked] = 1
            return self._n_asked

    def add(self, number: int, n_leases: int) -> None:
        """Adds the leases of a request. `drop` must be called once for the request, and once for
        each lease.
        """
        with self._lock:
            self._held[number] += n_leases

    def drop(self, number: int) -> None:
        """Removes an answered request, or a lease that was completed or returned."""
        with self._lock:
            self._held[number] -= 1
            if not self._held[number]:
                del self._held[number]

    def summary(self) -> str:
        """Returns the text for a heartbeat: highest number, ":" and the numbers in progress."""
        with self._lock:
            return f"{self._n_asked}:{' '.join(map(str, self._held))}"


@dataclass(frozen=True)
class StuckJobs:
    """The result of one step of `WorkStore.stuck`, which checks some of a model's active jobs."""

    n_dropped: int  # jobs that had ended or expired
    n_freed: int  # leases that no worker holds
    unfinished: list[str]  # ids of jobs with all batches done and no answer
    broken: list[str]  # ids of jobs with an unreadable record


class WorkStore(Store):
    """One worker's operations on jobs and rounds. Each operation is atomic and safe to repeat."""

    _lease = scripts.of_store("lease")
    _complete = scripts.of_store("complete")
    _release = scripts.of_store("release")
    _survey = scripts.of_store("survey_jobs")

    def __init__(
        self,
        redis: Redis,
        settings: Settings,
        worker_id: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(redis, settings, clock)
        self.worker_id = worker_id
        self.hand = HeldLeases()
        self.jobs = JobStore(redis, settings, clock)
        self.rounds = RoundStore(redis, settings, clock)

    def lease(
        self,
        model: str,
        only_validations: bool = False,
        round: records.RoundRecord | None = None,
        places: int = 0,
        done: tuple[records.Lease, Sequence[JsonValue]] | None = None,
    ) -> list[records.Lease] | records.Refusal:
        """Leases nonces of the generating `round`, or else the next batch of a job. Returns [] if
        no work waits, or the Refusal of a round's nonces. `places`: most nonces to lease from the
        round. `done`: a completed lease of the round and its values, stored in the same request.
        """
        scores = _VALIDATIONS if only_validations else _ALL
        return self._leased(model, scores, "", 1, round, places, done)

    def lease_more(self, beside: records.Lease, room: int) -> list[records.Lease]:
        """Leases more batches, up to `room` nonces, that can be computed in one micro-batch with
        the batch of the lease `beside`.
        """
        if beside.alone or room <= 0:
            return []
        scores = _VALIDATIONS if beside.urgent else _OTHERS
        found = self._leased(beside.model, scores, beside.spec.model_dump_json(), room)
        return found if isinstance(found, list) else []

    def complete(self, lease: records.Lease, values: Sequence[JsonValue]) -> bool:
        """Stores a lease's values, None for an excluded nonce. For a job, returns True if all
        batches are done; the caller must then call `JobStore.finish`. For a round, which may be
        stopped, returns False if another worker has already completed the lease.
        """
        return bool(self._complete(*self._completing(lease, values)))

    def release(self, lease: records.Lease, lost_engine: bool = False) -> bool:
        """Gives up a lease without values. Returns True if the lease now waits for another worker.
        `lost_engine`: True if the worker's engine was lost. A job fails after MAX_LOSSES losses
        during one batch.
        """
        lost = int(lost_engine and not lease.of_round)
        args: list[Any] = [_field(lease), self.worker_id, lost, MAX_LOSSES, self._clock()]
        return bool(self._release([_key(lease)], [*args, self._settings.generate_result_ttl_sec]))

    def take_turn(self, model: str) -> bool:
        """Returns True if this worker must check the model's jobs, because none did recently."""
        turn_ms = max(1, int(1000 * _TURN * self._settings.reap_interval_s))
        return bool(self._redis.set(keys.reaper(model), self.worker_id, nx=True, px=turn_ms))

    def stuck(self, model: str) -> Iterator[StuckJobs]:
        """Frees a model's leases that no worker holds, and yields stuck jobs, in several steps. A
        dead worker counts as a lost engine (see `release`). May miss a job until the next check.
        """
        first, ended_ttl_s = 0, self._settings.generate_result_ttl_sec
        while True:
            args = [first, _CHUNK, MAX_LOSSES, self._clock(), ended_ttl_s]
            n_kept, n_dropped, n_freed, *lists = self._survey([keys.active(model)], args)
            found = ([job_id.decode() for job_id in ids] for ids in lists)
            yield StuckJobs(n_dropped, n_freed, *found)
            if n_kept + n_dropped < _CHUNK:
                return
            first += n_kept

    def _leased(
        self,
        model: str,
        scores: tuple[str, str],
        spec: str,
        room: int,
        round: records.RoundRecord | None = None,
        places: int = 0,
        done: tuple[records.Lease, Sequence[JsonValue]] | None = None,
    ) -> list[records.Lease] | records.Refusal:
        settings, number = self._settings, self.hand.ask()
        try:
            now = self._clock()
            args: list[Any] = [f"{self.worker_id}|{int(now)}|n{number}", now, *scores, spec, room]
            args += [_MOST_PASSED, settings.job_ttl_sec, round.round_id if round else "", places]
            args += [settings.outbox_max_bytes, settings.callback_retention_sec]
            asked = (self._lease, [keys.line(model), keys.generating(model)], args)
            calls = [asked] if done is None else [(self._complete, *self._completing(*done)), asked]
            answer = scripts.together(self._redis, *calls)[-1]
            found = _leases(model, number, round, *answer)
            if isinstance(found, list):
                self.hand.add(number, len(found))
            return found
        finally:
            self.hand.drop(number)

    def _completing(
        self, lease: records.Lease, values: Sequence[JsonValue]
    ) -> tuple[list[str], list[Any]]:
        """Returns the keys and the arguments with which complete.lua stores a lease's values."""
        key, settings = _key(lease), self._settings
        args: list[Any] = [_field(lease), len(values), self.worker_id, self._clock()]
        if not lease.of_round:
            texts = [json.dumps(value, allow_nan=False) for value in values]
            return [key], [*args, settings.job_ttl_sec, "\n".join(texts)]
        args.append(settings.callback_retention_sec)
        pairs = list(zip(lease.nonces, values, strict=True))
        contract = contract_of(lease.spec.scheme)
        excluded = [nonce for nonce, value in pairs if value is None]
        computed = [pair for pair in pairs if pair[1] is not None]
        valid = [pair for pair in computed if contract.is_reported(pair[1], lease.terms)]
        args += [json.dumps(excluded) if excluded else "", len(excluded)]
        args += [settings.callback_interval_sec, _MOST_KEPT]
        listed = [entries.pack([pair]) for pair in valid] if contract.lists_reported else []
        args += [len(listed), *listed]
        # Entries are not divided between payloads.
        most, most_bytes = settings.callback_max_artifacts, settings.callback_max_bytes
        for n, entry in entries.packed(valid, most, most_bytes):
            args += [n, entry]
        return [key, keys.outbox(lease.owner_id), keys.generating(lease.model)], args


def _key(lease: records.Lease) -> str:
    return (keys.round if lease.of_round else keys.job)(lease.owner_id)


def _field(lease: records.Lease) -> str:
    return f"{lease.place}:{len(lease.nonces)}" if lease.of_round else str(lease.place)


def _leases(
    model: str, number: int, round: records.RoundRecord | None, what: bytes = b"", *found: bytes
) -> list[records.Lease] | records.Refusal:
    """Parses the answer of lease.lua. `what`: its first element; `found`: all other elements."""
    if what in (b"round", b"full", b"exhausted"):
        return records.Refusal(what.decode())
    if not what:
        return []
    if what == b"leased":
        assert round is not None
        config, (place, places) = round.config, map(int, found)
        nonces = config.nonces[place : place + places]
        about = (model, config.spec, nonces, number, config.terms)
        return [records.Lease(round.round_id, place, *about, of_round=True)]
    spec, (kind, alone, *batches) = records.ProofSpec.model_validate_json(what), found
    urgent = kind.decode() == records.JobKind.VALIDATE
    lease = records.Lease("", 0, model, spec, [], number, urgent=urgent, alone=alone == b"1")
    return [
        replace(lease, owner_id=job_id.decode(), place=int(batch), nonces=json.loads(nonces))
        for job_id, batch, nonces in zip(batches[::3], batches[1::3], batches[2::3], strict=True)
    ]
