"""The workers that chat may be sent to, remembered for a moment instead of read from Redis for
each request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from anyio import to_thread

from poc_core.records import WorkerRecord
from poc_core.state import WorkerRegistry


class ChatWorkers:
    """For the event loop alone: nothing here is locked."""

    def __init__(
        self, registry: WorkerRegistry, cache_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`cache_s`: seconds that a record may be old."""
        self._registry = registry
        self._cache_s = cache_s
        self._clock = clock
        self._workers: list[WorkerRecord] = []
        self._read_at = -math.inf  # when the reading of _workers began
        self._reading: asyncio.Task[None] | None = None
        self._lost: dict[str, float] = {}  # worker id -> when it was last found not to answer

    async def remembered(self) -> list[WorkerRecord]:
        """Those that were ready at most cache_s ago, without those lost since. RedisError as
        any reader gets it.
        """
        return await self._not_older_than(self._clock() - self._cache_s)

    async def now(self) -> list[WorkerRecord]:
        """Those that Redis says are ready now: before a client is told that nobody serves its
        model.
        """
        return await self._not_older_than(self._clock())

    def lost(self, worker_id: str) -> None:
        """A worker did not answer: it is not asked again before Redis has been asked about it."""
        self._lost[worker_id] = self._clock()

    async def _not_older_than(self, oldest: float) -> list[WorkerRecord]:
        while self._read_at < oldest:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read())
            # Requests that come together share one reading, its error too, and none of them may
            # cancel it.
            await asyncio.shield(self._reading)
        return [worker for worker in self._workers if worker.id not in self._lost]

    async def _read(self) -> None:
        began_at = self._clock()
        ready = await to_thread.run_sync(self._registry.ready)
        self._workers = [worker for worker in ready if worker.port is not None]
        self._read_at = began_at
        # Redis was asked about those lost before, and has heard of those lost meanwhile only later.
        self._lost = {worker_id: at for worker_id, at in self._lost.items() if at >= began_at}
