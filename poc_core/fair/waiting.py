"""A queue of waiting clients: the client with the least work so far is next.

The queue uses start-time fair queueing. The start tag of a client's item is the end tag of the
client's previous item, or the virtual time (the start tag of the item started last) if that is
later. The item with the lowest start tag is next. Therefore a client with little work never waits
behind a client with much work.
"""

import asyncio
from collections import deque
from collections.abc import Callable

# If there are more clients, those whose end tag has passed are removed.
_REMEMBERED = 1000


class Tags:
    """The tags of all clients in start-time fair queueing. Costs may have any unit."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def of(self, client: str) -> float:
        """Returns the start tag of the client's next item."""
        return max(self._now, self._ends.get(client, 0.0))

    def spend(self, client: str, cost: float) -> None:
        """Records that the client's next item has started and has this cost."""
        begin = self.of(client)
        self._now = begin
        self._ends[client] = begin + cost
        if len(self._ends) > _REMEMBERED:
            self._ends = {one: end for one, end in self._ends.items() if end > self._now}


class Waiting:
    """The queue of the waiting clients of one event loop."""

    def __init__(self) -> None:
        self._tags = Tags()
        self._turns: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}

    def __bool__(self) -> bool:
        """True if work waits. Work whose future was cancelled counts until `let_in` removes it."""
        return bool(self._turns)

    def spend(self, client: str, cost: int) -> None:
        """Records the cost of a client's work that started without waiting."""
        self._tags.spend(client, cost)

    def turn(self, client: str, cost: int) -> asyncio.Future[None]:
        """Queues a client's work. Returns a future, which completes when the work may start."""
        turn = asyncio.get_running_loop().create_future()
        self._turns.setdefault(client, deque()).append((turn, cost))
        return turn

    def let_in(self, has_room: Callable[[int], bool], take: Callable[[int], None]) -> None:
        """Completes the futures of waiting work in the order of the queue, until `has_room` returns
        False for a cost. Calls `take` with the cost of each work that starts.
        """
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
