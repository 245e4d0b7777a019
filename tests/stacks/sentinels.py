"""A Redis with replicas and Sentinels, all on loopback, whose primary a test may kill."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from redis import Redis
from redis.exceptions import RedisError

from cli.supervise.redis_server import find_redis_server, free_port
from poc_core.redis_at.connections import states
from tests.harness.waiting import wait_until

HOST = "127.0.0.1"
MASTER = "proofline"
PASSWORD = "a password of these tests"
SENTINEL_PASSWORD = "the Sentinels' own"
# A Sentinels' user who may ask for the primary, as docs/redis.md has it.
ASKER = "user asker on >of-the-asker +auth +hello +ping +sentinel|masters"
# A primary that no replica follows takes no writes, as docs/redis.md has it.
ALONE_TAKES_NONE = ("min-replicas-to-write 1", "min-replicas-max-lag 3")
# Seconds for servers to answer and to find each other.
READY_S = 180.0

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
"""
# As docs/redis.md has it.
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
"""
_TLS = """\
port 0
tls-port {port}
tls-cert-file {certificate}
tls-key-file {key}
tls-ca-cert-file {certificate}
tls-auth-clients no
tls-replication yes
"""


@dataclass
class Server:
    """A redis-server on a port of its own, as it is or as a Sentinel."""

    folder: Path
    config: str
    port: int
    sentinel: bool = False
    certificate: Path | None = None
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
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    @contextmanager
    def client(self, timeout_s: float = 5.0) -> Iterator[Redis]:
        tls: dict[str, Any] = {}
        if self.certificate is not None:
            tls = {"ssl": True, "ssl_ca_certs": str(self.certificate)}
        with Redis(
            host=HOST,
            port=self.port,
            password=SENTINEL_PASSWORD if self.sentinel else PASSWORD,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            **tls,
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
    scheme: str = "redis+sentinel"

    @property
    def url(self) -> str:
        return self.url_of("", PASSWORD, f"sentinel_password={quote(SENTINEL_PASSWORD)}")

    def url_of(self, user: str, password: str, options: str) -> str:
        hosts = ",".join(f"{HOST}:{server.port}" for server in self.sentinels)
        return f"{self.scheme}://{user}:{quote(password)}@{hosts}/{MASTER}/0?{options}"

    @property
    def primary(self) -> Server:
        """The server that most Sentinels name. AssertionError: none answers."""
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

    def wait_replicated(self) -> None:
        """Waits until all replicas follow the primary, and every Sentinel knows all of it."""
        wait_until(self._is_replicated, "all replicas follow the primary", READY_S)

    def _is_replicated(self) -> bool:
        n = len(self.servers) - 1
        try:
            with self.primary.client() as client:
                found = client.info("replication")
            lines = [found.get(f"slave{place}", {}) for place in range(n)]
            if found["role"] != "master" or any(line.get("state") != "online" for line in lines):
                return False
            return all(self._is_known(sentinel, n) for sentinel in self.sentinels)
        except (RedisError, AssertionError, KeyError):
            return False

    def _is_known(self, sentinel: Server, n: int) -> bool:
        with sentinel.client() as client:
            state = states(client)[MASTER]
            replicas: Any = client.sentinel_slaves(MASTER)
        up = [one for one in replicas if not (one["is_sdown"] or one["is_odown"])]
        others = int(state["num-other-sentinels"])
        return len(up) == n and others == len(self.sentinels) - 1 and not state["is_sdown"]


def redis_server(
    folder: Path, port: int, own: Sequence[str] = (), tls: tuple[Path, Path] | None = None
) -> Server:
    """A server that is not yet started. `own`: further lines of its redis.conf."""
    config = _REDIS.format(host=HOST, port=port, folder=folder, password=PASSWORD)
    return Server(
        folder,
        config + _with_tls(port, tls) + "".join(f"{line}\n" for line in own),
        port,
        certificate=tls[0] if tls else None,
    )


@contextmanager
def sentinels(
    folder: Path,
    n_servers: int = 3,
    n_sentinels: int = 3,
    down_after_ms: int = 2000,
    own: Sequence[str] = ALONE_TAKES_NONE,
    sentinel_own: Sequence[str] = (),
    tls: tuple[Path, Path] | None = None,
) -> Iterator[Sentinels]:
    """Runs them until the block ends.

    `own`, `sentinel_own`: further lines of each server's and each Sentinel's redis.conf. `tls`: a
    certificate and its key; then nothing else is spoken.
    """
    ports = [free_port() for _ in range(n_servers + n_sentinels)]
    servers, watchers = [], []
    for place, port in enumerate(ports[:n_servers]):
        follows = [f"replicaof {HOST} {ports[0]}"] * (place > 0)
        servers.append(redis_server(folder / f"server-{place}", port, [*own, *follows], tls))
    for place, port in enumerate(ports[n_servers:]):
        at = folder / f"sentinel-{place}"
        config = _SENTINEL.format(
            host=HOST,
            port=port,
            folder=at,
            own_password=SENTINEL_PASSWORD,
            master=MASTER,
            primary=ports[0],
            password=PASSWORD,
            quorum=n_sentinels // 2 + 1,
            down_after_ms=down_after_ms,
        )
        config += _with_tls(port, tls) + "".join(f"{line}\n" for line in sentinel_own)
        watchers.append(Server(at, config, port, True, tls[0] if tls else None))
    found = Sentinels(servers, watchers, "rediss+sentinel" if tls else "redis+sentinel")
    try:
        for server in servers:
            server.start()
        wait_until(lambda: all(server.answers() for server in servers), "servers", READY_S)
        for watcher in watchers:
            watcher.start()
        found.wait_replicated()
        yield found
    finally:
        for server in (*watchers, *servers):
            server.stop()


def _with_tls(port: int, tls: tuple[Path, Path] | None) -> str:
    return _TLS.format(port=port, certificate=tls[0], key=tls[1]) if tls else ""
