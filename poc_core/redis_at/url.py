"""The url of Redis: of one server, or of Sentinels that know the primary.

    redis://USER:PASSWORD@HOST:6379/DB
    redis+sentinel://USER:PASSWORD@HOST:26379,HOST:26379,HOST:26379/MASTER/DB

rediss:// and rediss+sentinel:// use TLS. User, password, database and redis-py's options (such as
`ssl_ca_certs`) are for the server. Options for the Sentinels: `sentinel_username`,
`sentinel_password`, `sentinel_password_file`, and `sentinel_tls=no` if only the server has TLS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from redis.connection import Connection, SSLConnection, parse_url
from redis.credentials import UsernamePasswordCredentialProvider
from redis.exceptions import RedisError

_SENTINEL = "+sentinel"
_PORT, _SENTINEL_PORT = 6379, 26379
_SENTINEL_LOOKS = "redis+sentinel://HOST:26379,HOST:26379,HOST:26379/MASTER/0"
_LOOKS = f"must look like redis://host:port/db (or rediss:// for TLS), or {_SENTINEL_LOOKS}"


@dataclass(frozen=True)
class RedisUrl:
    """A parsed url of Redis. Its repr leaves out fields that may contain a secret."""

    tls: bool
    hosts: tuple[tuple[str, int], ...]  # address of the server, or addresses of the Sentinels
    master: str  # the server's name for the Sentinels; empty without Sentinels
    # redis-py's arguments for the server and for a Sentinel, without host and port.
    server: Mapping[str, Any] = field(repr=False)
    sentinel: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, text: str) -> "RedisUrl":
        """Parses a url. Raises ValueError if the url is invalid. The error says what is wrong,
        without quoting a secret.
        """
        scheme, _, rest = text.partition("://")
        # Without unix://, for which Celery has another form.
        if scheme not in ("redis", "rediss", "redis+sentinel", "rediss+sentinel"):
            raise ValueError(_LOOKS)
        tls = scheme.startswith("rediss")
        if scheme.endswith(_SENTINEL):
            return _of_sentinels(tls, rest)
        try:
            server = parse_url(text)
            host = server.pop("host", "localhost"), server.pop("port", _PORT)
            host[0].encode("idna")  # as the connection does
        except ValueError:
            raise ValueError(_LOOKS) from None
        server.pop("connection_class", None)
        _check_options(tls, server)
        return cls(tls, (host,), "", server, {})

    @property
    def shown(self) -> str:
        """The url for display: with *** for user and password, and without options."""
        scheme = ("rediss" if self.tls else "redis") + (_SENTINEL if self.master else "")
        hosts = ",".join(address(host) for host in self.hosts)
        user = "***@" if self.server.get("password") else ""
        path = [self.master] * bool(self.master) + [str(self.server.get("db", 0))]
        return f"{scheme}://{user}{hosts}/{'/'.join(path)}"

    @property
    def ports(self) -> frozenset[int]:
        """The ports in the url, and Redis' default port if the url names Sentinels."""
        usual = {_PORT} if self.master else set()
        return frozenset({port for _, port in self.hosts} | usual)

    @property
    def broker(self) -> str:
        """The broker url for Celery. It names the server, or one Sentinel, without options."""
        user = quote(self.server.get("username") or "", safe="")
        password = quote(self.server.get("password") or "", safe="")
        credentials = f"{user}:{password}@" if user or password else ""
        scheme = "sentinel" if self.master else "rediss" if self.tls else "redis"
        database = self.server.get("db", 0)
        return f"{scheme}://{credentials}{address(self.hosts[0])}/{database}"

    @property
    def ssl(self) -> dict[str, Any]:
        """redis-py's TLS options for the server; empty without TLS."""
        if not self.tls:
            return {}
        given = {name: value for name, value in self.server.items() if name.startswith("ssl_")}
        # Explicit, because kombu's default accepts any certificate, and Flower ignores the url.
        return {"ssl_cert_reqs": "required", **given}


def address(host: tuple[str, int]) -> str:
    """Returns HOST:PORT, with an IPv6 address in brackets."""
    name, port = host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def read_password(option: str, file: str | Path) -> str:
    """Reads a password from a file. Raises ValueError, which names `option`, if the file cannot be
    read.
    """
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        why = error.strerror
    except UnicodeDecodeError:
        why = "it is not UTF-8 text"
    raise ValueError(f"{option} {file} cannot be read ({why})")


def _of_sentinels(tls: bool, rest: str) -> RedisUrl:
    before, question, query = rest.partition("?")
    netloc, _, path = before.partition("/")
    user, at, hosts = netloc.rpartition("@")
    master, slash, database = unquote(path).partition("/")
    if not hosts:
        raise ValueError(f"names no Sentinel; it must look like {_SENTINEL_LOOKS}")
    if not master or master.isdecimal():
        raise ValueError(
            f"names no master (`sentinel monitor MASTER ...`); it must look like {_SENTINEL_LOOKS}"
        )
    if slash and not database.isdecimal():
        raise ValueError(f"must end with a database's number, as {_SENTINEL_LOOKS}")
    found = tuple(_host(part) for part in hosts.split(","))
    try:
        # redis-py parses user, password and options like those of one server.
        given = parse_url(f"redis://{user}{at}host/{database or 0}{question}{query}")
    except ValueError as error:
        raise ValueError(f"has an option that cannot be read: {error}") from None
    given.pop("host")
    own = {name: given.pop(name) for name in sorted(given) if name.startswith("sentinel_")}
    _check_options(tls, given)
    return RedisUrl(tls, found, master, given, _to_sentinels(tls, given, own))


def _check_options(tls: bool, given: Mapping[str, Any]) -> None:
    """Raises ValueError if redis-py cannot use the url's options."""
    of_connection = {name: value for name, value in given.items() if name != "max_connections"}
    try:
        (SSLConnection if tls else Connection)(**of_connection)  # connects on first use
    except (TypeError, RedisError) as error:
        raise ValueError(f"has an option that redis-py cannot use: {error}") from None


def _host(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        if parts.hostname is None or parts.path or "@" in text:
            raise ValueError
        parts.hostname.encode("idna")  # as the connection does
        return parts.hostname, parts.port or _SENTINEL_PORT
    except ValueError:
        raise ValueError(
            f"must name Sentinels as HOST:PORT with commas between, as {_SENTINEL_LOOKS}"
        ) from None


def _to_sentinels(tls: bool, server: Mapping[str, Any], own: dict[str, str]) -> dict[str, Any]:
    """Returns redis-py's arguments for a Sentinel. `own`: the url's options for Sentinels."""
    user, password = own.pop("sentinel_username", None), own.pop("sentinel_password", None)
    file, with_tls = own.pop("sentinel_password_file", None), own.pop("sentinel_tls", "")
    if own:
        raise ValueError(
            f"has no option {', '.join(own)}; Sentinels have sentinel_username,"
            " sentinel_password, sentinel_password_file and sentinel_tls=no"
        )
    if file and not password:
        password = read_password("sentinel_password_file", file)
    if with_tls not in ("", "yes", "no"):
        raise ValueError("sentinel_tls must be yes or no")
    found: dict[str, Any] = {}
    if tls and with_tls != "no":
        found |= {"ssl": True, "ssl_cert_reqs": "required"}
        found |= {name: value for name, value in server.items() if name.startswith("ssl_")}
    if user or password:
        # No plain text, because Flower displays Celery's options, which include these.
        found["credential_provider"] = UsernamePasswordCredentialProvider(user, password)
    return found
