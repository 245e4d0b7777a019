"""Which client is next, where all share something that one has at a time.

Start-time fair queueing: what a client takes begins where its last ended, or now, if that is later;
what begins first is next. So who takes little never waits behind who takes much.
"""

from __future__ import annotations

# Clients that are remembered before those are forgotten that would begin now.
_REMEMBERED = 1000


class Tags:
    """Start-time fair queueing for any cost: seconds, numbers."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def of(self, client: str) -> float:
        """Returns the start tag of this client's next item; the lowest is next."""
        return max(self._now, self._ends.get(client, 0.0))

    def spend(self, client: str, cost: float) -> None:
        """The client, whose turn it was, has taken so much."""
        begin = self.of(client)
        self._now = begin
        self._ends[client] = begin + cost
        if len(self._ends) > _REMEMBERED:
            self._ends = {one: end for one, end in self._ends.items() if end > self._now}
