"""Distinguishes a hung engine from a busy one by its progress, not by a request's duration."""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.engines.base import Pulse


class Watchdog:
    """Measures how long an engine makes no progress. For one thread that checks periodically."""

    def __init__(
        self,
        hung_after_s: float,
        longest_look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`longest_look_s`: most time that one check adds; this process may have been stopped."""
        self._hung_after_s = hung_after_s
        self._longest_look_s = longest_look_s
        self._clock = clock
        self._beats: int | None = None
        self._looked_at = 0.0
        self._still_s = 0.0

    @property
    def still_s(self) -> float:
        """Returns the seconds without progress while requests waited, as of the last check."""
        return self._still_s

    def is_hung(self, pulse: Pulse) -> bool:
        """Returns whether the engine made no progress for `hung_after_s` while requests waited."""
        now = self._clock()
        if pulse.beats != self._beats or not pulse.waits:
            self._still_s = 0.0
        else:
            self._still_s += min(now - self._looked_at, self._longest_look_s)
        self._beats, self._looked_at = pulse.beats, now
        return self._still_s >= self._hung_after_s
