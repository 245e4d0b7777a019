"""Connections to a worker's chat port on which nobody has shown the gateway's secret yet.

Each is closed after a second, and before that where there are many: half requests must not take
the files that the gateway's connections need.
"""

from __future__ import annotations

import asyncio
import hmac
import resource
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from poc_core.records import GATEWAY_SECRET_HEADER

SECONDS = 1.0
_HEADER = GATEWAY_SECRET_HEADER.encode()


class Strangers:
    """The connections of one server without the secret, by address, the oldest first."""

    def __init__(self, secret: bytes, most: int | None = None) -> None:
        """`most`: held at a time; None: half of the files that this process may open."""
        self.secret = secret
        self._most = most or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._n = 0
        self._by_address: dict[str, dict[_Guarded, asyncio.TimerHandle]] = {}

    def enter(self, connection: _Guarded) -> None:
        if self._n >= self._most:  # whoever holds most of them makes room
            most = max(self._by_address.values(), key=len)
            self.close(next(iter(most)))
        timer = connection.loop.call_later(SECONDS, self.close, connection)
        self._by_address.setdefault(connection.address, {})[connection] = timer
        self._n += 1

    def leave(self, connection: _Guarded) -> None:
        """The secret was shown, or the connection is closed. Repeatable."""
        of_address = self._by_address.get(connection.address, {})
        timer = of_address.pop(connection, None)
        if timer is not None:
            timer.cancel()
            self._n -= 1
        if not of_address:
            self._by_address.pop(connection.address, None)

    def close(self, connection: _Guarded) -> None:
        self.leave(connection)
        connection.transport.abort()


class _Guarded(HttpToolsProtocol):
    def __init__(self, *args: Any, strangers: Strangers, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._strangers = strangers
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._strangers.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.leave(self)
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        # Here and not where the request is answered: a busy loop may get there after the timer.
        shown = dict(self.headers).get(_HEADER, b"")
        if hmac.compare_digest(shown, self._strangers.secret):
            self._strangers.leave(self)
        super().on_headers_complete()


def guarded(secret: str | None) -> Any:
    """The protocol for `uvicorn.Config(http=...)` of one server. None: nobody is a stranger."""
    return "auto" if secret is None else partial(_Guarded, strangers=Strangers(secret.encode()))
