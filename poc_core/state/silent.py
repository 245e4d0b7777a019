"""Who gives no sign of life, where nothing that was written before may be believed."""

import time
from collections.abc import Iterable
from typing import Any

# Seconds between two looks for signs of life.
_LOOK_S = 0.1


def silent_for(
    redis: Any, index: str, others: Iterable[bytes], now: float, wait_s: float
) -> set[bytes]:
    """Of all in `index`, a zset by the time of the last sign of life, and of `others`: those that
    give none within `wait_s`. Returns as soon as all have.

    For an operator who has just shut out a host: what it left may say any name and any time.
    """
    listed = redis.zrange(index, 0, -1)
    if listed:
        redis.zadd(index, dict.fromkeys(listed, now), xx=True)
    silent, until = {*listed, *others}, time.monotonic() + wait_s
    while silent and time.monotonic() < until:
        time.sleep(_LOOK_S)
        found = redis.zrange(index, 0, -1, withscores=True)
        silent -= {name for name, heard_at in found if heard_at != now}
    return silent
