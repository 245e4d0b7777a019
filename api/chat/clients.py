"""A pool of httpx clients for requests to workers. Each client has few connections.

httpx iterates over all connections of a client several times for each request: 600 answers in
progress on one client quadrupled the CPU time of a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from poc_core.state.registry import CHAT_CONNECT_S

# Seconds to connect to a worker. There is no limit for its answer: a long prompt in a long queue
# takes time, and a worker that dies closes its connections.
TIMEOUT = httpx.Timeout(None, connect=CHAT_CONNECT_S)
# Most requests in progress on one client.
MOST = 32


class Clients:
    """A pool of httpx clients, which grows if all clients are busy. Runs on the event loop only."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._clients: list[httpx.AsyncClient] = []
        self._active: Counter[int] = Counter()  # requests in progress, by index in the list

    def __len__(self) -> int:
        return len(self._clients)

    @contextmanager
    def lend(self) -> Iterator[httpx.AsyncClient]:
        """Yields an httpx client for one request. The context must last until the answer's end."""
        # The first client that is not busy, so that its idle connections are reused.
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
    # trust_env off: workers are in the operator's network; proxies are for the internet.
    return httpx.AsyncClient(
        timeout=TIMEOUT,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=2 * most),
        trust_env=False,
        # workers speak plain HTTP; loading certificates takes longer than creating the API
        verify=False,
    )
