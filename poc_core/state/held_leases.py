"""Which leases of batches a worker has in hand, as its heartbeats tell.

A Redis killed while its disk is slow forgets that a batch was completed or given back: the lease is
there again, of a worker that lives and does not compute it. Only the worker's word tells it from
one that is computed.
"""

import threading
from collections.abc import Callable


class HeldLeases:
    """The leases that a worker's tasks have in hand, numbered. For many threads.

    The numbers follow the order of taking, so the highest one taken and those in hand tell of all:
    any other below is forgotten whatever Redis says, and later ones are not spoken of.
    """

    def __init__(self, name_lease: Callable[[int], str]) -> None:
        """`name_lease(number)`: see JobStore.name_lease."""
        self._name_lease = name_lease
        self._lock = threading.Lock()
        self._n_taken = 0
        self._held: dict[str, int] = {}  # number by lease, in their order

    def take(self) -> str:
        """Names a lease, before Redis grants it: no lease may be held that nobody tells of."""
        with self._lock:
            self._n_taken += 1
            lease = self._name_lease(self._n_taken)
            self._held[lease] = self._n_taken
            return lease

    def drop(self, lease: str) -> None:
        """Forgets a lease that was completed, given back or never granted."""
        with self._lock:
            del self._held[lease]

    def summary(self) -> str:
        """For a heartbeat: how many leases were taken so far, a colon, and the numbers in hand."""
        with self._lock:
            return f"{self._n_taken}:{' '.join(map(str, self._held.values()))}"
