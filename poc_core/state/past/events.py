"""The node's events: sentences about what an operator may later want to know.

Scripts note their changes (`note_event` in lua/common.lua) in the same atomic step; supervisors and
the API note what only they see.
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
    """The last 1,000 events; limits per kind keep one from displacing another."""

    def __init__(self, redis: Redis, clock: Callable[[], float] = time.time) -> None:
        self._redis: Any = redis  # redis-py types its answers as possibly awaitable
        self._clock = clock
        self._note = scripts.load(redis, "note_event")

    def note(self, kind: Kind, text: str, about: str = "") -> None:
        """Stores an event of this moment."""
        self._note([], [kind, text, about, self._clock()])

    def count(self) -> int:
        """Counts all events so far, including deleted ones."""
        return int(self._redis.get(keys.EVENTS) or 0)

    def read(self) -> list[Event]:
        """Returns all, newest first."""
        with self._redis.pipeline(transaction=False) as pipe:
            for kind in get_args(Kind):
                pipe.lrange(keys.events(kind), 0, -1)
            told = zip(get_args(Kind), pipe.execute(), strict=True)
        events = [
            event
            for kind, texts in told
            for text in texts
            if (event := readable("an event", partial(Event.model_validate_json, text)))
            and event.kind == kind  # not every Redis user may write each (docker/users.acl)
        ]
        return sorted(events, key=lambda one: one.at, reverse=True)
