"""Retries steps while Redis is unavailable, so that a restart of Redis loses no computed values."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from redis.exceptions import RedisError, ResponseError

from poc_core.redis_at.connections import is_transient

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between tries; each try includes the client's retries and timeouts.
PAUSE_S = 0.5
# Seconds between two log lines while Redis is unavailable.
_LOG_INTERVAL_S = 10.0


def until_redis_answers(step: Callable[[], T]) -> T:
    """Returns the result of `step()`, which is repeated while Redis is unavailable."""
    logged_at = 0.0
    while True:
        try:
            return step()
        except RedisError as error:
            if isinstance(error, ResponseError) and not is_transient(error):
                raise  # a repetition would fail in the same way
            if time.monotonic() - logged_at > _LOG_INTERVAL_S:
                logger.warning("waiting for Redis with unfinished work: %s", error)
                logged_at = time.monotonic()
            time.sleep(PAUSE_S)
