"""The connection to Redis."""

import time
from collections.abc import Callable
from typing import Any

from redis import Redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    ConnectionError,
    RedisError,
    TimeoutError,
)
from redis.retry import Retry

from poc_core.errors import ProoflineError
from poc_core.redis_at import connections
from poc_core.redis_at.url import RedisUrl
from poc_core.settings import REDIS_TIMEOUT_S, Settings
from poc_core.state.scripts import BaseStore

# Retries after a failed command: enough for a broken connection. An unavailable Redis must be
# reported within seconds. Every script is safe to repeat.
_RETRIES = 3
# Timeout in seconds of the check at startup that this Redis can be used.
_LOOK_S = 2.0


class Store(BaseStore):
    """Base class of the stores that depend on the settings."""

    def __init__(
        self, redis: Redis, settings: Settings, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(redis, clock)
        self._settings = settings


def server_clock(redis: Any) -> Callable[[], float]:
    """Returns a function that reads the clock of Redis' machine, in seconds since the epoch."""
    return lambda: float("{}.{:06}".format(*redis.time()))


def connect(settings: Settings, patient: bool = True, timeout_s: float = REDIS_TIMEOUT_S) -> Redis:
    """Returns a Redis client that threads may share. The client connects on first use, and returns
    bytes. `patient`: True to retry a command also after a timeout.
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
    """Raises ProoflineError if POC_REDIS_URL names a server that can never be used."""
    at = RedisUrl.of(settings.redis_url)
    with connections.client(at, socket_connect_timeout=_LOOK_S, socket_timeout=_LOOK_S) as redis:
        try:
            redis.ping()
        except connections.WrongRedisError as error:
            raise ProoflineError(f"POC_REDIS_URL: {error}.") from error
        except RedisError:
            pass  # Redis is down: the next command reports the error
