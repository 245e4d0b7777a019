"""The courier process: delivers what waits in the outboxes. Needs no engine and no GPU."""

from __future__ import annotations

import logging
import socket
import threading
import time

import httpx
from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from poc_core.queues import CALLBACK_QUEUE, DELIVER_TASK
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.outbox import Delivery, Outbox, OutboxExpiredError
from workers.patience import until_redis_answers
from workers.queue.app import create_app

logger = logging.getLogger(__name__)

# Seconds the receiver has to answer (protocol.md, section 6).
TIMEOUT_S = 10.0
# Seconds between two looks for deliveries that are due.
TICK_S = 0.25
# Seconds of one task, after which other outboxes have a turn.
TASK_S = 30.0
# Deliveries under way at the same time: receivers that hang must not hold up the others.
CONCURRENCY = 8

_current: Courier | None = None


def current() -> Courier:
    """The courier of this process. RuntimeError elsewhere."""
    if _current is None:
        raise RuntimeError("this process delivers nothing; start one with `proofline courier`")
    return _current


class Courier:
    """Takes payloads from outboxes to their receivers."""

    def __init__(self, outbox: Outbox, client: httpx.Client, max_retries: int | None = None) -> None:
        """`max_retries`: tries after which a payload is dropped; None: never."""
        self._outbox = outbox
        self._client = client
        self._max_retries = max_retries
        self._on_their_way: dict[str, Delivery] = {}  # by token

    def install(self) -> None:
        global _current
        _current = self

    def deliver(self, outbox_id: str) -> None:
        """Delivers the outbox's payloads that are due; does nothing when none is or another process delivers it."""
        until = time.monotonic() + TASK_S
        while time.monotonic() < until:
            try:
                delivery = self._outbox.take(outbox_id)
            except OutboxExpiredError as error:
                logger.error("%s", error)
                return
            if delivery is None or not self._deliver(delivery):
                return

    def renew_locks(self) -> None:
        """To be called well within the lock's time: a payload on a slow line must not be sent beside itself."""
        for delivery in list(self._on_their_way.values()):
            self._outbox.renew(delivery)

    def _deliver(self, delivery: Delivery) -> bool:
        """One try. Whether the payload was delivered."""
        self._on_their_way[delivery.token] = delivery
        try:
            error = self._post(delivery)
            self._end(delivery, error)
        finally:
            del self._on_their_way[delivery.token]
        return error is None

    def _end(self, delivery: Delivery, error: str | None) -> None:
        if error is None:
            # Until Redis has it: the receiver must not be sent again what it has taken.
            if not until_redis_answers(lambda: self._outbox.delivered(delivery)):
                logger.warning("payload %s was delivered late; its receiver may see it again", delivery.payload_id)
            return
        tries = delivery.failures + 1
        if self._max_retries is not None and tries >= self._max_retries:
            logger.error("payload %s is dropped after %d tries: %s", delivery.payload_id, tries, error)
            until_redis_answers(lambda: self._outbox.dropped(delivery, error))
            return
        wait_s = until_redis_answers(lambda: self._outbox.failed(delivery, error))
        logger.warning(
            "payload %s not delivered (try %d, next in %.1f s): %s", delivery.payload_id, tries, wait_s, error
        )

    def _post(self, delivery: Delivery) -> str | None:
        """None when the receiver took it, else what went wrong."""
        headers = {"Content-Type": "application/json", "X-Payload-Id": delivery.payload_id}
        try:
            # A stream, because the status is all that matters: a body without end must not hold the courier.
            with self._client.stream("POST", delivery.url, content=delivery.body, headers=headers) as response:
                return None if response.status_code < 400 else f"{delivery.url} answered {response.status_code}"
        except Exception as error:  # not all are httpx's own: a url or host name can be bad in many ways
            return f"{delivery.url}: {type(error).__name__}: {error}"


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


def run_courier(redis_url: str | None = None) -> None:
    """Delivers until SIGTERM or SIGINT. Several may run, also on several hosts."""
    for name in ("celery.worker.strategy", "celery.app.trace", "httpx"):  # lines that say nothing of failures
        logging.getLogger(name).setLevel(logging.WARNING)
    settings = load_settings(redis_url=redis_url)
    app = create_app(redis_url)
    outbox = Outbox(connect(settings), settings)
    # trust_env off: a proxy of the environment is for the internet, aggregators are on the operator's network.
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
        courier = Courier(outbox, client, settings.callback_max_retries)
        courier.install()
        ticker = Ticker(outbox, app, courier)
        ticker.start()
        try:
            app.Worker(
                pool="threads",
                concurrency=CONCURRENCY,
                hostname=f"courier@{socket.gethostname()}",
                queues=[CALLBACK_QUEUE],
                loglevel="INFO",
                without_gossip=True,
                without_mingle=True,
            ).start()
        finally:
            ticker.stop()
