"""Connections come in by turns of their clients: thousands of one keep nobody else at the door.

uvloop takes one connection in a round of its loop, in the order in which they came; what it then
costs to make it one of uvicorn's is ten times what it costs to take it.
"""

import asyncio
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import uvicorn

from api.edge.shares import of_address

# Connections taken, and those let in, in a round of the event loop.
_TAKEN, _LET_IN = 64, 8
# Seconds without taking any, where the process may open no further file.
_PAUSE_S = 0.1
_BACKLOG = 2048


class Entrance:
    """Of one listening socket; for one event loop."""

    def __init__(
        self, listening: socket.socket, most: int, protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        """`most`: connections that wait to be let in; more stay in the kernel's queue."""
        self._listening = listening
        self._most = most
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[str, deque[socket.socket]] = OrderedDict()
        self._n_waiting = 0
        self._entering: set[asyncio.Task[Any]] = set()
        self._is_open = True
        self._resume: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        self._take_more()

    def close(self) -> None:
        """What waits is closed, what was let in is not."""
        self._is_open = False
        self._take_no_more()
        for connections in self._waiting.values():
            for connection in connections:
                connection.close()
        self._waiting.clear()
        self._listening.close()

    def _take_more(self) -> None:
        self._resume = None
        self._loop.add_reader(self._listening, self._take)

    def _take_no_more(self) -> None:
        self._loop.remove_reader(self._listening)
        if self._resume is not None:
            self._resume.cancel()

    def _take(self) -> None:
        had_none = not self._n_waiting
        for _ in range(_TAKEN):
            if self._n_waiting >= self._most:
                self._loop.remove_reader(self._listening)
                break
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError:  # too many files
                self._take_no_more()
                self._resume = self._loop.call_later(_PAUSE_S, self._take_more)
                break
            connection.setblocking(False)
            self._waiting.setdefault(of_address(address[0]), deque()).append(connection)
            self._n_waiting += 1
        if had_none and self._n_waiting:
            self._let_in()

    def _let_in(self) -> None:
        if not self._is_open:
            return
        was_full = self._n_waiting >= self._most
        for _ in range(min(_LET_IN, self._n_waiting)):
            client, connections = self._waiting.popitem(last=False)
            connection = connections.popleft()
            self._n_waiting -= 1
            if connections:
                self._waiting[client] = connections  # behind all others
            entering = self._loop.create_task(self._enter(connection))
            self._entering.add(entering)
            entering.add_done_callback(self._entering.discard)
        if was_full:
            self._take_more()
        if self._n_waiting:
            self._loop.call_soon(self._let_in)

    async def _enter(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # it is gone
            connection.close()


class FairServer(uvicorn.Server):
    """uvicorn's, with such entrances."""

    def __init__(self, config: uvicorn.Config, most_waiting: int) -> None:
        super().__init__(config)
        self._most_waiting = most_waiting
        self._entrances: list[Entrance] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """OSError: the address cannot be listened on."""
        listening = sockets or await _listen(self.config.host, self.config.port)
        await super().startup(sockets=[])
        self._entrances = [Entrance(one, self._most_waiting, self._protocol) for one in listening]
        self._log_started_message(listening)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for entrance in self._entrances:
            entrance.close()
        await super().shutdown()

    def _protocol(self) -> asyncio.Protocol:
        made: Any = self.config.http_protocol_class
        found: asyncio.Protocol = made(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return found


async def _listen(host: str, port: int) -> list[socket.socket]:
    """On all addresses of the name, as uvicorn does."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return [
        socket.create_server(address, family=family, backlog=_BACKLOG)
        for family, address in dict.fromkeys((family, address) for family, *_, address in found)
    ]
