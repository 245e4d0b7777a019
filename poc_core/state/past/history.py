"""Counts of what the node did, by steps of four lengths, each kept for 180 steps.

Nonces are counted by the scripts that take them (`count_past` in lua/common.lua), a round's once a
second (`spread_counts`); chats by the API processes that pass them on. Adding is all that anybody
does, so any number of processes may.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from redis import Redis

from poc_core.serving.places import name_of
from poc_core.state import keys

# Seconds of a step -> seconds that steps are kept, a little more than is shown; as in common.lua.
STEPS = {5: 960, 20: 3720, 120: 22_000, 480: 87_400}
# Steps of a range that is shown: 15 minutes, an hour, 6 hours, 24 hours.
SHOWN = 180

# Fields of a step beside the names of workers, which begin with no colon.
CHATS = ":chats"  # requests begun
CHAT_MS = ":chat_ms"  # milliseconds of requests under way, together
FAILED = ":failed"  # chats that were answered by 5xx, or by nobody
FIRST_TOKEN = ":first:"  # and a bucket's number: streams whose first token took that long

# Bucket i of the time to the first token holds (_FIRST_S * _FACTOR**(i-1), _FIRST_S * _FACTOR**i].
_FIRST_S = 0.01
_FACTOR = 1.2
_MOST_BUCKETS = 60  # the last: 470 s and more

Counts = Mapping[str, int]


class History:
    """The node's history; each step is a hash that expires by itself."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable

    def add(self, second: float, counts: Counts) -> None:
        """Adds counts, which happened about that second, to the steps of each length."""
        with self._redis.pipeline(transaction=False) as pipe:
            for step_s, kept_s in STEPS.items():
                key = keys.past(step_s, int(second // step_s) * step_s)
                for field, n in counts.items():
                    pipe.hincrby(key, field, n)
                pipe.expire(key, kept_s)
            pipe.execute()

    def read(self, step_s: int, first: int, n: int = SHOWN) -> list[dict[str, int]]:
        """The counts of `n` steps, the first of which begins at `first`; empty where none are."""
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
        for field, count in fresh.items():  # of the last second, or since the last lease
            second, _, worker = field.decode(errors="replace").partition("|")
            index = (int(second) - first) // step_s if second else -1
            if 0 <= index < n:
                name = name_of(worker)
                steps[index][name] = steps[index].get(name, 0) + int(count)
        return steps


def bucket(seconds: float) -> str:
    """The field that counts a stream whose first token took so long."""
    index = math.ceil(math.log(max(seconds, _FIRST_S) / _FIRST_S, _FACTOR))
    return f"{FIRST_TOKEN}{min(_MOST_BUCKETS, index)}"


def first_token_p95(steps: Iterable[Counts]) -> float | None:
    """Seconds within which 95 % of the steps' first tokens came, rounded up by up to a fifth."""
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
