"""Passes due outboxes to the courier."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from redis.exceptions import RedisError

from poc_core import life_signs
from poc_core.periodic import Periodic
from poc_core.state.delivery.outbox import Outbox
from workers.courier.courier import Courier

# Seconds between two searches for due deliveries.
TICK_S = 0.25
# Most seconds between two signs of life for any POC_WORKER_TTL_S; containers wait 60 s for a sign.
_SIGN_S = 20.0
ALIVE = Path(tempfile.gettempdir(), "proofline-courier")


class Ticker:
    """A thread that passes due outboxes to the courier, and renews the locks of deliveries. Redis
    assigns each due outbox to one courier at a time. The thread updates the mtime of ALIVE, a
    private folder, which a container's health check reads.
    """

    def __init__(
        self, outbox: Outbox, courier: Courier, look_around: Callable[[], str] = lambda: ""
    ) -> None:
        """`look_around()` is called every few seconds. It returns the courier's problem, or ""."""
        self._outbox = outbox
        self._courier = courier
        self._look_around = look_around
        self._trouble = ""
        self._renewed_at = float("-inf")
        self._ticks = Periodic("courier-ticker", TICK_S, self._tick)

    def start(self) -> None:
        self._ticks.start()

    def stop(self) -> None:
        self._ticks.stop()
        life_signs.remove(ALIVE)
        with contextlib.suppress(
            RedisError
        ):  # without this call the courier is reported as missing
            self._outbox.leave()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._renewed_at > min(self._outbox.lock_s / 5, _SIGN_S):
            self._renewed_at = now
            life_signs.show(ALIVE)
            self._courier.renew_locks()
            self._trouble = self._look_around()
        for due in self._outbox.announce(self._trouble):
            self._courier.offer(due)
