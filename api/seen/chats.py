"""Counts of the chats that pass through this process, for the node's history."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from poc_core.state.past.history import CHAT_MS, CHATS, FAILED, History, bucket


class Chat:
    """One request under way."""

    def __init__(self, chats: "Chats", began: float) -> None:
        self._chats = chats
        self._began = began

    def first_token(self) -> None:
        """Its stream has begun."""
        self._chats.count(bucket(self._chats.clock() - self._began))

    def failed(self) -> None:
        """It is answered by 5xx, or by nobody."""
        self._chats.count(FAILED)


class Chats:
    """What was counted since it was told last; for any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._active = 0
        self._busy_ms = 0.0  # of requests under way, together; not told yet
        self._since = clock()  # when `_active` was added to `_busy_ms`

    @contextmanager
    def under_way(self) -> Iterator[Chat]:
        """A request, from its arrival to the end of its answer."""
        self._change(1)
        self.count(CHATS)
        try:
            yield Chat(self, self.clock())
        finally:
            self._change(-1)

    def count(self, field: str) -> None:
        with self._lock:
            self._counts[field] += 1

    def tell(self, history: History, second: float) -> None:
        """Adds what is new to the history. RedisError: it stays for the next time."""
        self._change(0)
        with self._lock:
            whole_ms = int(self._busy_ms)
            counts, self._counts = self._counts, Counter()
            self._busy_ms -= whole_ms
        if whole_ms:
            counts[CHAT_MS] += whole_ms
        if not counts:
            return
        try:
            history.add(second, counts)
        except Exception:
            with self._lock:
                self._counts += counts
            raise

    def _change(self, by: int) -> None:
        with self._lock:
            now = self.clock()
            self._busy_ms += 1000 * self._active * (now - self._since)
            self._since = now
            self._active += by
