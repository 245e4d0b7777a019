"""Sees within seconds that Redis is away, whether or not somebody asks, and says so in the log."""

import logging
from collections.abc import Callable

from redis import Redis
from redis.exceptions import TimeoutError

from poc_core.periodic import Periodic
from poc_core.state.client import is_transient

log = logging.getLogger(__name__)

LOOK_S = 1.0
# Seconds that Redis may take for a PING: longer than its longest script, less than a request waits.
PATIENCE_S = 2.0


class RedisWatch:
    """A thread of the API that asks Redis every second; what requests find counts as well."""

    def __init__(self, redis: Redis, clock: Callable[[], float]) -> None:
        """`redis`: with a timeout of PATIENCE_S. `clock`: seconds since the epoch."""
        self._redis = redis
        self._clock = clock
        self._looks: Periodic | None = None
        self.away_since: float | None = None  # seconds since the epoch; None: it answers
        self.is_mute = False  # it takes connections and says nothing: asking it takes long

    def start(self) -> None:
        """Begins to look. Applications that share their services begin it once."""
        if self._looks is None:
            self._looks = Periodic("redis-watch", LOOK_S, self.look)
            self._looks.start()

    def close(self) -> None:
        if self._looks is not None:
            self._looks.stop(LOOK_S)
        self._redis.close()

    def look(self) -> None:
        """Asks Redis once. Raises nothing while Redis is away."""
        try:
            self._redis.ping()
        except Exception as error:
            if not is_transient(error):
                raise
            self.note_away(error)
        else:
            self.note_back()

    def note_away(self, error: Exception) -> None:
        """Somebody had no answer; the first says so."""
        self.is_mute = isinstance(error, TimeoutError)
        if self.away_since is None:
            self.away_since = self._clock()
            log.warning(
                "Redis does not answer (%s): this API answers 503 until it does; check that it runs"
                " and that --redis-url or POC_REDIS_URL is right",
                error,
            )

    def note_back(self) -> None:
        """Somebody had an answer."""
        if self.away_since is not None:
            log.warning("Redis answers again, after %.0f s", self._clock() - self.away_since)
        self.away_since, self.is_mute = None, False
