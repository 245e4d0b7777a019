"""Requests begin in turns: between a few of them the event loop has all else to do."""

from starlette.types import ASGIApp, Receive, Scope, Send

from api.edge.shares import client_of
from poc_core.fair.turns import Turns

# Requests that begin in one round of the loop, some 0.2 to 0.5 ms each; more in a round that takes
# long by itself, with many streams to pass on.
_AT_ONCE = 4
_PER_S = 500.0


class InTurns:
    """Middleware: of requests that come together the next is whose client has begun fewest."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns(_AT_ONCE, _PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._turns.wait(client_of(scope), 1)
        await self._app(scope, receive, send)
