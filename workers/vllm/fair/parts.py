"""Delivers a streamed answer in parts, because formatting it all at once blocks the event loop."""

import asyncio
import math
from collections import deque
from typing import Any


class Parts:
    """An answer's waiting outputs. Replaces vLLM's queue, which joins them into a single output."""

    def __init__(self, ready: asyncio.Event, n_tokens: int) -> None:
        """`ready`: the event of vLLM's queue. `n_tokens`: the most tokens of a part."""
        self._ready = ready
        self._waiting: deque[Any] = deque()
        self._most = n_tokens

    def install(self, queue: Any) -> None:
        queue.put, queue.get, queue.get_nowait = self.put, self.get, self.get_nowait

    def put(self, output: Any) -> None:
        last = self._waiting[-1] if self._waiting else None
        n_tokens = _n_tokens(last) + _n_tokens(output)
        if last is not None and n_tokens <= self._most:
            last.add(output, aggregate=True)
        else:
            self._waiting.append(output)
        self._ready.set()

    async def get(self) -> Any:
        while not self._waiting:
            await self._ready.wait()
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._waiting:
            return None
        output = self._waiting.popleft()
        if not self._waiting:
            self._ready.clear()
        if isinstance(output, Exception):
            raise output
        return output


def _n_tokens(output: Any) -> float:
    """Returns an output's number of tokens; infinity for an error, or some releases' end marker."""
    outputs = getattr(output, "outputs", None)
    return sum(len(one.token_ids) for one in outputs) if outputs else math.inf
