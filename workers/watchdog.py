"""Tells an engine that hangs from a busy one: by its progress, not by a request's duration."""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.engines.base import Pulse


class Watchdog:
    """Notes since when an engine stands still; for one thread that looks every so often."""

    def __init__(
        self,
        hung_after_s: float,
        longest_look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`longest_look_s`: what one look counts for at most.

        A process that was itself stopped, or had no core to run on, saw nothing meanwhile and must
        not hold that against its engine.
        """
        self._hung_after_s = hung_after_s
        self._longest_look_s = longest_look_s
        self._clock = clock
        self._beats: int | None = None
        self._looked_at = 0.0
        self._still_s = 0.0

    @property
    def still_s(self) -> float:
        """Seconds that the engine stood still while somebody waited, as of the last look."""
        return self._still_s

    def is_hung(self, pulse: Pulse) -> bool:
        """True if the engine has stood still for `hung_after_s` while somebody waited for it."""
        now = self._clock()
        if pulse.beats != self._beats or not pulse.waits:
            self._still_s = 0.0
        else:
            self._still_s += min(now - self._looked_at, self._longest_look_s)
        self._beats, self._looked_at = pulse.beats, now
        return self._still_s >= self._hung_after_s
