"""The event loop in turns: between two pieces of work that take long others have it."""

from __future__ import annotations

import asyncio
import time

from poc_core.fair.waiting import Waiting

# Cost of what is let go on in one round of the loop. A number of logprobs costs some 5 to 10
# microseconds: made into an object, then into JSON.
BUDGET = 128


class Turns:
    """For one event loop. While nobody else waits, and little was let go on, nobody waits."""

    def __init__(self, budget: int = BUDGET, per_s: float = 0.0) -> None:
        """`per_s`: cost that is let go on for each second that the loop's last round took, where
        that is more: else what waits would get ever less of a loop that has much else to do.
        """
        self._per_s, self._counted_at = per_s, 0.0
        self._least = self._budget = self._left = budget
        self._waiting = Waiting()
        self._is_counting = False

    def keep_up_with(self, cost: int) -> None:
        """Other work has just taken the loop for so much: rounds may take as much from now on, or
        what waits for turns would get ever less of a loop that is behind.
        """
        self._budget = max(self._least, cost)

    async def wait(self, client: str, cost: int) -> None:
        """Returns when work of this cost may go on, at once; of several clients' first the one that
        has had least.
        """
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
