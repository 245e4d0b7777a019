"""A Redis with replicas and Sentinels, all on loopback, whose primary a test may kill."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from cli.supervise.redis_server import find_redis_server, free_port
from poc_core.redis_at.connections import states
from tests.harness.waiting import wait_until

HOST = "127.0.0.1"
MASTER = "proofline"
PASSWORD = "a password of these tests"
SENTINEL_PASSWORD = "the Sentinels' own"
# Seconds for servers to answer and to find each other.
READY_S = 60.0

_REDIS = """\
bind {host}
port {port}
dir "{folder}"
requirepass "{password}"
masterauth "{password}"
appendonly yes
save ""
maxmemory-policy noeviction
repl-diskless-sync-delay 0
{own}
"""
# As docs/failover.md has it.
_SENTINEL = """\
bind {host}
port {port}
dir "{folder}"
requirepass "{own_password}"
sentinel sentinel-pass "{own_password}"
sentinel monitor {master} {host} {primary} {quorum}
sentinel auth-pass {master} "{password}"
sentinel down-after-milliseconds {master} {down_after_ms}
sentinel failover-timeout {master} 10000
sentinel parallel-syncs {master} 1
{own}
"""


@dataclass
class Server:
    """A redis-server on a port of its own, as it is or as a Sentinel."""

    folder: Path
    config: str
    port: int
    sentinel: bool = False
    password: str = PASSWORD
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        file = self.folder / "redis.conf"
        if not file.exists():  # else it is as the server has written it anew
            file.write_text(self.config)
        command = [str(find_redis_server()), str(file), *["--sentinel"] * self.sentinel]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def send(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
            self.process.wait(30)

    @contextmanager
    def client(self, timeout_s: float = 5.0) -> Iterator[Redis]:
        with Redis(
            HOST,
            self.port,
            password=self.password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
        ) as client:
            yield client

    def answers(self) -> bool:
        try:
            with self.client(1.0) as client:
                return bool(client.ping())
        except RedisError:
            return False


@dataclass
class Sentinels:
    """Servers, the first of which begins as the primary, and Sentinels that watch them."""

    servers: list[Server]
    sentinels: list[Server]
    options: str = ""  # of the url, after ?
    scheme: str = "redis+sentinel"
    user: str = ""
    password: str = PASSWORD
    began_at: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        hosts = ",".join(f"{HOST}:{server.port}" for server in self.sentinels)
        password = self.password.replace(" ", "%20")
        own = SENTINEL_PASSWORD.replace(" ", "%20")
        options = f"?sentinel_password={own}{self.options}"
        return f"{self.scheme}://{self.user}:{password}@{hosts}/{MASTER}/0{options}"

    @property
    def primary(self) -> Server:
        """The server that most Sentinels name. AssertionError: they name none of ours."""
        named: list[int] = []
        for sentinel in self.sentinels:
            with suppress(RedisError), sentinel.client(1.0) as client:
                named.append(int(states(client)[MASTER]["port"]))
        assert named, "no Sentinel answers"
        port = max(set(named), key=named.count)
        return next(server for server in self.servers if server.port == port)

    def kill_primary(self) -> Server:
        """SIGKILL; the server comes back with `start`."""
        primary = self.primary
        primary.stop()
        return primary

    def wait_replicated(self, n: int, timeout_s: float = READY_S) -> None:
        """Waits until `n` replicas follow the primary, and every Sentinel knows all of it."""
        wait_until(lambda: self._is_replicated(n), f"{n} replicas", timeout_s)

    def _is_replicated(self, n: int) -> bool:
        try:
            with self.primary.client() as client:
                found = client.info("replication")
                lines = [found.get(f"slave{place}", {}) for place in range(n)]
                if found["role"] != "master" or any(
                    line.get("state") != "online" for line in lines
                ):
                    return False
            for sentinel in self.sentinels:
                with sentinel.client() as client:
                    state = states(client)[MASTER]
                    if int(state["num-other-sentinels"]) < len(self.sentinels) - 1:
                        return False
                    replicas: Any = client.sentinel_slaves(MASTER)
                    up = [one for one in replicas if not (one["is_sdown"] or one["is_odown"])]
                    if len(up) < n or state["is_sdown"]:
                        return False
            return True
        except (RedisError, AssertionError, KeyError):
            return False


@contextmanager
def sentinels(
    folder: Path,
    n_servers: int = 3,
    n_sentinels: int = 3,
    down_after_ms: int = 2000,
    own: Sequence[str] = ("min-replicas-to-write 1", "min-replicas-max-lag 10"),
) -> Iterator[Sentinels]:
    """Runs them until the block ends. `own`: further lines of each server's redis.conf."""
    ports: list[int] = []
    while len(ports) < n_servers + n_sentinels:
        if (port := free_port()) not in ports:
            ports.append(port)
    servers, watchers = [], []
    for place, port in enumerate(ports[:n_servers]):
        follows = [f"replicaof {HOST} {ports[0]}"] * (place > 0)
        config = _REDIS.format(
            host=HOST,
            port=port,
            folder=folder / f"server-{place}",
            password=PASSWORD,
            own="\n".join([*own, *follows]),
        )
        servers.append(Server(folder / f"server-{place}", config, port))
    for place, port in enumerate(ports[n_servers:]):
        config = _SENTINEL.format(
            host=HOST,
            port=port,
            folder=folder / f"sentinel-{place}",
            own_password=SENTINEL_PASSWORD,
            master=MASTER,
            primary=ports[0],
            password=PASSWORD,
            quorum=n_sentinels // 2 + 1,
            down_after_ms=down_after_ms,
            own="",
        )
        watcher = Server(folder / f"sentinel-{place}", config, port, True, SENTINEL_PASSWORD)
        watchers.append(watcher)
    found = Sentinels(servers, watchers)
    try:
        for server in servers:
            server.start()
        wait_until(lambda: all(server.answers() for server in servers), "servers", READY_S)
        for watcher in watchers:
            watcher.start()
        found.wait_replicated(n_servers - 1)
        yield found
    finally:
        for server in (*watchers, *servers):
            server.stop()
