"""A Redis that was killed before it had written what it had answered."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis

_TTL_MS = 100_000


@contextmanager
def forgetting(redis: Redis, *patterns: str) -> Iterator[None]:
    """What is done meanwhile to keys that match was answered and never happened.

    Keys of later patterns come back later: name indexes last, as others may look meanwhile.
    """

    def matching() -> list[Any]:
        return [key for pattern in patterns for key in redis.scan_iter(pattern)]

    kept: dict[Any, Any] = {key: redis.dump(key) for key in matching()}
    yield
    redis.delete(*kept, *matching())
    for key, value in kept.items():
        redis.restore(key, _TTL_MS, value)
