"""Waiting out a Redis that is away: what an engine computed must not be lost because of a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from redis.exceptions import (
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between tries. Each try already lasts as long as the client's own retries and timeouts.
PAUSE_S = 0.5
# Seconds between two lines in the log while Redis stays away.
_LOG_INTERVAL_S = 10.0


# Redis away or restarting, its memory or disk full: errors by type, and by the text of a script's error.
_TRANSIENT = (ConnectionError, TimeoutError, OutOfMemoryError, ReadOnlyError)
_TRANSIENT_TEXTS = ("OOM ", "READONLY ", "LOADING ", "MISCONF ")


def is_transient(error: Exception) -> bool:
    """Whether Redis is in trouble, for some time, and not this one command."""
    if isinstance(error, ResponseError) and any(text in str(error) for text in _TRANSIENT_TEXTS):
        return True
    return isinstance(error, _TRANSIENT)


def until_redis_answers(step: Callable[[], T]) -> T:
    """The result of `step`, tried again for as long as Redis is away. A step must be repeatable without harm."""
    logged_at = 0.0
    while True:
        try:
            return step()
        except RedisError as error:
            if isinstance(error, ResponseError) and not is_transient(error):
                raise  # an error in a command would come again
            if time.monotonic() - logged_at > _LOG_INTERVAL_S:
                logger.warning("waiting for Redis with work in hand: %s", error)
                logged_at = time.monotonic()
            time.sleep(PAUSE_S)
