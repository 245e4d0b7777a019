"""The contents of a node's Redis during faults, read without the proxy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from poc_core.queues import messages, model_queue
from poc_core.state import keys
from tests.stacks.computed import Computed, last_round

# The most batches, leases and messages of a job that are listed.
_TOLD = 12
_TOLD_OF_JOB = ("status", "n_done", "n_total", "n_batches", "waiting_for", "finish_tries", "error")


class Inside:
    """Reads the Redis of a node that serves one model. Thread-safe."""

    def __init__(self, redis: Redis, model: str) -> None:
        self._redis: Any = redis
        self._model = model

    def last_round(self) -> Computed | None:
        """Calls `last_round` of tests/stacks/computed.py. RedisError: Redis is unavailable."""
        return last_round(self._redis)

    def of_job(self, job_id: str) -> str:
        """Returns the state of a job in Redis as lines, or the error of Redis."""
        try:
            return "\n  ".join([time.strftime("%H:%M:%S"), *self._of_job(job_id)])
        except RedisError as error:
            return f"{time.strftime('%H:%M:%S')} Redis is away: {error}"[:200]

    def _of_job(self, job_id: str) -> list[str]:
        ask, job = self._redis, keys.job(job_id)
        told = [f"{name} {value}" for name, value in self._fields(job, _TOLD_OF_JOB)]
        todo = sorted(int(index) for index in ask.smembers(f"{job}:todo"))
        lines = [f"job: {', '.join(told)}, {ask.exists(job + ':finishing')} who finish it"]
        lines.append(f"to do: {_some(todo)}")
        for what in ("leases", "attempts"):
            held = ask.hgetall(f"{job}:{what}").items()
            lines.append(f"{what}: {_some(f'{i.decode()}={one.decode()}' for i, one in held)}")
        lines += self._messages(job_id)
        for key in (keys.generating(self._model), keys.reaper(self._model)):
            lines.append(f"{key}: {ask.get(key)}, for {ask.pttl(key)} ms")
        for worker in ask.zrange(keys.WORKERS, 0, -1):
            lines.append(f"{worker.decode()}: {self._of_worker(worker.decode())}")
        outbox = dict(self._fields(keys.outbox(job_id), ("failures", "next_at", "waiting")))
        return [*lines, f"outbox: {outbox}"]

    def _messages(self, job_id: str) -> list[str]:
        waiting = self._redis.llen(messages(model_queue(self._model)))
        line = self._redis.zrange(keys.line(self._model), 0, -1)
        place = line.index(job_id.encode()) if job_id.encode() in line else "not"
        taken = self._redis.hlen("unacked.worker")
        return [
            f"messages: {waiting} wait, {taken} are taken and not acknowledged",
            f"line: {len(line)} jobs, this one {place}",
        ]

    def _of_worker(self, worker_id: str) -> str:
        key = f"{keys.WORKER_PREFIX}{worker_id}"
        record, in_hand = self._redis.hmget(key, "record", "in_hand")
        if record is None:
            return "dead"
        said = json.loads(record)
        told = {name: said.get(name) for name in ("state", "stats")}
        return f"{told}, in hand {in_hand}, lives {self._redis.pttl(key)} ms"

    def _fields(self, key: str, names: tuple[str, ...]) -> list[tuple[str, str]]:
        found = zip(names, self._redis.hmget(key, names), strict=True)
        return [(name, value.decode()[:200]) for name, value in found if value is not None]


def _some(things: Iterable[object]) -> str:
    every = [str(thing) for thing in things]
    rest = f" and {len(every) - _TOLD} more" if len(every) > _TOLD else ""
    return f"{len(every)}: {' '.join(every[:_TOLD])}{rest}"
