"""Counts of the node's nonces and chats, in time steps of four lengths.

The scripts that store a job's values count its nonces (`count_past` in lua/common.lua). A round's
nonces are counted once a second (`spread_counts`). API processes count the chats that they forward.
Counts are only added, so any number of processes may write.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from redis import Redis

from poc_core.serving.places import name_of
from poc_core.state import keys, scripts

# Seconds per step -> seconds that a step is stored, slightly more than is shown; as in common.lua.
STEPS = {5: 960, 20: 3720, 120: 22_000, 480: 87_400}
# Steps of a range that is shown: 15 minutes, an hour, 6 hours, 24 hours.
SHOWN = 180

# Fields of a step besides the workers' names, which never begin with a colon.
CHATS = ":chats"  # requests begun
CHAT_MS = ":chat_ms"  # milliseconds during which requests were in progress, added up
FAILED = ":failed"  # chats answered with 5xx or not at all
FIRST_TOKEN = ":first:"  # followed by a bucket: streams whose time to first token is in the bucket

# Bucket i of the time to the first token holds (_FIRST_S * _FACTOR**(i-1), _FIRST_S * _FACTOR**i].
_FIRST_S = 0.01
_FACTOR = 1.2
_MOST_BUCKETS = 60  # the last: 470 s and more

_SHARE = b"by:"  # precedes a worker's name in the counts of a job's or round's hash

Counts = Mapping[str, int]


class History(scripts.BaseStore):
    """The store of the counts. Each time step is a Redis hash with a TTL."""

    def add(self, second: float, counts: Counts) -> None:
        """Adds counts to the time steps that contain the time `second`: one step of each length."""
        with self._redis.pipeline(transaction=False) as pipe:
            for step_s, kept_s in STEPS.items():
                key = keys.past(step_s, int(second // step_s) * step_s)
                for field, n in counts.items():
                    pipe.hincrby(key, field, n)
                pipe.expire(key, kept_s)
            pipe.execute()

    def read(self, step_s: int, first: int, n: int = SHOWN) -> list[dict[str, int]]:
        """Returns the counts of `n` time steps of `step_s` seconds, beginning at time `first`."""
        current = self._redis.get(keys.CURRENT_ROUND)
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(keys.counted(current.decode() if current else ""))
            for index in range(n):
                pipe.hgetall(keys.past(step_s, first + index * step_s))
            fresh, *found = pipe.execute()
        steps = [
            {field.decode(errors="replace"): int(count) for field, count in counts.items()}
            for counts in found
        ]
        for field, count in fresh.items():  # not yet added to the steps (spread_counts)
            second, _, worker = field.decode(errors="replace").partition("|")
            index = (int(second) - first) // step_s if second else -1
            if 0 <= index < n:
                name = name_of(worker)
                steps[index][name] = steps[index].get(name, 0) + int(count)
        return steps


def shares(redis: Redis, key: str) -> dict[str, int]:
    """Returns the computed nonces by worker's name, for the job or round whose hash is `key`."""
    # Other fields of a job's hash are not read: the answer may take megabytes.
    connection: Any = redis
    fields = sorted(field for field in connection.hkeys(key) if field.startswith(_SHARE))
    found = zip(fields, connection.hmget(key, fields) if fields else [], strict=True)
    return {field.removeprefix(_SHARE).decode(): int(n) for field, n in found if n is not None}


def bucket(seconds: float) -> str:
    """Returns the name of the counter for streams whose first token took `seconds`."""
    index = math.ceil(math.log(max(seconds, _FIRST_S) / _FIRST_S, _FACTOR))
    return f"{FIRST_TOKEN}{min(_MOST_BUCKETS, index)}"


def first_token_p95(steps: Iterable[Counts]) -> float | None:
    """Returns the 95th percentile of the seconds to the first token; None if there are no streams.
    The percentile is up to 20 % too high, because streams are counted in buckets.
    """
    counts: dict[int, int] = {}
    for step in steps:
        for field, n in step.items():
            if field.startswith(FIRST_TOKEN):
                index = int(field.removeprefix(FIRST_TOKEN))
                counts[index] = counts.get(index, 0) + n
    left = 0.95 * sum(counts.values())
    for index in sorted(counts):
        left -= counts[index]
        if left <= 0:
            return _FIRST_S * _FACTOR**index
    return None
