"""Finds out whether a peer is in a private network (POC_TRUSTED_NETWORKS=private).

The addresses of gateways do not count as private, because Docker's port forwarding replaces the
addresses of external clients with its gateway's address. A request through a proxy is trusted only
if its peer and all forwarded addresses are trusted, so a forged address gains nothing.
"""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path

from cachetools.func import ttl_cache

Address = IPv4Address | IPv6Address

_PRIVATE = [
    ip_network(text)
    for text in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8"),
        *("fc00::/7", "::1/128"),
    )
]
_PROC_NET = Path("/proc/net")
_FRESH_S = 5.0
_WHOLE_IPV6 = 128  # bits of a route to one host
# Most addresses in forwarding headers: more than any chain of proxies has.
MOST_FORWARDED = 16


def is_private(address: Address) -> bool:
    """Returns True if an address is private or loopback, and not a gateway's address."""
    if not any(address in network for network in _PRIVATE):
        return False
    return address not in _recent_gateways()


@ttl_cache(maxsize=1, ttl=_FRESH_S)
def _recent_gateways() -> set[Address]:
    return gateways()


def gateways(proc_net: Path = _PROC_NET) -> set[Address]:
    """Returns the gateways of all routes, and the first address of each local network, which is the
    gateway of a Docker network.
    """
    found: set[Address] = set()
    for line in _lines(proc_net / "route")[1:]:
        words = line.split()
        to, gateway = (int.from_bytes(bytes.fromhex(word), "little") for word in words[1:3])
        if gateway or words[7] != "FFFFFFFF":  # a route to a single host leads to no network
            found.add(IPv4Address(gateway or (to + 1)))
    for line in _lines(proc_net / "ipv6_route"):
        words = line.split()
        gateway = int(words[4], 16)
        if gateway or int(words[1], 16) < _WHOLE_IPV6:
            found.add(IPv6Address(gateway or (int(words[0], 16) + 1)))
    return found - {ip_address("127.0.0.1"), ip_address("::1")}


def forwarded_for(headers: Iterable[tuple[bytes, bytes]]) -> list[Address | None]:
    """Returns the client addresses in X-Forwarded-For and X-Real-IP.

    The list has None for an unreadable address and for the header Forwarded. The list is [None] if
    there are more than MOST_FORWARDED addresses.
    """
    found: list[Address | None] = []
    for name, value in headers:
        if name == b"forwarded":
            found.append(None)
        if name in (b"x-forwarded-for", b"x-real-ip"):
            words = value.decode("latin-1").split(",", MOST_FORWARDED)
            found += [address_of(word) for word in words]
    return found if len(found) <= MOST_FORWARDED else [None]


def address_of(text: str) -> Address | None:
    """Parses an IP address; IPv4-mapped IPv6 becomes IPv4. None if `text` is no address."""
    try:
        address = ip_address(text.strip())
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another operating system, or no IPv6
        return []
