"""Queues a delivery for every outbox that is due."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple

from celery import Celery

from poc_core.periodic import Periodic
from poc_core.queues import CALLBACK_QUEUE, DELIVER_TASK
from poc_core.state.delivery.outbox import Outbox
from workers.courier.courier import Courier

# Seconds between two looks for deliveries that are due.
TICK_S = 0.25


class Ticker:
    """A thread that queues a delivery for every outbox that is due, and holds the locks of those on
    their way.

    An outbox has one message at a time, whatever the number of couriers: Redis knows which are
    announced.
    """

    def __init__(
        self,
        outbox: Outbox,
        app: Celery,
        courier: Courier,
        look_around: Callable[[], object] = lambda: None,
    ) -> None:
        """`look_around()` is called every few seconds."""
        self._outbox = outbox
        self._app = app
        self._courier = courier
        self._look_around = look_around
        self._renewed_at = float("-inf")
        self._ticks = Periodic("courier-ticker", TICK_S, self._tick)

    def start(self) -> None:
        self._ticks.start()

    def stop(self) -> None:
        self._ticks.stop()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._renewed_at > self._outbox.lock_s / 5:
            self._renewed_at = now
            self._courier.renew_locks()
            self._look_around()
        for due in self._outbox.announce():
            self._app.send_task(DELIVER_TASK, args=list(astuple(due)), queue=CALLBACK_QUEUE)
