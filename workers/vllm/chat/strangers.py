"""Limits the open connections to a worker's chat port that have not shown the gateway's secret."""

import asyncio
import hmac
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from poc_core.records import GATEWAY_SECRET_HEADER

# Seconds for which such a connection may stay open.
SECONDS = 1.0


def guarded(secret: str | None, most: int | None = None) -> Any:
    """Returns an HTTP protocol class for `uvicorn.Config(http=...)`. `secret`: None without one.
    `most`: open connections without the secret, of which one more closes the oldest; None for half
    of this process's file limit.
    """
    limit = most or resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
    strangers: dict[HttpToolsProtocol, asyncio.TimerHandle] = {}  # the oldest first

    class Guarded(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(strangers) >= limit:
                next(iter(strangers)).let_go().abort()  # type: ignore[attr-defined]
            strangers[self] = self.loop.call_later(SECONDS, transport.abort)

        def connection_lost(self, exc: Exception | None) -> None:
            self.let_go()
            super().connection_lost(exc)

        def on_headers_complete(self) -> None:
            # Checked here, because a busy loop answers requests after the timer.
            shown = dict(self.headers).get(GATEWAY_SECRET_HEADER.encode(), b"")
            if hmac.compare_digest(shown, (secret or "").encode()):
                self.let_go()
            super().on_headers_complete()

        def let_go(self) -> asyncio.Transport:
            if timer := strangers.pop(self, None):
                timer.cancel()
            return self.transport

    return Guarded if secret is not None else "auto"
