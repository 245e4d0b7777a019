"""HTTP clients that share the requests to workers, so that none has many connections.

httpx looks at all connections of a client, several times, for each request: beside 600 answers
under way a request took four times the CPU time that it takes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from poc_core.state.registry import CHAT_CONNECT_S

# Seconds to reach a worker. Its answer has no limit: a long prompt behind a long queue takes time,
# and a worker that dies closes its connections.
TIMEOUT = httpx.Timeout(None, connect=CHAT_CONNECT_S)
# Requests under way at one client.
MOST = 32


class Clients:
    """An LRU table of any number of clients; for the event loop only, without locks."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._clients: list[httpx.AsyncClient] = []
        self._active: Counter[int] = Counter()  # requests under way, by place in the list

    def __len__(self) -> int:
        return len(self._clients)

    @contextmanager
    def lend(self) -> Iterator[httpx.AsyncClient]:
        """A client for one request, to its answer's end."""
        # The first with room: its idle connections are used again.
        place = next(
            (place for place in range(len(self)) if self._active[place] < self._most), len(self)
        )
        if place == len(self):
            self._clients.append(_client(self._most))
        self._active[place] += 1
        try:
            yield self._clients[place]
        finally:
            self._active[place] -= 1

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


def _client(most: int) -> httpx.AsyncClient:
    # trust_env off: workers are on the operator's network, proxies are for the internet.
    return httpx.AsyncClient(
        timeout=TIMEOUT,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=2 * most),
        trust_env=False,
        # workers speak plain http; loading certificates takes longer than making the API
        verify=False,
    )
