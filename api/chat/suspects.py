"""Requests during which an engine died. Each is sent to one more worker.

If that worker dies too, all API processes refuse the request for ten minutes
(WorkerRegistry.died_with).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b

from pydantic_core import from_json

# A request, or its stream, that ran longer than this when the engine ended is no suspect: it would
# have done harm earlier. An ordered stop cuts off no younger request.
RECENT_S = 2.0
# Seconds for which a suspect runs alone: a harmful request ends an engine within a step or two.
TRIAL_S = 0.5
# Fields that do not change an engine's work, or that a client may vary at will.
_IGNORED = (
    "user", "seed", "request_id", "session_id", "metadata", "stream", "stream_options",
    "cache_salt", "prompt_cache_key", "safety_identifier", "store",
)  # fmt: skip


class LostError(Exception):
    """A worker did not answer a request."""

    def __init__(self, why: str, in_engine: bool) -> None:
        """`in_engine`: the engine may have received the request."""
        super().__init__(why)
        self.in_engine = in_engine


def fingerprint(path: bytes, body: bytes) -> str:
    """Returns a hash that is equal for two requests with the same work for an engine."""
    try:
        asked = from_json(body)
        told = {name: one for name, one in asked.items() if name not in _IGNORED}
        body = json.dumps(told, sort_keys=True).encode()
    except (ValueError, AttributeError, TypeError):  # a form, not JSON
        pass
    return blake2b(path.partition(b"?")[0] + b"\n" + body, digest_size=16).hexdigest()


class Engine:
    """Runs suspected requests one at a time in an engine, so that only the deadly one is blamed.

    Runs on the event loop only. Requests are compared by identity.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._suspect: object = None  # request that is starting
        self._culprit: object = None  # request that ended the engine

    @asynccontextmanager
    async def trial(self, request: object) -> AsyncIterator[None]:
        """Runs the request while no other suspect starts. LostError if another ended the engine."""
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
        """Returns whether another request ended the engine, or starts and may have ended it."""
        known = self._culprit or self._suspect
        return known is not None and known is not request

    def _next(self, request: object) -> None:
        """Ends a request's trial, and lets the next suspect start. Idempotent."""
        if self._suspect is request:
            self._suspect = None
            self._turn.release()
