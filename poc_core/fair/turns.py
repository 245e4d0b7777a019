"""Limits the work that starts in one iteration of an event loop, which must stay responsive."""

import asyncio
import time

from poc_core.fair.waiting import Waiting

# Cost admitted in one iteration of the loop. The unit is one logprob, which takes 5 to 10
# microseconds to make an object and its JSON.
BUDGET = 128


class Turns:
    """Limits the work that starts in one iteration of an event loop. Other work waits."""

    def __init__(self, budget: int = BUDGET, per_s: float = 0.0) -> None:
        """`budget`: total cost of the work that may start in one iteration. `per_s`: after an
        iteration of t seconds, the next budget is `per_s` * t if that is more than `budget`.
        """
        self._per_s, self._counted_at = per_s, 0.0
        self._least = self._budget = self._left = budget
        self._waiting = Waiting()
        self._is_counting = False

    def keep_up_with(self, cost: int) -> None:
        """Sets the budget of the next iterations to `cost`, the cost of other work that has just
        run, or to the constructor's budget if that is more. Waiting work thus gets a fair share of
        a busy loop.
        """
        self._budget = max(self._least, cost)

    async def wait(self, client: str, cost: int) -> None:
        """Waits until the client's work may start. The client with the least cost comes first."""
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
