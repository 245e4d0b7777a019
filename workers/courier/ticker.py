"""Queues a delivery for every outbox that is due."""

from __future__ import annotations

import logging
import threading
import time

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from poc_core.queues import CALLBACK_QUEUE, DELIVER_TASK
from poc_core.state.outbox import Outbox
from workers.courier.courier import TIMEOUT_S, Courier

logger = logging.getLogger(__name__)

# Seconds between two looks for deliveries that are due.
TICK_S = 0.25


class Ticker:
    """A thread that queues a delivery for every outbox that is due, and holds the locks of those on their way."""

    def __init__(self, outbox: Outbox, app: Celery, courier: Courier) -> None:
        self._outbox = outbox
        self._app = app
        self._courier = courier
        self._renewed_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="courier-ticker", daemon=True)
        self._queued_at: dict[str, float] = {}

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
        due = self._outbox.due()
        self._queued_at = {outbox_id: at for outbox_id, at in self._queued_at.items() if outbox_id in due}
        for outbox_id in due:
            # A second message does no harm, but one a tick while the first waits for its turn would pile up.
            if now - self._queued_at.get(outbox_id, -TIMEOUT_S) >= TIMEOUT_S / 4:
                self._queued_at[outbox_id] = now
                self._app.send_task(DELIVER_TASK, args=[outbox_id], queue=CALLBACK_QUEUE)
