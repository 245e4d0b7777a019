"""Formats the logprobs of complete answers in turns, like those of streams. vLLM's server formats
all numbers of an answer without a pause, and formatting takes longer than creating the objects.
"""

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

# Methods of a handler that create a complete answer from the engine's outputs.
_WHOLE = ("chat_completion_full_generator", "chat_completion_full_generator_batch")
# The logprobs that are still to be formatted for the answer that this task creates: each list to
# fill, with the token ids, logprobs and other arguments of `_create_chat_logprobs`.
_Left = list[tuple[list[Any], Any, Any, dict[str, Any]]]
_LEFT: ContextVar[_Left | None] = ContextVar("left", default=None)


class WholeAnswers:
    """A wrapper of vLLM's chat handler that formats the logprobs of complete answers in turns."""

    def __init__(self, handler: Any, wait: Callable[[int], Awaitable[int]]) -> None:
        """`wait(width)` waits for a turn. It returns how many positions to format then."""
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
        if left is None:  # a stream's
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
