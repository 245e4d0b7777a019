"""Writes refused requests and used keys to the event log.

The first refusal of a kind is written at once. Later refusals become one event per minute.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from poc_core.state.events import Events

# Seconds for which refusals of one kind, and uses of one key, are combined into one event.
REFUSALS_S = 60.0
KEYS_S = 3600.0
# Most kinds that are counted at the same time; further kinds are not counted.
_MOST_KINDS = 30
_MOST_PATH_CHARS = 80
# Statuses and paths that are not reported: missing resources, and probes of a starting node.
_NO_REFUSALS = {404, 405, 409, 499}
_PROBES = {"/livez", "/readyz", "/ready", "/health", "/healthz"}
# Scope key of the name of the request's key.
CALLER = "proofline.caller"


@dataclass
class _Count:
    """The count of one kind of event, its last client, and when to write the next report."""

    n: int
    client: str
    next_at: float


class Refusals:
    """Counts refused requests and used keys until they are reported. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._refused: dict[str, _Count] = {}  # by request and answer
        self._keys: dict[str, _Count] = {}  # by the key's name

    def refused(self, status: int, method: str, path: str, client: str) -> None:
        if status >= 400 and status not in _NO_REFUSALS and path not in _PROBES:
            short = path if len(path) <= _MOST_PATH_CHARS else f"{path[:_MOST_PATH_CHARS]}…"
            self._count(self._refused, f"{method} {short} is answered {status}", client)

    def used(self, key: str, client: str) -> None:
        self._count(self._keys, key, client)

    def report(self, events: Events) -> None:
        """Writes the due events to the event log. A RedisError loses the events not yet written."""
        for what, told in self._due(self._refused, REFUSALS_S):
            times = f", {told.n} times" if told.n > 1 else ""
            events.note("refused", f"{what}{times}; the last client is {told.client}.")
        for key, told in self._due(self._keys, KEYS_S):
            events.note("key", f"The key {key} is used, from {told.client}.", key)

    def _count(self, kinds: dict[str, _Count], what: str, client: str) -> None:
        with self._lock:
            if what not in kinds and len(kinds) >= _MOST_KINDS:
                return
            told = kinds.setdefault(what, _Count(0, client, self._clock()))
            told.n += 1
            told.client = client

    def _due(self, kinds: dict[str, _Count], pause_s: float) -> list[tuple[str, _Count]]:
        now = self._clock()
        with self._lock:
            found = [(what, told) for what, told in kinds.items() if told.next_at <= now]
            for what, told in found:
                if told.n:
                    kinds[what] = _Count(0, "", now + pause_s)
                else:
                    del kinds[what]
        return [(what, told) for what, told in found if told.n]


class Watch:
    """Middleware around all refusing middleware. Records refused requests and used keys."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusals: Refusals = scope["app"].state.services.refusals
        client = (scope.get("client") or ("a socket",))[0]

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                refusals.refused(message["status"], scope["method"], scope["path"], client)
            await send(message)

        await self._app(scope, receive, noted)
        if CALLER in scope:
            refusals.used(scope[CALLER], client)
