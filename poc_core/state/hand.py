"""Which leases of batches a worker has in hand, as its heartbeats tell.

A Redis that is killed while its disk is slow forgets what it has answered: that a batch was
completed or given back, say. Its lease is there again, of a worker that lives and does not compute
it any more. What tells such a lease from one that is computed is the worker's word.
"""

import threading
from collections.abc import Callable


class Hand:
    """The leases that a worker's tasks have in hand, numbered. For many threads.

    They are numbered in the order in which they are taken, so a few numbers tell of all: what was
    taken and is not in hand any more is forgotten, whatever Redis says; what comes later is not
    spoken of.
    """

    def __init__(self, name_lease: Callable[[int], str]) -> None:
        """`name_lease(number)`: as JobStore.name_lease."""
        self._name_lease = name_lease
        self._lock = threading.Lock()
        self._n_taken = 0
        self._held: dict[str, int] = {}  # number by lease, in their order

    def take(self) -> str:
        """Names a lease. To be called before Redis is asked to grant it: it must never hold
        what nobody tells of.
        """
        with self._lock:
            self._n_taken += 1
            lease = self._name_lease(self._n_taken)
            self._held[lease] = self._n_taken
            return lease

    def drop(self, lease: str) -> None:
        """Its batches are completed or given back, or were never granted."""
        with self._lock:
            del self._held[lease]

    def told(self) -> str:
        """For a heartbeat: how many were taken so far, a colon, and the numbers of those in
        hand.
        """
        with self._lock:
            return f"{self._n_taken}:{' '.join(map(str, self._held.values()))}"
