"""Identifies a request's client, and divides connections and request starts among clients."""

from collections import OrderedDict
from collections.abc import Hashable
from functools import lru_cache
from ipaddress import IPv6Address
from typing import Generic, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from api.edge.private_peers import address_of
from poc_core.fair_queue import Turns

# Key in the ASGI scope of the client's name, as set by Doorkeeper from the request's API key.
CLIENT = "proofline.client"
# Leading bits of an IPv6 address that identify a customer, who has all addresses of a /64.
_NETWORK_BITS = 64
# Requests that start in one iteration of the event loop, at 0.2 to 0.5 ms each. After a long
# iteration, which forwards many streams, _PER_S requests start for each second that it took.
_AT_ONCE = 4
_PER_S = 500.0

T = TypeVar("T", bound=Hashable)


def client_of(scope: Scope) -> str:
    """Returns an identifier of a request's client: its key's name, else the peer's `of_address`."""
    peer = scope.get("client")
    return scope.get(CLIENT) or (of_address(peer[0]) if peer else "")


@lru_cache(maxsize=4096)
def of_address(host: str) -> str:
    """Returns a client's identifier: its IPv4 address, or the /64 network of its IPv6 address."""
    address = address_of(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        return f"{int(address) >> (128 - _NETWORK_BITS):x}::/{_NETWORK_BITS}"
    return host if address is None else str(address)


class Holdings(Generic[T]):
    """Records which client holds which things, such as connections. All methods take O(1) time."""

    def __init__(self) -> None:
        self._of: dict[str, OrderedDict[T, None]] = {}
        # number of things -> the clients that hold this number, in the order of reaching it
        self._by_count: dict[int, OrderedDict[str, None]] = {}
        self._most = 0
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def add(self, client: str, thing: T) -> None:
        held = self._of.setdefault(client, OrderedDict())
        held[thing] = None
        self._total += 1
        self._recount(client, len(held) - 1, len(held))

    def remove(self, client: str, thing: T) -> None:
        held = self._of[client]
        del held[thing]
        self._total -= 1
        self._recount(client, len(held) + 1, len(held))
        if not held:
            del self._of[client]

    def oldest(self) -> T:
        """Returns the oldest thing of the client that holds most (on a tie, the first client)."""
        return next(iter(self._largest()))

    def youngest(self) -> T:
        """Returns the youngest thing of the client that holds the most things (see `oldest`)."""
        return next(reversed(self._largest()))

    def _largest(self) -> OrderedDict[T, None]:
        return self._of[next(iter(self._by_count[self._most]))]

    def _recount(self, client: str, before: int, after: int) -> None:
        if before:
            clients = self._by_count[before]
            del clients[client]
            if not clients:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, OrderedDict())[client] = None
        if after > self._most or self._most not in self._by_count:
            self._most = after  # counts change by one at a time


class InTurns:
    """Middleware that limits how many requests start at once. The clients take turns."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = Turns(_AT_ONCE, _PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._turns.wait(client_of(scope), 1)
        await self._app(scope, receive, send)
