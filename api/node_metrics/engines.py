"""Fetches the metrics of all engines concurrently, so that a silent engine delays no other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from api.node_metrics.engine_samples import EngineSamples, samples_of
from api.node_metrics.fetch import FetchError
from poc_core.records import WorkerRecord

# Seconds that a scrape waits for engines; the network's limit for a scrape is 5. A request to a
# late engine continues; later scrapes do not wait for this engine until it has answered.
DEADLINE_S = 2.5

Ask = Callable[[WorkerRecord], Awaitable[str]]
"""Returns a worker's metrics as text. FetchError if the worker does not return them."""


@dataclass(frozen=True)
class Reading:
    at: float  # seconds since the epoch
    samples: EngineSamples


class EngineReadings:
    """Fetches and remembers the last metrics of each engine. Runs on the event loop only."""

    def __init__(self, ask: Ask, clock: Callable[[], float] = time.time) -> None:
        self._ask = ask
        self._clock = clock
        self._last: dict[str, Reading] = {}  # by worker id, as _under_way and _late
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._late: set[str] = set()

    async def read(self, workers: Sequence[WorkerRecord]) -> dict[str, Reading]:
        """Fetches all workers' metrics. Returns the last metrics of each worker, by worker id.

        An engine that does not answer within DEADLINE_S keeps its earlier metrics, if any.
        """
        ids = {worker.id for worker in workers}
        self._forget(
            [worker_id for worker_id in (*self._last, *self._under_way) if worker_id not in ids]
        )
        for worker in workers:
            if worker.id not in self._under_way:
                task = asyncio.create_task(self._read(worker))
                self._under_way[worker.id] = task
        waited_for = [task for name, task in self._under_way.items() if name not in self._late]
        if waited_for:
            await asyncio.wait(waited_for, timeout=DEADLINE_S)
        self._late |= self._under_way.keys()
        return {worker_id: self._last[worker_id] for worker_id in ids if worker_id in self._last}

    def close(self) -> None:
        self._forget(list(self._under_way))

    def _forget(self, ids: Sequence[str]) -> None:
        for worker_id in ids:
            self._last.pop(worker_id, None)
            self._late.discard(worker_id)
            if (task := self._under_way.pop(worker_id, None)) is not None:
                task.cancel()

    async def _read(self, worker: WorkerRecord) -> None:
        try:
            text = await self._ask(worker)
            self._last[worker.id] = Reading(self._clock(), samples_of(text))
            self._late.discard(worker.id)
        except FetchError:
            self._late.add(worker.id)
        finally:
            if self._under_way.get(worker.id) is asyncio.current_task():
                del self._under_way[worker.id]
