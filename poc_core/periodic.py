"""Threads that repeat a task of a process."""

import logging
import threading
import time
from collections.abc import Callable

from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

# Seconds after which the same trouble, still there, is logged again.
SAID_AGAIN_S = 60.0
# Characters of an error of Redis that are logged.
_MOST_CHARS = 200


class Periodic:
    """A thread that takes a step every `interval_s` seconds until it is stopped.

    A step that fails is logged and does not end the thread: the next one comes all the same.
    """

    def __init__(self, name: str, interval_s: float, step: Callable[[], object]) -> None:
        """`name`: of the thread, and of what failed where a step did."""
        self._name = name
        self._interval_s = interval_s
        self._step = step
        self._one_at_a_time = threading.Lock()
        self._said: tuple[str, float] = "", 0.0  # the trouble that was logged last, and when
        self._stop = threading.Event()
        self._soon = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_stopping(self) -> bool:
        """For a long step, which should end soon then."""
        return self._stop.is_set()

    def start(self) -> None:
        """Takes the first step after `interval_s`. Not to be called twice."""
        self._thread.start()

    def once(self) -> None:
        """Takes a step at once, on the caller's thread and after one under way. Raises nothing."""
        with self._one_at_a_time:
            try:
                self._step()
            except Exception as error:
                self._say(error)

    def soon(self) -> None:
        """The thread takes its next step now, or after the one under way. Does not wait."""
        self._soon.set()

    def stop(self, timeout_s: float | None = None) -> None:
        """No further step begins. Waits for the one under way, for at most `timeout_s` seconds."""
        self._stop.set()
        self._soon.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            self._soon.wait(self._interval_s)
            self._soon.clear()
            if self._stop.is_set():
                return
            self.once()

    def _say(self, error: Exception) -> None:
        now, (text, said_at) = time.monotonic(), self._said
        if repr(error) == text and now - said_at < SAID_AGAIN_S:
            return
        self._said = repr(error), now
        # kombu's errors have Redis' as their cause. Neither is a mistake in the code.
        is_away = isinstance(error, RedisError) or isinstance(error.__cause__, RedisError)
        logger.warning(
            "%s failed and goes on: %s",
            self._name,
            _brief(error) if is_away else repr(error),
            exc_info=None if is_away else error,
        )


def _brief(error: Exception) -> str:
    """Redis' errors may quote a whole script."""
    line = str(error).partition("\n")[0]
    return line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]}..."
