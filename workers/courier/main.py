"""The courier process, which delivers the payloads of outboxes. It needs no engine and no GPU."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
from redis.exceptions import RedisError

from poc_core import callbacks, life_signs
from poc_core.callback_tls import CallbackTls
from poc_core.open_files import raise_file_limit
from poc_core.periodic import Periodic
from poc_core.redis_at.url import RedisUrl
from poc_core.serving.logs import log_to_stderr
from poc_core.settings import Settings, load_settings
from poc_core.state import scripts
from poc_core.state.client import connect, refuse_wrong
from poc_core.state.outbox import Outbox, Receivers
from poc_core.state.parsing import BAD_CERTIFICATES
from poc_core.state.registry import WorkerRegistry
from workers.courier.courier import Courier
from workers.courier.poster import Poster
from workers.courier.tls_clients import CONNECTIONS

# Seconds between two searches for due deliveries.
TICK_S = 0.25
# Most seconds between two signs of life, also if POC_WORKER_TTL_S is long: containers wait 60 s.
_SIGN_S = 20.0
ALIVE = Path(tempfile.gettempdir(), "proofline-courier")
SCRIPTS_WAIT_S = 20.0  # less than supervisors wait for the courier to end


def run_courier(redis_url: str | None = None) -> None:
    """Runs a courier until SIGTERM or SIGINT. Several couriers can run, also on several hosts."""
    log_to_stderr()
    raise_file_limit()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = load_settings(redis_url=redis_url)
    refuse_wrong(settings)
    redis = connect(settings)
    outbox = Outbox(redis, settings)
    node_ports = NodePorts.of(settings, WorkerRegistry(redis, settings))
    # trust_env is off, because the environment's proxies are not meant for callbacks.
    client = httpx.AsyncClient(trust_env=False, limits=CONNECTIONS)
    tls = CallbackTls(settings.callback_tls)
    tls.problem()  # logs a problem before a callback needs the files
    proxy = settings.callback_proxy.get_secret_value() if settings.callback_proxy else None
    poster = Poster(client, settings.callbacks, node_ports.now, tls=tls, proxy=proxy)
    courier = Courier(
        outbox, Receivers(redis), poster, settings.callback_max_retries, settings.callback_max_bytes
    )
    with contextlib.suppress(RedisError):  # an API may load the scripts later
        scripts.wait_until_loaded(redis, SCRIPTS_WAIT_S)
    with courier.running():

        def look() -> str:
            node_ports.look()
            return BAD_CERTIFICATES if tls.problem() else ""

        ticker = Ticker(outbox, courier, look)
        ticker.start()
        logging.getLogger(__name__).info("the courier delivers")
        stop.wait()
        ticker.stop()


class Ticker:
    """A thread that passes due outboxes to the courier, and renews the locks of deliveries. Redis
    assigns each due outbox to one courier at a time. The thread also updates the mtime of the
    private folder ALIVE, which a container's health check reads.
    """

    def __init__(
        self, outbox: Outbox, courier: Courier, look_around: Callable[[], str] = lambda: ""
    ) -> None:
        """`look_around()` is called regularly. It returns the courier's current problem, or ""."""
        self._outbox = outbox
        self._courier = courier
        self._look_around = look_around
        self._trouble = ""
        self._renewed_at = float("-inf")
        self._ticks = Periodic("courier-ticker", TICK_S, self._tick)

    def start(self) -> None:
        self._ticks.start()

    def stop(self) -> None:
        self._ticks.stop()
        life_signs.remove(ALIVE)
        with contextlib.suppress(RedisError):
            self._outbox.leave()  # otherwise the courier is reported as missing

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._renewed_at > min(self._outbox.lock_s / 5, _SIGN_S):
            self._renewed_at = now
            life_signs.show(ALIVE)
            self._courier.renew_locks()
            self._trouble = self._look_around()
        for due in self._outbox.announce(self._trouble):
            self._courier.offer(due)


class NodePorts:
    """The ports of this node's Redis, APIs and chat servers, and the ports in the settings."""

    def __init__(
        self, known: frozenset[int], workers: WorkerRegistry, redis: RedisUrl | None = None
    ) -> None:
        self._known = known
        self._workers = workers
        self._redis = redis
        self._now: frozenset[int | tuple[callbacks.Address, int]] = known

    @classmethod
    def of(cls, settings: Settings, workers: WorkerRegistry) -> NodePorts:
        return cls(settings.node_ports, workers, RedisUrl.of(settings.redis_url))

    def now(self) -> frozenset[int | tuple[callbacks.Address, int]]:
        """Returns the ports that the last `look` found, each as a port or as (address, port)."""
        return self._now

    def look(self) -> None:
        """Updates the ports from Redis, and resolves Redis' own addresses. Can block the thread."""
        of_redis = set()
        # Each port at each host, because the Sentinels' hosts may also run the server.
        hosts, ports = (self._redis.hosts, self._redis.ports) if self._redis else ((), ())
        for host, _ in hosts:
            with suppress(OSError):
                for *_, at in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                    if address := callbacks.literal_address(str(at[0])):
                        of_redis |= {(callbacks.plain(address), port) for port in ports}
        self._now = self._known | of_redis
        self._now |= self._workers.ports()
