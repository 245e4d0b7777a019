"""The chats of this process: counts for the node's history, durations for Prometheus."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from api.seen.times import ChatTimes
from poc_core.state.past.history import CHAT_MS, CHATS, FAILED, History, bucket


class Chat:
    """One request in progress."""

    def __init__(self, chats: "Chats", model: str) -> None:
        self._chats = chats
        self._model = model
        self._began = chats.clock()

    def first_token(self) -> None:
        """Records that the answer's stream has begun."""
        seconds = self._seconds()
        self._chats.count(bucket(seconds))
        self._chats.times.first_token.labels(self._model).observe(seconds)

    def ended(self) -> None:
        """Records that the client has the complete answer."""
        self._chats.times.whole.labels(self._model).observe(self._seconds())

    def failed(self) -> None:
        """Records that the answer is a 5xx, or that no worker answered."""
        self._chats.count(FAILED)

    def _seconds(self) -> float:
        return self._chats.clock() - self._began


class Chats:
    """Counts and durations of chats since the last report. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.times = ChatTimes()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._active = 0
        self._busy_ms = 0.0  # total time of requests in progress that is not yet reported
        self._since = clock()  # when `_active` was last added to `_busy_ms`

    @contextmanager
    def under_way(self, model: str) -> Iterator[Chat]:
        """Counts a request to `model` from its arrival to the end of its answer."""
        self._change(1)
        self.count(CHATS)
        try:
            yield Chat(self, model)
        finally:
            self._change(-1)

    def count(self, field: str) -> None:
        with self._lock:
            self._counts[field] += 1

    def report(self, history: History, second: float) -> None:
        """Adds the new counts to the history. After a RedisError the next report adds them."""
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
