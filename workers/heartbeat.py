"""A worker's heartbeat, on a thread that does nothing else: whatever takes long elsewhere, the
worker stays alive.
"""

from __future__ import annotations

import dataclasses
import logging
import threading

from redis.exceptions import RedisError

from poc_core.gpus import GpuWatch
from poc_core.records import WorkerRecord
from poc_core.state.hand import Hand
from poc_core.state.registry import WorkerRegistry
from workers.proofs import Proofs

logger = logging.getLogger(__name__)


class Heartbeat:
    """Keeps one worker registered, and tells what it serves, counts and has in hand."""

    def __init__(
        self, record: WorkerRecord, registry: WorkerRegistry, hand: Hand, interval_s: float
    ) -> None:
        self._record = record
        self._registry = registry
        self._hand = hand
        self._interval_s = interval_s
        self._proofs: Proofs | None = None
        self._gpus = GpuWatch(record.host)
        self._draining = threading.Event()
        self._hung = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    @property
    def is_draining(self) -> bool:
        return self._draining.is_set()

    def start(self) -> None:
        self.beat()
        self._thread.start()

    def ready(self, proofs: Proofs, chat_port: int | None) -> None:
        """From now on clients may use this worker."""
        self._proofs = proofs
        paths = tuple(proofs.engine.chat_paths)
        self._record = dataclasses.replace(
            self._record, state="ready", port=chat_port, chat_paths=paths
        )
        self.beat()

    def drain(self) -> None:
        """Nobody sends this worker anything new from the next heartbeat on. For signal
        handlers; does not wait.
        """
        self._draining.set()

    def hung(self) -> None:
        """The engine hangs: from now on nobody counts on this worker, which is about to end."""
        self._hung.set()
        self.beat()

    def stop(self) -> None:
        """Leaves the registry at once, so that nobody waits for this worker."""
        self._stop.set()
        self._thread.join(timeout=self._interval_s)
        try:
            self._registry.remove(self._record.id)
        except RedisError as error:
            logger.warning(
                "could not leave the registry (%s); this worker's entry expires by itself", error
            )

    def beat(self) -> None:
        """Says at once what it would say with the next heartbeat."""
        try:
            if self._proofs is not None:
                info, stats = self._proofs.engine.info, self._proofs.chat_stats()
                self._record = dataclasses.replace(self._record, info=info, stats=stats)
            self._record = dataclasses.replace(self._record, gpus=self._gpus.now().model_dump())
            if self._draining.is_set():
                self._record = dataclasses.replace(self._record, state="draining")
            if self._hung.is_set():
                self._record = dataclasses.replace(self._record, state="hung")
            self._registry.heartbeat(self._record, self._hand.told())
        except RedisError as error:
            logger.warning("no heartbeat: %s", error)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.beat()
            except Exception:
                logger.exception("no heartbeat")  # the next one may do
