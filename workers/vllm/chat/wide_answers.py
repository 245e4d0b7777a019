"""Limits how many answers with many logprobs per token, which are slow, run alongside others."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from poc_core.fair_queue import Waiting

# Largest number of logprobs of a token in an ordinary answer: the network asks for five.
USUAL = 5
# Wide answers at a time, and seconds without other answers until this limit ends.
MOST, CALM_S = 8, 5.0


class WideAnswers:
    """Limits how many answers with many logprobs run alongside others. For one event loop."""

    def __init__(self, others_go_on: Callable[[], bool]) -> None:
        """`others_go_on()` returns True if an answer without many logprobs is in progress."""
        self._others_go_on = others_go_on
        self._others_at = -CALM_S
        self._n = 0  # in progress
        self._waiting = Waiting()
        self._looks_again = False

    def another_began(self) -> None:
        """Records that an answer without many logprobs began."""
        self._others_at = time.monotonic()

    @asynccontextmanager
    async def under_way(self, client: str, n: int) -> AsyncIterator[None]:
        """Waits until the limit allows `n` answers of a client, which run inside the context."""
        if self._waiting or not self._has_place(n):
            turn = self._waiting.turn(client, n)
            self._let_in()
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
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
        """Schedules another check, because no event reports that ordinary answers have ended."""

        def look() -> None:
            self._looks_again = False
            self._let_in()

        if not self._looks_again:
            self._looks_again = True
            asyncio.get_running_loop().call_later(CALM_S / 5, look)
