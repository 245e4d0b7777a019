"""The node's events: what an operator would want to know of later, each a sentence.

What one script changes it also notes (`note_event` in lua/common.lua), in the same atomic step;
supervisors and the API note what they alone see.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

from pydantic import BaseModel
from redis import Redis

from poc_core.state import keys, scripts
from poc_core.state.unreadable import readable

Kind = Literal["worker", "deployment", "round", "job", "receiver", "refused", "key", "node"]


class Event(BaseModel, frozen=True):
    at: float  # seconds since the epoch
    kind: Kind
    text: str
    about: str  # the id of a job or round, the name of a worker, model or receiver; or ""


class Events:
    """The last 1,000 events; of each kind so many that none displaces another."""

    def __init__(self, redis: Redis, clock: Callable[[], float] = time.time) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._clock = clock
        self._note = scripts.load(redis, "note_event")

    def note(self, kind: Kind, text: str, about: str = "") -> None:
        """Writes down what has just happened."""
        self._note([], [kind, text, about, self._clock()])

    def count(self) -> int:
        """How many were noted so far, also those that are gone: it grows with each."""
        return int(self._redis.get(keys.EVENTS) or 0)

    def read(self) -> list[Event]:
        """All that are kept, the newest first."""
        with self._redis.pipeline(transaction=False) as pipe:
            for kind in get_args(Kind):
                pipe.lrange(keys.events(kind), 0, -1)
            told = zip(get_args(Kind), pipe.execute(), strict=True)
        events = [
            event
            for kind, texts in told
            for text in texts
            if (event := readable("an event", partial(Event.model_validate_json, text)))
            and event.kind == kind  # not everybody may write each of them (docker/users.acl)
        ]
        return sorted(events, key=lambda one: one.at, reverse=True)
