"""A worker's heartbeat, sent by a separate thread so that long operations do not delay it."""

import dataclasses
import logging
import threading
import time
from typing import Any

from redis.exceptions import RedisError

from poc_core import records
from poc_core.gpus import GpuWatch
from poc_core.periodic import Periodic
from poc_core.state.registry import WorkerRegistry
from poc_core.state.work import HeldLeases
from workers.proofs import Proofs

logger = logging.getLogger(__name__)


class Heartbeat:
    """A thread that regularly stores a worker's registration in Redis: its model, state, statistics
    and leases. Heartbeats are sent one at a time, so an older one never overwrites a newer one.
    """

    def __init__(
        self,
        record: records.WorkerRecord,
        registry: WorkerRegistry,
        hand: HeldLeases,
        interval_s: float,
    ) -> None:
        self.record = record
        self._registry = registry
        self._hand = hand
        self._interval_s = interval_s
        # The proofs and the chat port; None while the worker loads its model.
        self._served: tuple[Proofs, int | None] | None = None
        self._gpus = GpuWatch(record.host)
        # when the engine stopped making progress; None while it makes progress
        self._still_since: float | None = None
        self._mute_since: float | None = None  # when the chat port stopped answering
        self._draining = threading.Event()
        self._told_draining = self._told_chat = False
        self._hung = threading.Event()
        self._beats = Periodic("heartbeat", interval_s, self._beat)
        # A thread of its own: a GPU driver that hangs must not delay the heartbeat, which reports
        # that the engine hangs too.
        self._sensors = Periodic("sensors", interval_s, self._gpus.now)
        self._pulse = Periodic("pulse", min(records.PULSE_S, interval_s), self._live_on)

    @property
    def is_draining(self) -> bool:
        return self._draining.is_set()

    def start(self) -> None:
        self.beat()
        self._sensors.start()
        self._sensors.soon()
        self._beats.start()
        self._pulse.start()

    def ready(self, proofs: Proofs, chat_port: int | None) -> None:
        """Announces that this worker is ready. `chat_port`: None if the worker serves no chat."""
        self._served = proofs, chat_port
        self.beat()

    def drain(self) -> None:
        """Makes the next heartbeat announce this worker's end. Signal handlers may call it."""
        self._draining.set()

    def engine_stands_still(self, seconds: float) -> None:
        """Records for how many seconds requests have waited while the engine made no progress."""
        if not seconds:
            self._still_since = None
        elif self._still_since is None:
            self._still_since = round(time.time() - seconds, 1)

    def chat_answers(self, does: bool) -> None:
        """Sets whether the chat port answers requests. The next heartbeat reports this."""
        self._mute_since = None if does else self._mute_since or round(time.time(), 1)

    def hung(self) -> None:
        """Announces immediately that the engine hangs and that this worker is about to end."""
        self._hung.set()
        self.beat()

    def stop(self) -> None:
        """Stops the heartbeats, and removes the worker from the registry immediately."""
        self._sensors.stop(0)
        self._pulse.stop(self._interval_s)
        self._beats.stop(self._interval_s)
        try:
            self._registry.remove(self.record.id)
        except RedisError as error:
            logger.warning(
                "could not leave the registry (%s); this worker's entry expires by itself", error
            )

    def beat(self) -> None:
        """Sends a heartbeat immediately. Failures are logged, not raised."""
        self._beats.once()

    def _live_on(self) -> None:
        """Extends the expiry of the worker's record. Triggers a heartbeat if the record is missing,
        the worker began to drain, or its last chat ended.
        """
        newly_draining = self._draining.is_set() and not self._told_draining
        chats = self._served and self._served[0].chat_stats().get("chat_active")
        chat_ended = self._told_chat and not chats
        if not self._registry.pulse(self.record.id) or newly_draining or chat_ended:
            self._beats.soon()

    def _beat(self) -> None:
        now: dict[str, Any] = {"gpus": self._gpus.latest.model_dump()}
        if self._served is not None:
            proofs, port = self._served
            engine = proofs.engine
            now |= {"state": "ready", "port": port, "chat_paths": tuple(engine.chat_paths)}
            now |= {"info": engine.info, "stats": proofs.chat_stats()}
            if self._still_since is not None:
                now["stats"]["engine_still_since"] = self._still_since
            if self._mute_since is not None:
                now["stats"]["chat_mute_since"] = self._mute_since
        if self._hung.is_set() or self._draining.is_set():
            now["state"] = "hung" if self._hung.is_set() else "draining"
        self._registry.heartbeat(dataclasses.replace(self.record, **now), self._hand.summary())
        self._told_draining = now.get("state") == "draining"
        self._told_chat = bool(now.get("stats", {}).get("chat_active"))
