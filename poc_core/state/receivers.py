"""Receivers that do not answer: jobs' callbacks to such a receiver pause together."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from poc_core.state import keys, scripts

# Least and most seconds between two tries. Each pause is twice as long as the pause before
# (protocol.md, section 6).
FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 30.0
_MOST_DOUBLINGS = 10
# Unanswered tries in a row after which only one job payload at a time is sent to the receiver, as a
# probe.
BREAKS_AT = 5
# Seconds until another payload may be the probe, in case the courier of the first probe has died.
# Longer than a try.
PROBE_S = 12.0
# Seconds for which a receiver is remembered after its last unanswered try.
_REMEMBERED_S = 600
# Receivers listed in a status, and receivers examined to find them.
_MOST_LISTED = 20
MOST_LOOKED_AT = 100


@dataclass(frozen=True)
class SilentReceiver:
    receiver: str  # host:port
    failures: int  # tries in a row without an answer
    next_try_at: float  # seconds since the epoch


class Receivers(scripts.BaseStore):
    """The store of receivers (host:port) that do not answer. Even a status 500 is an answer."""

    _silence = scripts.of_store("note_silence")

    def answered(self, receiver: str) -> None:
        """Deletes the receiver's record, because it has answered."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.receiver(receiver))
            pipe.zrem(keys.RECEIVERS, receiver)
            pipe.execute()

    def silent(self, receiver: str) -> int:
        """Counts an unanswered try. Returns the number of unanswered tries in a row."""
        args: list[Any] = [receiver, self._clock(), BREAKS_AT, _REMEMBERED_S]
        args += [backoff_s(failures) for failures in range(_MOST_DOUBLINGS + 1)]
        return int(self._silence([keys.receiver(receiver), keys.RECEIVERS], args))


def backoff_s(failures: int) -> float:
    """Returns the seconds until the next try, at random. `failures`: tries before this one."""
    longest = min(LAST_BACKOFF_S, 2 * FIRST_BACKOFF_S * 2.0 ** min(failures, _MOST_DOUBLINGS))
    return longest * random.uniform(0.5, 1.0)  # jitter: nodes must not retry in sync


def spared(found: Iterable[Sequence[bytes | None]]) -> list[SilentReceiver]:
    """Returns at most 20 receivers that failed BREAKS_AT tries, from (name, failures, next_at)."""
    silent = [
        SilentReceiver(name.decode(), int(n), float(at))
        for name, n, at in found
        if name and n and at and int(n) >= BREAKS_AT
    ]
    return silent[:_MOST_LISTED]
