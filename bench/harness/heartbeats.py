"""The times between workers' heartbeats, as Redis stores them."""

import threading
import time
from typing import Any

import redis

from poc_core.state import keys

HEARTBEAT_LIMIT_S = 5.0  # half of the default POC_WORKER_TTL_S


class HeartbeatWatch:
    """A thread that measures the longest time between two heartbeats of each worker."""

    def __init__(self, url: str, look_s: float = 0.05) -> None:
        """`look_s`: seconds between two reads, less than between two heartbeats."""
        self._redis: Any = redis.Redis.from_url(url)
        self._look_s = look_s
        self._last: dict[str, float] = {}
        self._longest: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._look_s):
            for raw, at in self._redis.zrange(keys.WORKERS, 0, -1, withscores=True):
                self._note(raw.decode(), at)

    def _note(self, worker: str, at: float) -> None:
        apart = at - self._last.get(worker, at)
        self._longest[worker] = max(self._longest.get(worker, 0.0), apart)
        self._last[worker] = at

    def close(self) -> float:
        """Ends the thread; returns the longest time of all workers."""
        self._stop.set()
        self._thread.join()
        # The time since the last heartbeat counts too.
        for worker in self._last:
            self._note(worker, time.time())
        self._redis.close()
        return self.longest()

    def longest(self, prefix: str = "") -> float:
        """Returns the longest time of workers whose id has the prefix; inf if there are none."""
        seen = [s for worker, s in self._longest.items() if worker.startswith(prefix)]
        return max(seen, default=float("inf"))
