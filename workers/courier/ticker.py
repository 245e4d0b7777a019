"""Queues a delivery for every outbox that is due."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import astuple

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from poc_core.queues import CALLBACK_QUEUE, DELIVER_TASK
from poc_core.state.delivery.outbox import Outbox
from workers.courier.courier import Courier

logger = logging.getLogger(__name__)

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
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="courier-ticker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                self._tick()
            except (RedisError, OperationalError) as error:
                logger.warning("could not look for deliveries: %s", error)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._renewed_at > self._outbox.lock_s / 5:
            self._renewed_at = now
            self._courier.renew_locks()
            self._look_around()
        for due in self._outbox.announce():
            self._app.send_task(DELIVER_TASK, args=list(astuple(due)), queue=CALLBACK_QUEUE)
