"""Looks over all jobs of a model: what dead workers left, and how many wait.

A script looks at some at a time, so Redis answers others in between tens of thousands of jobs.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from redis import Redis

from poc_core.settings import Settings
from poc_core.state import keys, scripts

# Jobs looked at in one call of a script: some 3 ms of Redis' time.
_CHUNK = 500

# Share of the time between two looks for which a look keeps others away: a little below the
# shortest pause, so that a worker is not in its own way.
_TURN = 0.75


@dataclass(frozen=True)
class ActiveJobs:
    """How many jobs have not ended."""

    queued: int
    running: int
    waiting_for_chat: int  # of both


@dataclass(frozen=True)
class StuckJobs:
    """Problems of a model's active jobs, by job id."""

    n_dropped: int  # that were over, or expired
    unfinished: list[str]  # their batches are all done: whoever should have finished them died
    orphaned: list[str]  # a lease of theirs has ended (JobStore.orphans)
    broken: list[str]  # their record cannot be read


class JobSurvey:
    """Looks at all active jobs of a model, oldest first."""

    def __init__(
        self, redis: Redis, settings: Settings, clock: Callable[[], float] = time.time
    ) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._settings = settings
        self._clock = clock
        self._survey = scripts.load(redis, "survey_jobs")
        self._count = scripts.load(redis, "count_jobs")

    def take_turn(self, model: str, worker_id: str) -> bool:
        """True if no other worker of the model looked just now: one is enough."""
        turn_ms = max(1, int(1000 * _TURN * self._settings.reap_interval_s))
        return bool(self._redis.set(keys.reaper(model), worker_id, nx=True, px=turn_ms))

    def stuck(self, model: str) -> Iterator[StuckJobs]:
        """The model's stuck jobs; one that ends meanwhile may hide another till the next look."""
        first, oldest_s = 0, int(self._clock()) - self._settings.visibility_timeout_s
        while True:
            n_kept, n_dropped, *lists = self._survey(
                [keys.active(model)], [first, _CHUNK, oldest_s]
            )
            yield StuckJobs(n_dropped, *([job_id.decode() for job_id in found] for found in lists))
            if n_kept + n_dropped < _CHUNK:
                return
            first += n_kept

    def newest(self, most: int, most_old: int) -> list[str]:
        """Ids of the newest jobs, newest first (100 at most), then each model's oldest active."""
        models = sorted(model.decode() for model in self._redis.smembers(keys.ACTIVE_MODELS))
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.lrange(keys.NEWEST_JOBS, 0, most - 1)
            for model in models:
                pipe.zrange(keys.active(model), 0, most_old - 1)
            newest, *old = pipe.execute()
        found = [*newest, *(job_id for ids in old for job_id in reversed(ids))]
        return [job_id.decode() for job_id in dict.fromkeys(found)]

    def count(self, models: list[str]) -> ActiveJobs:
        """The jobs of some models that have not ended, by status."""
        sums = [0, 0, 0]
        for model in models:
            first, n_seen = 0, _CHUNK
            while n_seen == _CHUNK:
                n_seen, *counts = self._count([keys.active(model)], [first, _CHUNK])
                first += n_seen
                sums = [one + more for one, more in zip(sums, counts, strict=True)]
        return ActiveJobs(*sums)
