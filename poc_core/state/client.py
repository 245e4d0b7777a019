"""The connection to Redis."""

import time
from collections.abc import Callable
from typing import Any

from redis import Redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from poc_core.errors import ProoflineError
from poc_core.redis_at import connections
from poc_core.redis_at.connections import WrongRedisError
from poc_core.redis_at.url import RedisUrl
from poc_core.settings import REDIS_TIMEOUT_S, Settings

# Tries after a failed command: enough for a broken connection; a Redis that is away must show
# within seconds. Every script may run twice without harm.
_RETRIES = 3
# Seconds for a look at a start whether the Redis will do.
_LOOK_S = 2.0

# Redis away, restarting or failing over, busy with a script that does not end, its memory or disk
# full, too few replicas: errors by type, and by a script error's text.
TRANSIENT = (ConnectionError, TimeoutError, OutOfMemoryError, ReadOnlyError)
_TRANSIENT_TEXTS = ("OOM ", "READONLY ", "LOADING ", "MISCONF ", "BUSY ", "NOREPLICAS ")


def is_transient(error: Exception) -> bool:
    """True if Redis itself is in trouble for some time, not this one command."""
    if isinstance(error, ResponseError) and any(text in str(error) for text in _TRANSIENT_TEXTS):
        return True
    return isinstance(error, TRANSIENT)


def is_busy(error: Exception) -> bool:
    """True if Redis refuses because a script has run for long (5 s, by default)."""
    return isinstance(error, ResponseError) and "BUSY " in str(error)


class Store:
    """What operations on Redis are made of."""

    def __init__(
        self, redis: Redis, settings: Settings, clock: Callable[[], float] = time.time
    ) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._settings = settings
        self._clock = clock


def server_clock(redis: Any) -> Callable[[], float]:
    """Redis' own time, in seconds since the epoch: hosts' clocks may differ."""
    return lambda: float("{}.{:06}".format(*redis.time()))


def connect(settings: Settings, patient: bool = True, timeout_s: float = REDIS_TIMEOUT_S) -> Redis:
    """A client that threads may share. Connects on first use; answers are bytes.

    `patient`: asks a silent Redis again; else silence is an error after `timeout_s`.
    """
    again = (ConnectionError, TimeoutError) if patient else (ConnectionError,)
    return connections.client(
        RedisUrl.of(settings.redis_url),
        socket_connect_timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_keepalive=True,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.4), _RETRIES, again),
    )


def refuse_wrong(settings: Settings) -> None:
    """ProoflineError: what is at POC_REDIS_URL will not do. One that is away may come yet."""
    at = RedisUrl.of(settings.redis_url)
    with connections.client(at, socket_connect_timeout=_LOOK_S, socket_timeout=_LOOK_S) as redis:
        try:
            redis.ping()
        except WrongRedisError as error:
            raise ProoflineError(f"POC_REDIS_URL: {error}.") from error
        except RedisError:
            pass  # whoever goes on says so
