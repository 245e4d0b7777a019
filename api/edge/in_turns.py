"""Starts requests a few at a time, so that the event loop can do other work in between."""

from starlette.types import ASGIApp, Receive, Scope, Send

from api.edge.shares import client_of
from poc_core.fair.turns import Turns

# Requests that start in one iteration of the loop, at 0.2 to 0.5 ms each; more in an iteration that
# takes long because it forwards many streams.
_AT_ONCE = 4
_PER_S = 500.0


class InTurns:
    """Middleware: starts waiting requests, first those of the client with the fewest started."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns(_AT_ONCE, _PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._turns.wait(client_of(scope), 1)
        await self._app(scope, receive, send)
