"""Receivers that do not answer, shared by all outboxes so that each is tried rarely."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from poc_core.state import keys, scripts

# Least and most seconds between two tries; each pause is twice the last (protocol.md, section 6).
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
_MOST_DOUBLINGS = 10
# Unanswered tries in a row after which one job payload at a time probes the receiver and others
# wait.
BREAKS_AT = 5
# Seconds until another payload probes, in case the first probe's courier died; longer than a try.
PROBE_S = 12.0
# Seconds after its last silence for which a receiver is remembered.
_REMEMBERED_S = 600
# Receivers listed in a status, and receivers examined to find them.
_MOST_LISTED = 20
MOST_LOOKED_AT = 100


@dataclass(frozen=True)
class SilentReceiver:
    receiver: str  # host:port
    failures: int  # tries in a row without an answer
    next_try_at: float  # seconds since the epoch


class Receivers:
    """The receivers (host:port) that do not answer. Any HTTP answer counts, even 500."""

    def __init__(self, redis: Redis, clock: Callable[[], float] = time.time) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._clock = clock
        self._silence = scripts.load(redis, "note_silence")

    def answered(self, receiver: str) -> None:
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.receiver(receiver))
            pipe.zrem(keys.RECEIVERS, receiver)
            pipe.execute()

    def silent(self, receiver: str) -> int:
        """Counts an unanswered try. Returns the unanswered tries in a row."""
        args: list[Any] = [receiver, self._clock(), BREAKS_AT, _REMEMBERED_S]
        args += [backoff_s(failures) for failures in range(_MOST_DOUBLINGS + 1)]
        return int(self._silence([keys.receiver(receiver), keys.RECEIVERS], args))


def backoff_s(failures: int) -> float:
    """Returns seconds until the next try after `failures` + 1 failed tries."""
    longest = min(LAST_BACKOFF_S, 2 * FIRST_BACKOFF_S * 2.0 ** min(failures, _MOST_DOUBLINGS))
    return longest * random.uniform(0.5, 1.0)  # jitter: nodes must not retry in sync


def spared(found: Iterable[Sequence[bytes | None]]) -> list[SilentReceiver]:
    """Returns up to 20 receivers with BREAKS_AT failures; rows are (name, failures, next_at)."""
    silent = [
        SilentReceiver(name.decode(), int(n), float(at))
        for name, n, at in found
        if name and n and at
    ]
    return [receiver for receiver in silent if receiver.failures >= BREAKS_AT][:_MOST_LISTED]
