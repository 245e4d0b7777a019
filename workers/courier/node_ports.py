"""The node's own ports, to which no callbacks are sent."""

from __future__ import annotations

import socket
from contextlib import suppress

from poc_core.callbacks import Address, literal_address, plain
from poc_core.redis_at.url import RedisUrl
from poc_core.settings import Settings
from poc_core.state.registry import WorkerRegistry


class NodePorts:
    """The ports of this node's Redis, APIs and chat servers, and those that the settings name."""

    def __init__(
        self, known: frozenset[int], workers: WorkerRegistry, redis: RedisUrl | None = None
    ) -> None:
        self._known = known
        self._workers = workers
        self._redis = redis
        self._now: frozenset[int | tuple[Address, int]] = known

    @classmethod
    def of(cls, settings: Settings, workers: WorkerRegistry) -> NodePorts:
        return cls(settings.node_ports, workers, RedisUrl.of(settings.redis_url))

    def now(self) -> frozenset[int | tuple[Address, int]]:
        """Returns the ports that the last `look` found, some of them together with an address."""
        return self._now

    def look(self) -> None:
        """Updates the ports from Redis, and resolves Redis' own addresses. Can block the thread."""
        of_redis = set()
        # Each port at each host, because the Sentinels' hosts may also run the server.
        hosts, ports = (self._redis.hosts, self._redis.ports) if self._redis else ((), ())
        for host, _ in hosts:
            with suppress(OSError):
                for *_, at in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                    if address := literal_address(str(at[0])):
                        of_redis |= {(plain(address), port) for port in ports}
        self._now = self._known | of_redis
        self._now |= self._workers.ports()
