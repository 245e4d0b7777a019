"""A thread that repeats a task."""

import logging
import threading
import time
from collections.abc import Callable

from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

# Seconds after which a repeated error is logged again.
SAID_AGAIN_S = 60.0
# Most logged characters of an error of Redis.
_MOST_CHARS = 200


class Periodic:
    """A thread that calls `step` every `interval_s` seconds. An error of a step is only logged."""

    def __init__(self, name: str, interval_s: float, step: Callable[[], object]) -> None:
        """`name`: the name of the thread, and of the task in logged errors."""
        self._name = name
        self._interval_s = interval_s
        self._step = step
        self._one_at_a_time = threading.Lock()
        self._said: tuple[str, float] = "", 0.0  # the error logged last, and when
        self._stop = threading.Event()
        self._soon = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_stopping(self) -> bool:
        """True after `stop`. A long step should then return early."""
        return self._stop.is_set()

    def start(self) -> None:
        """Starts the thread, whose first step runs after `interval_s`. Must be called only once."""
        self._thread.start()

    def once(self) -> None:
        """Runs `step` on the caller's thread, after a run in progress has ended. Logs errors."""
        with self._one_at_a_time:
            try:
                self._step()
            except Exception as error:
                self._say(error)

    def soon(self) -> None:
        """Makes the thread run `step` now, or directly after the current run. Does not wait."""
        self._soon.set()

    def stop(self, timeout_s: float | None = None) -> None:
        """Stops the thread. Waits up to `timeout_s` seconds (None: no limit) for a running step."""
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
        # kombu's errors have an error of Redis as their cause. Neither is a bug in the code.
        is_away = isinstance(error, RedisError) or isinstance(error.__cause__, RedisError)
        logger.warning(
            "%s failed and is repeated: %s",
            self._name,
            _brief(error) if is_away else repr(error),
            exc_info=None if is_away else error,
        )


def _brief(error: Exception) -> str:
    """Returns the first line of an error's text, shortened. Redis' errors may quote a script."""
    line = str(error).partition("\n")[0]
    return line if len(line) <= _MOST_CHARS else f"{line[:_MOST_CHARS]}..."
