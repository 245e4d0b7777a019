"""Requests that were in an engine when it died: each goes to one more worker. If that dies too, the
request is refused by all APIs for ten minutes (WorkerRegistry.died_with).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b

from pydantic_core import from_json

# Seconds that a request was in an engine, or a stream under way, at most to be a suspect of its
# end: what runs longer did no harm, and an ordered stop cuts off nothing younger.
RECENT_S = 2.0
# Seconds for which a suspect begins alone: what ends an engine does so within a step or two.
TRIAL_S = 0.5
# Fields that change nothing of what an engine computes, or may be changed at will.
_IGNORED = (
    "user", "seed", "request_id", "session_id", "metadata", "stream", "stream_options",
    "cache_salt", "prompt_cache_key", "safety_identifier", "store",
)  # fmt: skip


class LostError(Exception):
    """A worker gave no answer."""

    def __init__(self, why: str, in_engine: bool) -> None:
        """`in_engine`: the request may have been in its engine."""
        super().__init__(why)
        self.in_engine = in_engine


def fingerprint(path: bytes, body: bytes) -> str:
    """Returns a value that is equal for two requests with the same work for an engine."""
    try:
        asked = from_json(body)
        told = {name: one for name, one in asked.items() if name not in _IGNORED}
        body = json.dumps(told, sort_keys=True).encode()
    except (ValueError, AttributeError, TypeError):  # a form
        pass
    return blake2b(path.partition(b"?")[0] + b"\n" + body, digest_size=16).hexdigest()


class Engine:
    """Suspects begin one at a time in an engine: if it ends meanwhile, that one has ended it, and
    the others are not blamed. For the event loop alone; requests are told apart by identity."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._suspect: object = None  # that begins
        self._culprit: object = None  # that ended the engine

    @asynccontextmanager
    async def trial(self, request: object) -> AsyncIterator[None]:
        """Within, the request begins. LostError: another suspect has ended the engine."""
        await self._turn.acquire()
        self._suspect = request
        timer = asyncio.get_running_loop().call_later(TRIAL_S, self._next, request)
        try:
            if self._culprit is not None:
                raise LostError("another request has ended its engine", in_engine=False)
            yield
        except LostError as error:
            if error.in_engine and self._suspect is request:
                self._culprit = request
            raise
        finally:
            timer.cancel()
            self._next(request)

    def was_ended_by_another(self, request: object) -> bool:
        """True if another request is known to have ended the engine, or to have just begun."""
        known = self._culprit or self._suspect
        return known is not None and known is not request

    def _next(self, request: object) -> None:
        """The request has begun, or ended the engine. Repeatable."""
        if self._suspect is request:
            self._suspect = None
            self._turn.release()
