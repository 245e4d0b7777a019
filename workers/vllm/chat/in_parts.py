"""Delivers streamed answers in parts, and formats logprobs of complete answers in turns. vLLM's
server would do both without a pause, and block the event loop.
"""

import asyncio
import functools
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any


class Parts:
    """A queue of an answer's outputs. vLLM's own queue would join waiting outputs into one."""

    def __init__(self, ready: asyncio.Event, n_tokens: int) -> None:
        """`ready`: the event of vLLM's queue. `n_tokens`: maximum number of tokens in a part."""
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


# Methods of a handler that create a complete answer from the engine's outputs.
_WHOLE = ("chat_completion_full_generator", "chat_completion_full_generator_batch")
# The logprobs that are still to be formatted for the answer that this task creates: each list to
# fill, with the token ids, logprobs and other arguments of `_create_chat_logprobs`.
_Left = list[tuple[list[Any], Any, Any, dict[str, Any]]]
_LEFT: ContextVar[_Left | None] = ContextVar("left", default=None)


class WholeAnswers:
    """A wrapper of vLLM's chat handler that formats the logprobs of complete answers in turns."""

    def __init__(self, handler: Any, wait: Callable[[int], Awaitable[int]]) -> None:
        """`wait(width)` waits for a turn. It returns how many positions to format then, if a
        position has `width` numbers.
        """
        self._wait = wait
        self._handler = handler
        self._create = handler._create_chat_logprobs

    def install(self) -> None:
        handler = self._handler
        handler._create_chat_logprobs = self.create
        for name in _WHOLE:
            if hasattr(handler, name):
                setattr(handler, name, self._filled(getattr(handler, name)))

    def create(self, token_ids: Any, top_logprobs: Any, **named: Any) -> Any:
        left = _LEFT.get()
        if left is None:  # a streamed answer
            return self._create(token_ids, top_logprobs, **named)
        found = self._create([], [], **named)
        left.append((found.content, token_ids, top_logprobs, named))
        return found

    def _filled(self, make: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(make)
        async def filled(*args: Any, **named: Any) -> Any:
            left: _Left = []
            before = _LEFT.set(left)
            try:
                answer = await make(*args, **named)
            finally:
                _LEFT.reset(before)
            for content, token_ids, logprobs, options in left:
                width = 2 + max(0, options.get("num_output_top_logprobs") or 0)
                at = 0
                while at < len(token_ids):
                    end = at + await self._wait(width)
                    part = self._create(token_ids[at:end], logprobs[at:end], **options)
                    content += part.content
                    at = end
            return answer

        return filled
