"""Requests that were in an engine when it died: each goes to one more worker. If that dies too, the
request is refused by all APIs for ten minutes (WorkerRegistry.died_with).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import TypeVar

from pydantic_core import from_json

from poc_core.records import WorkerRecord

# Seconds for which a request was in an engine at most to be a suspect of its end: of many that were
# there for long none shall wait for the others' trials.
RECENT_S = 2.0
# Seconds for which a suspect begins alone: what ends an engine does so within a step or two.
TRIAL_S = 0.5
# Seconds for which an engine's end is a suspect's alone: by then all its requests are answered.
FORGOTTEN_S = 2.0
# Fields that change nothing of what an engine computes, or may be changed at will.
_IGNORED = (
    "user", "seed", "request_id", "session_id", "metadata", "stream", "stream_options",
    "cache_salt", "prompt_cache_key", "safety_identifier", "store",
)  # fmt: skip

T = TypeVar("T")


class LostError(Exception):
    """A worker gave no answer."""

    def __init__(self, why: str, in_engine: bool) -> None:
        """`in_engine`: the request may have been in its engine."""
        super().__init__(why)
        self.in_engine = in_engine


def fingerprint(path: bytes, body: bytes) -> str:
    """What two requests have in common that ask an engine for the same."""
    try:
        asked = from_json(body)
        told = {name: one for name, one in asked.items() if name not in _IGNORED}
        body = json.dumps(told, sort_keys=True).encode()
    except (ValueError, AttributeError, TypeError):  # a form
        pass
    return blake2b(path.partition(b"?")[0] + b"\n" + body, digest_size=16).hexdigest()


class Trials:
    """Suspects begin one at a time in each engine, so that it is known which one ends it, and the
    others are not blamed; for the event loop alone. Requests are told apart by identity."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int | None], _Trial] = {}  # by worker and port

    async def begin(
        self, worker: WorkerRecord, request: object, ask: Callable[[], Awaitable[T]]
    ) -> T:
        """What `ask` returns. LostError: from it, or another suspect has ended the engine."""
        trial = self._of.setdefault((worker.id, worker.port), _Trial())
        await trial.lock.acquire()
        if trial.has_ended:
            trial.lock.release()
            raise LostError("another request has ended its engine", in_engine=False)
        trial.suspect = request
        timer = asyncio.get_running_loop().call_later(TRIAL_S, trial.next, request)
        try:
            return await ask()
        except LostError as error:
            if error.in_engine and trial.suspect is request:
                trial.ended_at, trial.culprit = time.monotonic(), id(request)
            raise
        finally:
            timer.cancel()
            trial.next(request)

    def blames(self, worker: WorkerRecord, request: object) -> bool:
        """Whether the request may have ended the engine: no other one is known to have."""
        trial = self._of.get((worker.id, worker.port))
        if trial is None or trial.suspect is request:
            return True
        return trial.culprit == id(request) if trial.has_ended else trial.suspect is None


class _Trial:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.suspect: object = None  # that begins
        self.ended_at = -math.inf  # when a suspect ended the engine
        self.culprit = 0  # which one, as id() has it

    @property
    def has_ended(self) -> bool:
        return time.monotonic() - self.ended_at < FORGOTTEN_S

    def next(self, request: object) -> None:
        """The request has begun, or ended the engine. Repeatable."""
        if self.lock.locked() and self.suspect is request:
            self.suspect = None
            self.lock.release()
