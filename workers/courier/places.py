"""Limits how many outboxes are delivered at a time, so that none blocks the others."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from poc_core.state.outbox import Due

# Deliveries at a time. Hanging receivers of jobs cannot take the places of rounds.
ROUND_PLACES = 16
JOB_PLACES = 48
# The most places for one receiver, and the largest share of places for one host on all ports.
RECEIVER_PLACES = 4
HOST_SHARE = 0.5
# Payload bytes in memory, for rounds and for jobs each. A single payload may exceed this.
MOST_BYTES = 128 * 1024 * 1024


class Places:
    """A queue of outboxes. Starts each delivery when the limits (deliveries at a time, for each
    receiver and host, and bytes) allow it. For one event loop.
    """

    def __init__(
        self, deliver: Callable[[str], Coroutine[Any, Any, None]], largest_payload: int
    ) -> None:
        """`largest_payload`: most bytes of a round's payload. A job's payload can have any size."""
        self._deliver = deliver
        self._largest_payload = largest_payload
        self._waiting: dict[str, Due] = {}  # in the order of their arrival
        self._under_way: dict[str, Due] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = True

    def offer(self, due: Due) -> None:
        """Queues an outbox unless it is queued or being delivered. For the loop's thread."""
        if due.outbox_id not in self._under_way:
            self._waiting.setdefault(due.outbox_id, due)
            self._start()

    async def close(self, timeout_s: float) -> None:
        """Starts no more deliveries. Waits `timeout_s` for those in progress, then cancels them."""
        self._is_open = False
        tasks = list(self._tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self) -> None:
        if not self._is_open:
            return
        used: Counter[tuple[object, ...]] = Counter()
        for due in self._under_way.values():
            used.update({key: n for key, n, _ in self._needs(due)})
        for due in list(self._waiting.values()):
            needs = self._needs(due)
            if all(not used[key] or used[key] + n <= most for key, n, most in needs):
                used.update({key: n for key, n, _ in needs})
                self._under_way[due.outbox_id] = self._waiting.pop(due.outbox_id)
                task = asyncio.ensure_future(self._run(due))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _needs(self, due: Due) -> Sequence[tuple[tuple[object, ...], int, float]]:
        """Returns how much a delivery uses of each limit, as (key of the limit, amount, limit)."""
        kind, size = due.is_round, due.waiting_bytes
        places = ROUND_PLACES if kind else JOB_PLACES
        return (
            (("places", kind), 1, places),
            (("receiver", kind, due.receiver), 1, RECEIVER_PLACES),
            (("host", kind, due.receiver.rpartition(":")[0]), 1, HOST_SHARE * places),
            (("bytes", kind), min(size, self._largest_payload) if kind else size, MOST_BYTES),
        )

    async def _run(self, due: Due) -> None:
        try:
            await self._deliver(due.outbox_id)
        finally:
            del self._under_way[due.outbox_id]
            self._start()
