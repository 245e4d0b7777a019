"""Counts this API process's chats for the node's history, and times them for Prometheus."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Histogram, disable_created_metrics

from poc_core.state.history import CHAT_MS, CHATS, FAILED, History, bucket

# Bounds in seconds: from a tiny model's answer to a long answer after a queue.
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


# Otherwise Prometheus' text format adds a series `_created` for each series' start.
disable_created_metrics()


def _histogram(name: str, documentation: str) -> Histogram:
    return Histogram(name, documentation, ["model"], registry=None, buckets=_BUCKETS)


class Chat:
    def __init__(self, chats: "Chats", model: str) -> None:
        self._chats = chats
        self._model = model
        self._began = chats.clock()

    def first_token(self) -> None:
        seconds = self._seconds()
        self._chats.count(bucket(seconds))
        self._chats.first_token.labels(self._model).observe(seconds)

    def ended(self) -> None:
        self._chats.whole.labels(self._model).observe(self._seconds())

    def failed(self) -> None:
        """Records that the client gets a 5xx, because a worker failed or no worker answered."""
        self._chats.count(FAILED)

    def _seconds(self) -> float:
        return self._chats.clock() - self._began


class Chats:
    """Counts this process's chats since the last `report`, and times them. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        # Seconds from a chat request to its first token, and to its end, by model.
        self.first_token = _histogram(
            "proofline_chat_first_token_seconds",
            "From a streamed chat request's arrival to its first token.",
        )
        self.whole = _histogram(
            "proofline_chat_request_seconds", "From a chat request's arrival to its answer's end."
        )
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._active = 0
        self._busy_ms = 0.0  # total time of requests in progress that is not yet reported
        self._since = clock()  # the time up to which `_busy_ms` counts

    @contextmanager
    def under_way(self, model: str) -> Iterator[Chat]:
        """Counts a chat request to `model`. The context lasts until the end of the answer."""
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
        """Adds the counts since the last report to the history. If this fails, keeps the counts."""
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
