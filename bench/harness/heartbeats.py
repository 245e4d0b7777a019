"""How late workers' heartbeats come, as Redis is told of them."""

import threading
import time
from typing import Any

import redis

from poc_core.state import keys

HEARTBEAT_LIMIT_S = 5.0  # half of the default POC_WORKER_TTL_S


class HeartbeatWatch:
    """The longest time between two heartbeats of any worker, from its first on."""

    def __init__(self, url: str, look_s: float = 0.05) -> None:
        """`look_s`: seconds between two looks; shorter than between two heartbeats."""
        self._redis: Any = redis.Redis.from_url(url)
        self._look_s = look_s
        self._last: dict[bytes, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.longest_s = 0.0

    def _run(self) -> None:
        while not self._stop.wait(self._look_s):
            for worker, at in self._redis.zrange(keys.WORKERS, 0, -1, withscores=True):
                self.longest_s = max(self.longest_s, at - self._last.get(worker, at))
                self._last[worker] = at

    def close(self) -> float:
        self._stop.set()
        self._thread.join()
        # One that is late at the end counts as well.
        longest = max([self.longest_s, *(time.time() - at for at in self._last.values())])
        self._redis.close()
        return longest
