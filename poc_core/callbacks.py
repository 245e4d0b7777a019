"""Parses callback urls, checks that their receivers are allowed, and hides passwords."""

import ipaddress
import re
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import SplitResult, urlsplit

from poc_core.errors import ForbiddenReceiverError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# The node's own ports: a port of this machine, or an address and port of another machine.
Own = Collection[int | tuple[Address, int]]

# Kinds of addresses that POC_CALLBACK_ALLOW may name in addition to hosts and networks.
KINDS: Final = ("public", "private", "loopback")

# Cloud metadata services besides 169.254.169.254: AWS and Google over IPv6, Alibaba, Azure.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in ("fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16")
)
# IPv6 addresses whose last 32 bits are an IPv4 address (NAT64).
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
_DEFAULT_PORTS = {"http": 80, "https": 443}
# A DNS name. A numeric last label is refused as a mistyped address. Docker's names may contain _.
_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?!(0x)?\d+$){_LABEL}")


def redacted(url: str | None) -> str | None:
    """Returns the url with *** instead of its user and password."""
    if not url or "@" not in url:
        return url
    parts = urlsplit(url)
    _, at, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"***@{host}").geturl() if at else url


def callback_url(url: str | None, what: str) -> str:
    """Appends /generated or /validated (`what`) to a callback url. Returns "" if `url` is empty."""
    return f"{url.rstrip('/')}/{what}" if url else ""


def receiver_of(url: str) -> str:
    """Returns the receiver of a callback url as host:port; "" for an invalid url."""
    try:
        parts = urlsplit(url)
        host, port = canonical_host(parts.hostname or ""), port_of(parts)
    except ValueError:
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def canonical_host(text: str) -> str:
    """Normalizes an IP address or DNS name for comparisons. ValueError if `text` is neither."""
    host = text.strip("[]").lower()
    address = literal_address(host)
    if address is not None:
        return str(address)
    if not host.isascii() or host.startswith("xn--"):
        import httpx  # here: the import takes 0.1 s. httpx sends the callbacks

        try:
            url = httpx.URL(f"http://{host}/")
            _ = url.host  # decodes IDNA
            host = url.raw_host.decode()
        except (httpx.InvalidURL, UnicodeError):
            raise ValueError(f"{text!r} is no host name") from None
    host = host.removesuffix(".")
    if not _NAME.fullmatch(host):
        raise ValueError(f"{text!r} is neither a host name nor an address")
    return host


def port_of(parts: SplitResult) -> int:
    return parts.port or _DEFAULT_PORTS.get(parts.scheme, 80)


def without_secret(text: str, url: str) -> str:
    """Returns `text`, such as an error message, with *** instead of the url's user and password."""
    secret = url.partition("://")[2].partition("/")[0].rpartition("@")[0]
    return text.replace(secret, "***") if secret else text


def plain(address: Address) -> Address:
    """Returns the IPv4 address in an IPv6 address (mapped, 6to4, NAT64), or else `address`."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in _TRANSLATED:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def literal_address(host: str) -> Address | None:
    """Parses a url's host as an IP address, also in forms such as 127.1. None if it is a name."""
    try:
        address = ipaddress.ip_address(host)
        # Without the scope (%eth0): with a scope, equal addresses would compare as different.
        return address if address.version == 4 else ipaddress.IPv6Address(int(address))
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None


def is_of_this_machine(address: Address) -> bool:
    """Returns True if the address belongs to this machine. Tests this by binding a socket to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class CallbackPolicy:
    """The receivers that POC_CALLBACK_ALLOW permits. The node's own ports are never permitted."""

    kinds: frozenset[str]
    hosts: frozenset[str]
    networks: tuple[Network, ...]

    @classmethod
    def of(cls, text: str) -> Self:
        """Parses the value of POC_CALLBACK_ALLOW. Raises ValueError, which quotes the entry, if an
        entry is invalid.
        """
        kinds, hosts, networks = set(), set(), []
        for entry in filter(None, (part.strip().lower() for part in text.split(","))):
            if entry in KINDS:
                kinds.add(entry)
                continue
            with suppress(ValueError):
                networks.append(ipaddress.ip_network(entry, strict=False))
                continue
            try:
                hosts.add(canonical_host(entry))
            except ValueError:
                raise ValueError(
                    f"must list {', '.join(KINDS)}, host names, addresses or networks such as"
                    f" 10.0.0.0/8, with commas between; {entry!r} is none"
                ) from None
        return cls(frozenset(kinds), frozenset(hosts), tuple(networks))

    def check_url(self, url: str, node_ports: Own) -> None:
        """Raises ForbiddenReceiverError if callbacks to `url` are forbidden. Resolves no names."""
        parts = urlsplit(url)
        try:
            host = canonical_host(parts.hostname or "")
        except ValueError as error:
            raise ForbiddenReceiverError(f"No callback can go there: {error}.") from None
        address = literal_address(host)
        if host == "localhost" or host.endswith(".localhost"):
            address = ipaddress.IPv4Address("127.0.0.1")
        if address is not None:
            self.check(host, address, port_of(parts), node_ports)
        elif not self.kinds and not self.networks and host not in self.hosts:
            raise ForbiddenReceiverError(_not_allowed(host))

    def check(
        self,
        host: str,
        address: Address,
        port: int,
        node_ports: Own,
        is_own: Callable[[Address], bool] = is_of_this_machine,
    ) -> None:
        """Raises ForbiddenReceiverError if callbacks to `host` at this `address` are forbidden."""
        address = plain(address)
        if (address, port) in node_ports or (
            port in node_ports
            and (address.is_loopback or address.is_unspecified or is_own(address))
        ):
            raise ForbiddenReceiverError(
                f"Port {port} of {host} is the node's own; a callback's url names its receiver."
            )
        with suppress(ValueError):
            host = canonical_host(host)
        if host in self.hosts or any(address in network for network in self.networks):
            return
        if _kind_of(address) not in self.kinds:
            raise ForbiddenReceiverError(_not_allowed(host))


def _kind_of(address: Address) -> str:
    if (
        address.is_link_local
        or address.is_unspecified
        or address.is_multicast
        or address in _METADATA
    ):
        return "never unless named"
    if address.is_loopback:
        return "loopback"
    return "public" if address.is_global else "private"


def _not_allowed(host: str) -> str:
    return (
        f"Callbacks to {host} are not allowed here; the operator can allow it with"
        " POC_CALLBACK_ALLOW."
    )
