"""Orders waiting clients: next is the client that has had least.

Start-time fair queueing: what a client takes begins where its last ended, or now, if that is later;
what begins first is next. So who takes little never waits behind who takes much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

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


class Waiting:
    """For one event loop."""

    def __init__(self) -> None:
        self._tags = Tags()
        self._turns: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}

    def __bool__(self) -> bool:
        """True if anybody waits, or did and was cancelled."""
        return bool(self._turns)

    def spend(self, client: str, cost: int) -> None:
        """The client takes so much without waiting."""
        self._tags.spend(client, cost)

    def turn(self, client: str, cost: int) -> asyncio.Future[None]:
        """Ends when the client may take so much; cancelled, it is passed over."""
        turn = asyncio.get_running_loop().create_future()
        self._turns.setdefault(client, deque()).append((turn, cost))
        return turn

    def let_in(self, has_room: Callable[[int], bool], take: Callable[[int], None]) -> None:
        """Ends turns, one after the other, while there is room for the next one's cost."""
        while self._turns:
            client = min(self._turns, key=self._tags.of)
            turns = self._turns[client]
            turn, cost = turns[0]
            if not turn.done():
                if not has_room(cost):
                    return
                turn.set_result(None)
                self._tags.spend(client, cost)
                take(cost)
            turns.popleft()
            if not turns:
                del self._turns[client]
