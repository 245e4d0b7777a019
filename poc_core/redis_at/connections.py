"""Connections to Redis, for redis-py and Celery.

Only a primary outside a cluster is usable. If another server becomes the primary, connections to
the old primary are closed. New connections ask the Sentinels or the DNS for the new primary.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.sentinel import SentinelManagedConnection as _Managed
from redis.utils import str_if_bytes

from poc_core.redis_at.url import RedisUrl, address

# Seconds to wait for a Sentinel before asking the next one.
SENTINEL_TIMEOUT_S = 1.0
# Errors of a replica, and of a primary with too few replicas: the primary may have changed.
# In Redis 6, other text precedes the code of a script's error.
_UNFIT = (ReadOnlyError, MasterDownError)
_UNFIT_TEXTS = ("READONLY ", "UNBLOCKED ", "NOREPLICAS ")
# Temporary errors, by type and by the text of a script's error: Redis is unavailable, restarting,
# failing over, busy with an endless script, out of memory or disk, or lacks replicas.
TRANSIENT = (ConnectionError, TimeoutError, OutOfMemoryError, ReadOnlyError)
_TRANSIENT_TEXTS = ("OOM ", "READONLY ", "LOADING ", "MISCONF ", "BUSY ", "NOREPLICAS ")


class WrongRedisError(ConnectionError):
    """The server can never be used, for example because it is a Redis Cluster."""


class NoWritesError(ConnectionError):
    """The server is no primary, or refuses writes because it has too few replicas."""


class _OfPrimary:
    """A mixin that closes a connection if its server is not, or no longer, the primary."""

    def on_connect_check_health(self, check_health: bool = True) -> None:
        made: Any = self
        super().on_connect_check_health(check_health)  # type: ignore[misc]
        # RESP3 connections have sent HELLO already; RESP2 connections have not.
        _check(made.host, made.port, made.handshake_metadata or _hello(made))

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            texts = (text in str(error) for text in _UNFIT_TEXTS)
            if not isinstance(error, _UNFIT) and not any(texts):
                raise
            made: Any = self
            made.disconnect()
            raise NoWritesError(f"{address((made.host, made.port))} says: {error}") from error


class PrimaryConnection(_OfPrimary, Connection):
    pass


class PrimarySSLConnection(_OfPrimary, SSLConnection):
    pass


class SentinelConnection(_OfPrimary, _Managed):
    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if not self.is_connected:
            # For a retried command redis-py would connect to the previous server.
            self.connect_to(self.connection_pool.get_master_address())
        super().send_packed_command(command, check_health)


class SentinelSSLConnection(SentinelConnection, SSLConnection):
    pass


class Sentinels(Sentinel):
    """A client of Redis Sentinels whose errors explain why no primary is known."""

    def __init__(
        self, hosts: Iterable[tuple[str, int]], sentinel_kwargs: Mapping[str, Any]
    ) -> None:
        """`sentinel_kwargs`: redis-py's arguments for a Sentinel, except host and port."""
        # Without retries: the next Sentinel is asked instead.
        limits = {
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
        }
        super().__init__(list(hosts), sentinel_kwargs={**limits, **sentinel_kwargs})
        self._first = 0  # index of the Sentinel to ask first, which answered last time

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Returns the primary's address. MasterNotFoundError if the primary is down or no Sentinel
        answers. WrongRedisError if the Sentinels know no master named `service_name`.
        """
        silent, known, is_known = [], set[str](), False
        for turn in range(len(self.sentinels)):
            place = (self._first + turn) % len(self.sentinels)
            sentinel = self.sentinels[place]
            try:
                masters = states(sentinel)
            except (ConnectionError, TimeoutError, ResponseError) as error:
                silent.append(f"{self.name(sentinel)}: {why(error)}")
                continue
            state = masters.get(service_name)
            if state and self.check_master_state(state, service_name):
                self._first = place
                return state["ip"], state["port"]
            known |= set(masters)
            is_known = is_known or state is not None
        if is_known:
            raise MasterNotFoundError(
                f"the primary of {service_name} is down, and the Sentinels name no other yet"
            )
        if len(silent) < len(self.sentinels):
            names = ", ".join(sorted(known)) or "none"
            raise WrongRedisError(
                f"the Sentinels know no master {service_name} (they know: {names}); correct the url"
            )
        raise MasterNotFoundError(f"no Sentinel answers ({'; '.join(silent)})")

    @staticmethod
    def name(sentinel: Redis) -> str:
        given = sentinel.connection_pool.connection_kwargs
        return address((given["host"], given["port"]))


def states(sentinel: Redis) -> dict[str, dict[str, Any]]:
    """Returns the states of the masters that a Sentinel knows, by name."""
    found: Any = sentinel.sentinel_masters()  # redis-py types it as possibly another shape
    return dict(found)


def why(error: Exception) -> str:
    """Returns in a few words why a Sentinel did not answer."""
    if isinstance(error, AuthenticationError):
        return "it refuses the url's sentinel_username and sentinel_password, or requires them"
    return str(error).rstrip(".").rpartition(". ")[2]  # without the address, which the caller adds


def is_transient(error: Exception) -> bool:
    """Returns True if the error is a temporary failure of Redis, in which any command may fail."""
    if isinstance(error, ResponseError) and any(text in str(error) for text in _TRANSIENT_TEXTS):
        return True
    return isinstance(error, TRANSIENT)


def is_busy(error: Exception) -> bool:
    """Returns True if Redis refuses commands because a script has run for over 5 s."""
    return isinstance(error, ResponseError) and "BUSY " in str(error)


def pool(at: RedisUrl, **options: Any) -> ConnectionPool:
    """Returns a pool of connections to the primary. `options`: redis-py's connection options."""
    given = {**at.ssl, **at.server, **options}
    if at.master:
        kind = SentinelSSLConnection if at.tls else SentinelConnection
        return sentinel_pool(at.master, at.hosts, at.sentinel, connection_class=kind, **given)
    host, port = at.hosts[0]
    one = PrimarySSLConnection if at.tls else PrimaryConnection
    return ConnectionPool(connection_class=one, host=host, port=port, **given)


def sentinel_pool(
    master: str,
    hosts: Iterable[tuple[str, int]],
    sentinel_kwargs: Mapping[str, Any],
    **options: Any,
) -> SentinelConnectionPool:
    """Returns a pool of connections to the primary that the Sentinels report."""
    return SentinelConnectionPool(master, Sentinels(hosts, sentinel_kwargs), **options)


def client(at: RedisUrl, **options: Any) -> Redis:
    """Returns a client that connects on first use. `options`: redis-py's connection options."""
    return Redis.from_pool(pool(at, **options))


def _hello(connection: Any) -> Mapping[Any, Any]:
    connection.send_command("HELLO", check_health=False)
    try:
        answer = connection.read_response()
    except ResponseError:
        return {}  # a Redis-compatible server without HELLO
    if isinstance(answer, Mapping):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=False))


def _check(host: str, port: int, hello: Mapping[Any, Any]) -> None:
    """Raises WrongRedisError or NoWritesError unless `hello` is the HELLO of a usable primary."""
    said = {str_if_bytes(name): str_if_bytes(value) for name, value in hello.items()}
    if said.get("mode") == "cluster":
        raise WrongRedisError(
            f"{address((host, port))} is a Redis Cluster, which would spread a job's keys over"
            " servers; use one Redis, or one with Sentinels"
        )
    if said.get("mode") == "sentinel":
        raise WrongRedisError(
            f"{address((host, port))} is a Sentinel; its url is redis+sentinel://HOST:PORT/MASTER/0"
        )
    if said.get("role") in ("replica", "slave"):
        raise NoWritesError(f"{address((host, port))} is a replica and takes no writes")
