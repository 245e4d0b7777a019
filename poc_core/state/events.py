"""The node's events: sentences for the operator about past changes. A Lua script that changes the
state also stores the event, in the same atomic step (`note_event` in lua/common.lua).
"""

from functools import partial
from typing import Literal, get_args

from pydantic import BaseModel

from poc_core.state import keys, scripts
from poc_core.state.parsing import readable

Kind = Literal["worker", "deployment", "round", "job", "receiver", "refused", "key", "node"]


class Event(BaseModel, frozen=True):
    at: float  # seconds since the epoch
    kind: Kind
    text: str
    about: str  # the id of a job or round, the name of a worker, model or receiver; or ""


class Events(scripts.BaseStore):
    """The store of the last 1,000 events, with a limit per kind (MOST_EVENTS in common.lua)."""

    _note = scripts.of_store("note_event")

    def note(self, kind: Kind, text: str, about: str = "") -> None:
        """Stores an event with the current time. `about`: an id or a name, see Event."""
        self._note([], [kind, text, about, self._clock()])

    def count(self) -> int:
        """Returns the number of all events so far, including events that are no longer stored."""
        return int(self._redis.get(keys.EVENTS) or 0)

    def read(self) -> list[Event]:
        """Returns all stored events, the newest first."""
        with self._redis.pipeline(transaction=False) as pipe:
            for kind in get_args(Kind):
                pipe.lrange(keys.events(kind), 0, -1)
            found = zip(get_args(Kind), pipe.execute(), strict=True)
        events = [
            event
            for kind, texts in found
            for text in texts
            if (event := readable("an event", partial(Event.model_validate_json, text)))
            and event.kind == kind  # a Redis user may write only some kinds (docker/users.acl)
        ]
        return sorted(events, key=lambda one: one.at, reverse=True)
