"""Handles suspects: requests during which an engine died. A suspect is sent to a second worker.

If the second worker's engine dies too, all API processes refuse equal requests for ten minutes
(WorkerRegistry.died_with).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b

from pydantic_core import from_json

# A request that had run for longer than this many seconds when the engine died is no suspect: a
# deadly request ends an engine earlier. A deliberate stop interrupts no younger request.
RECENT_S = 2.0
# Seconds that a suspect runs alone: a deadly request ends an engine within a step or two.
TRIAL_S = 0.5
# Fields that do not change an engine's work, or that clients change from request to request.
_IGNORED = (
    "user", "seed", "request_id", "session_id", "metadata", "stream", "stream_options",
    "cache_salt", "prompt_cache_key", "safety_identifier", "store",
)  # fmt: skip


class LostError(Exception):
    """A request got no answer from a worker, because the worker or its engine is lost."""

    def __init__(self, why: str, in_engine: bool) -> None:
        """`in_engine`: whether the engine can have received the request."""
        super().__init__(why)
        self.in_engine = in_engine


def fingerprint(path: bytes, body: bytes) -> str:
    """Returns a hash that is equal for requests that cause the same computation."""
    try:
        asked = from_json(body)
        told = {name: one for name, one in asked.items() if name not in _IGNORED}
        body = json.dumps(told, sort_keys=True).encode()
    except (ValueError, AttributeError, TypeError):  # a form, not JSON
        pass
    return blake2b(path.partition(b"?")[0] + b"\n" + body, digest_size=16).hexdigest()


class Engine:
    """Lets an engine start suspects one at a time, to find the request that kills the engine.

    A suspect is a request during which another engine has died.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._suspect: object = None  # request that is starting
        self._culprit: object = None  # request that ended the engine

    @asynccontextmanager
    async def trial(self, request: object) -> AsyncIterator[None]:
        """Waits until no other suspect is starting. The caller sends its suspect in the context.

        The next suspect can start after TRIAL_S seconds, or at the end of the context. LostError if
        another suspect has killed the engine.
        """
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
        """Returns True if another suspect killed the engine, or is starting and may kill it."""
        known = self._culprit or self._suspect
        return known is not None and known is not request

    def _next(self, request: object) -> None:
        """Lets the next suspect start. Does nothing if `request` is not the one starting now."""
        if self._suspect is request:
            self._suspect = None
            self._turn.release()
