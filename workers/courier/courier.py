"""Takes payloads from outboxes to their receivers."""

from __future__ import annotations

import logging
import time

import httpx

from poc_core.state.outbox import Delivery, Outbox, OutboxExpiredError
from workers.patience import until_redis_answers

logger = logging.getLogger(__name__)

# Seconds the receiver has to answer (protocol.md, section 6).
TIMEOUT_S = 10.0
# Seconds of one task, after which other outboxes have a turn.
TASK_S = 30.0

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
                return None if response.is_success else f"{delivery.url} answered {response.status_code}"
        except Exception as error:  # not all are httpx's own: a url or host name can be bad in many ways
            return f"{delivery.url}: {type(error).__name__}: {error}"
