"""Detects within seconds that Redis is unavailable, and logs it.

Reloads lost Lua scripts, because only the API may load scripts. Kills a script that blocks Redis
for 5 s or more.
"""

import logging
from collections.abc import Callable

from kombu.transport.redis import REFRESH_BINDING, SWEEP_BINDINGS
from redis import Redis
from redis.exceptions import ResponseError, TimeoutError
from redis.lock import Lock

from poc_core.periodic import Periodic
from poc_core.redis_at.connections import is_busy, is_transient
from poc_core.state import scripts

log = logging.getLogger(__name__)

LOOK_S = 1.0
# Seconds to wait for a PING: longer than our longest script, shorter than requests wait.
PATIENCE_S = 2.0
# Celery's scripts, which workers and Flower run.
BROKER_SCRIPTS = (REFRESH_BINDING, SWEEP_BINDINGS, str(Lock.LUA_RELEASE_SCRIPT))
AWAY = "Redis does not answer"
# Redis reports this once a script has run for 5 s (lua-time-limit, busy-reply-threshold).
BUSY = "Redis is busy with a script"
UNKILLABLE = (
    "Redis is busy with a script that has written and so cannot be killed (the operator ends"
    " it with `redis-cli SHUTDOWN NOSAVE` and a start of Redis, which keeps acknowledged data)"
)


class RedisWatch:
    """Tracks whether Redis is available, by a ping every second and the outcome of requests."""

    def __init__(self, redis: Redis, clock: Callable[[], float]) -> None:
        """`redis`: client with a timeout of PATIENCE_S. `clock`: seconds since the epoch."""
        self._redis = redis
        self._clock = clock
        self._looks: Periodic | None = None
        self.away_since: float | None = None  # seconds since the epoch; None while Redis answers
        self.trouble = AWAY
        self.is_mute = False  # whether Redis accepts connections without answering

    def start(self) -> None:
        """Starts the thread that pings Redis. Does nothing if the thread was already started."""
        if self._looks is None:
            self._looks = Periodic("redis-watch", LOOK_S, self.look)
            self._looks.start()

    def close(self) -> None:
        if self._looks is not None:
            self._looks.stop(LOOK_S)
        self._redis.close()

    def look(self) -> None:
        """Pings Redis once and records the result. Does not raise if Redis is unavailable."""
        try:
            self._redis.ping()
            scripts.load_all(self._redis, BROKER_SCRIPTS)
        except Exception as error:
            if not is_transient(error):
                raise
            self.note_away(error)
            if is_busy(error):
                self._kill_script()
        else:
            self.note_back()

    def _kill_script(self) -> None:
        try:
            self._redis.script_kill()
        except ResponseError as error:  # the script has ended by itself, or has written
            if "UNKILLABLE" in str(error) and self.trouble != UNKILLABLE:
                self.trouble = UNKILLABLE
                log.error(UNKILLABLE)
        else:
            log.error(
                "killed a script that had held Redis for 5 s or more: Proofline has none that runs"
                " so long, so look who else has a password of this Redis"
            )

    def note_away(self, error: Exception) -> None:
        """Records that a request to Redis failed. Logs only the first failure of an outage."""
        self.is_mute = isinstance(error, TimeoutError)
        if self.trouble != UNKILLABLE:
            self.trouble = BUSY if is_busy(error) else AWAY
        if self.away_since is None:
            self.away_since = self._clock()
            log.warning(
                f"{self.trouble} (%s): this API answers 503 until it does; check that it runs"
                " and that --redis-url or POC_REDIS_URL is right",
                error,
            )

    def note_back(self) -> None:
        """Records that Redis answered a request, and logs the end of an outage."""
        if self.away_since is not None:
            log.warning("Redis answers again, after %.0f s", self._clock() - self.away_since)
        self.away_since, self.is_mute, self.trouble = None, False, AWAY
