"""The workers available for chat, cached for a short time so that Redis is read less often."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from anyio import to_thread
from redis import exceptions
from redis.exceptions import RedisError

from poc_core.records import WorkerRecord
from poc_core.state.registry import WorkerRegistry

# Seconds that a request waits for Redis, and for which chat continues without Redis.
_PATIENCE_S = 0.5
_WITHOUT_REDIS_S = 60.0


class ChatWorkers:
    """A cached list of the workers that are ready for chat. Runs on the event loop only."""

    def __init__(
        self,
        registry: WorkerRegistry,
        cache_s: float,
        clock: Callable[[], float] = time.monotonic,
        keeping: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`keeping`: returns ids of hosts whose model was stopped. Their workers get no chat."""
        self._registry = registry
        self._keeping = keeping
        self._cache_s = cache_s
        self._clock = clock
        self._workers: list[WorkerRecord] = []
        self._read_at = -math.inf  # when the read of _workers from Redis began
        self._reading: asyncio.Task[None] | None = None
        self.deadly: frozenset[str] = frozenset()  # fingerprints of requests that are refused
        self._lost: dict[str, float] = {}  # worker id -> when a request to it last failed

    async def remembered(self) -> list[WorkerRecord]:
        """Returns the ready workers, as read from Redis at most `cache_s` seconds ago.

        Excludes workers that failed a request since that read (`lost`). While Redis is unavailable,
        returns the last known workers for a minute, then raises RedisError.
        """
        oldest = self._clock() - self._cache_s
        if self._read_at >= oldest:
            return self._left()
        try:
            # Not wait_for, which in Python 3.11 loses a cancellation as the reading ends. Then
            # the answer to a client that has disconnected is computed to its end.
            async with asyncio.timeout(_PATIENCE_S if self._workers else None):
                return await self._not_older_than(oldest)
        except (TimeoutError, RedisError) as error:
            if self._workers and self._clock() - self._read_at <= _WITHOUT_REDIS_S:
                return self._left()
            if isinstance(error, TimeoutError):  # Python's
                raise exceptions.TimeoutError(f"no answer within {_PATIENCE_S:g} s") from None
            raise

    async def is_ready(self, worker_id: str) -> bool:
        """Returns True if the worker was ready when Redis was last read; False without Redis."""
        try:
            await self.remembered()
        except RedisError:
            return False
        return any(worker.id == worker_id for worker in self._workers)

    async def now(self) -> list[WorkerRecord]:
        """Returns the ready workers, read from Redis now instead of from the cache."""
        return await self._not_older_than(self._clock())

    def lost(self, worker_id: str) -> None:
        """Excludes a worker from chat after a failed request, until the next read of Redis."""
        self._lost[worker_id] = self._clock()

    async def died_with(self, worker_id: str, request: str, what: str) -> int:
        """Records that a worker's engine died during a request. Returns how many engines died
        during requests with the same fingerprint, which is `request`; 0 if Redis is unavailable.
        """
        try:
            n = await to_thread.run_sync(self._registry.died_with, worker_id, request, what)
        except RedisError:
            return 0
        if n > 1:
            self.deadly |= {request}
        return n

    async def outlived(self, request: str) -> None:
        """Records that an engine survived a request. `request`: the request's fingerprint."""
        with suppress(RedisError):
            await to_thread.run_sync(self._registry.outlived, request)

    async def _not_older_than(self, oldest: float) -> list[WorkerRecord]:
        while self._read_at < oldest:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read())
                self._reading.add_done_callback(_retrieve_error)
            # Shielded, because requests share this task and its error: if one request is cancelled,
            # the task must continue.
            await asyncio.shield(self._reading)
        return self._left()

    def _left(self) -> list[WorkerRecord]:
        return [worker for worker in self._workers if worker.id not in self._lost]

    async def _read(self) -> None:
        began_at = self._clock()

        def read() -> tuple[list[WorkerRecord], frozenset[str], Collection[str]]:
            return self._registry.ready(), self._registry.deadly(), self._keeping()

        ready, self.deadly, stopped = await to_thread.run_sync(read)
        self._workers = [
            worker for worker in ready if worker.port is not None and worker.host_id not in stopped
        ]
        self._read_at = began_at
        # Keep only the workers lost since this read began: Redis may not have known about them.
        self._lost = {worker_id: at for worker_id, at in self._lost.items() if at >= began_at}


def _retrieve_error(reading: asyncio.Task[None]) -> None:
    """Retrieves a task's exception, because asyncio logs exceptions that are never retrieved."""
    if not reading.cancelled():
        reading.exception()
