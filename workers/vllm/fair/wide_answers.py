"""Answers with many logprobs a token, few at a time while others ask: each costs the engine's steps
and the event loop several times what an answer without them does, and all answers share these.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from poc_core.fair.waiting import Waiting

# Logprobs of a token up to which an answer is like others: the network asks for five.
USUAL = 5
# Answers at a time while others ask, and seconds without any after which more may begin.
MOST, CALM_S = 8, 5.0


class WideAnswers:
    """For one event loop. Alone, as many go on as are asked for."""

    def __init__(self, others_go_on: Callable[[], bool]) -> None:
        """`others_go_on`: whether an answer of another kind is under way."""
        self._others_go_on = others_go_on
        self._others_at = -CALM_S
        self._n = 0  # under way
        self._waiting = Waiting()
        self._looks_again = False

    def another_began(self) -> None:
        """An answer of another kind began."""
        self._others_at = time.monotonic()

    @asynccontextmanager
    async def under_way(self, client: str, n: int) -> AsyncIterator[None]:
        """Within, a request of the client for n answers is under way; it waits for its turn."""
        if self._waiting or not self._has_place(n):
            turn = self._waiting.turn(client, n)
            self._let_in()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    raise
                self._end(n)
                raise
        else:
            self._waiting.spend(client, n)
            self._begin(n)
        try:
            yield
        finally:
            self._end(n)

    def _has_place(self, n: int) -> bool:
        return self._n == 0 or self._n + n <= MOST or not self._others_ask()

    def _others_ask(self) -> bool:
        if self._others_go_on():
            self._others_at = time.monotonic()
        return time.monotonic() - self._others_at < CALM_S

    def _begin(self, n: int) -> None:
        self._n += n

    def _end(self, n: int) -> None:
        self._n -= n
        self._let_in()

    def _let_in(self) -> None:
        self._waiting.let_in(self._has_place, self._begin)
        if self._waiting:
            self._look_again()

    def _look_again(self) -> None:
        """Nothing tells that the others are gone."""

        def look() -> None:
            self._looks_again = False
            self._let_in()

        if not self._looks_again:
            self._looks_again = True
            asyncio.get_running_loop().call_later(CALM_S / 5, look)
