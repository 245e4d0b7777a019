"""A fair queue of clients' work, and a limit on the work that an event loop starts at a time.

In start-time fair queueing, an item's start tag is the end tag of its client's previous item, or
the virtual time (the start tag of the item started last) if that is later. The item with the lowest
start tag is next, so a client with little work never waits behind a client with much work.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

# If there are more clients, those whose end tag has passed are removed.
_REMEMBERED = 1000


class Tags:
    """Start and end tags of all clients (start-time fair queueing). Costs may have any unit."""

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
    """A fair queue of clients' work that waits in one event loop."""

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


# Cost admitted in one iteration of the loop. The unit is one logprob, which takes 5 to 10
# microseconds to make an object and its JSON.
BUDGET = 128


class Turns:
    """A limit on the work that starts in one iteration of an event loop. Other work waits."""

    def __init__(self, budget: int = BUDGET, per_s: float = 0.0) -> None:
        """`budget`: total cost of the work that may start in one iteration. `per_s`: after an
        iteration of t seconds, the next budget is `per_s` * t if that is more than `budget`.
        """
        self._per_s, self._counted_at = per_s, 0.0
        self._least = self._budget = self._left = budget
        self._waiting = Waiting()
        self._is_counting = False

    def keep_up_with(self, cost: int) -> None:
        """Sets the budget of the next iterations to `cost` or the constructor's budget, whichever
        is larger. Waiting work thus gets a fair share of the loop. `cost`: the cost of other work
        that has just run.
        """
        self._budget = max(self._least, cost)

    async def wait(self, client: str, cost: int) -> None:
        """Waits until the client's work may start. The client with the lowest start tag is next."""
        if not self._waiting and self._has_room(cost):
            self._waiting.spend(client, cost)
            self._take(cost)
            return
        turn = self._waiting.turn(client, cost)
        self._count()
        await turn

    def _has_room(self, cost: int) -> bool:
        return cost <= self._left or self._left == self._budget

    def _take(self, cost: int) -> None:
        self._left -= cost
        self._count()

    def _count(self) -> None:
        if not self._is_counting:
            self._is_counting, self._counted_at = True, time.monotonic()
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_counting = False
        if self._per_s:
            self.keep_up_with(int((time.monotonic() - self._counted_at) * self._per_s))
        self._left = self._budget
        self._waiting.let_in(self._has_room, self._take)
        if self._waiting:
            self._count()
