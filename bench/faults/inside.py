"""The contents of a node's Redis during faults, read without the proxy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from bench.harness.computed import Computed, last_round
from poc_core.state import keys

# The most members of a collection, and characters of a key's contents, that are listed.
_MEMBERS, _CHARACTERS = 12, 2000


class Inside:
    """Reads the Redis of a node that serves one model. Thread-safe."""

    def __init__(self, redis: Redis, model: str) -> None:
        self._redis: Any = redis
        self._model = model

    def last_round(self) -> Computed | None:
        """Calls `last_round` of bench/harness/computed.py. RedisError: Redis is unavailable."""
        return last_round(self._redis)

    def of_job(self, job_id: str) -> str:
        """Returns lines that explain why a job has not ended, or the error of Redis.

        The lines are the contents of the keys of the job, of the model and of the workers.
        """
        now = time.strftime("%H:%M:%S")
        try:
            return "\n  ".join([now, *self._lines(job_id, self._model, keys.WORKER_PREFIX)])
        except RedisError as error:
            return f"{now} Redis is away: {error}"[:200]

    def _lines(self, *parts: str) -> Iterator[str]:
        names = {name for part in parts for name in self._redis.scan_iter(f"*{part}*")}
        for name in sorted(names):
            yield f"{name.decode()}: {self._contents(name)}"[:_CHARACTERS]

    def _contents(self, name: bytes) -> object:
        redis, last = self._redis, _MEMBERS - 1
        match redis.type(name):
            case b"string":
                return redis.get(name)
            case b"hash":
                return redis.hgetall(name)
            case b"set":
                return sorted(redis.smembers(name))[:_MEMBERS]
            case b"zset":
                return redis.zcard(name), redis.zrange(name, 0, last, withscores=True)
            case b"list":
                return redis.llen(name), redis.lrange(name, 0, last)
        return None
