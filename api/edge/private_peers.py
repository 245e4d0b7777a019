"""Peers in private networks (POC_TRUSTED_NETWORKS=private), as in MLNode's Compose network.

A gateway is nobody's address: Docker's port forwarding shows the gateway in place of clients that
may be anywhere. A proxy's request counts as its clients', so a forwarded address only takes trust.
"""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path

Address = IPv4Address | IPv6Address

_PRIVATE = [
    ip_network(text)
    for text in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8"),
        *("fc00::/7", "::1/128"),
    )
]
_PROC_NET = Path("/proc/net")


def is_private(address: Address) -> bool:
    """Whether it is of a private network, or loopback, and no gateway."""
    return any(address in network for network in _PRIVATE) and address not in gateways()


def gateways(proc_net: Path = _PROC_NET) -> set[Address]:
    """The gateways of this machine's routes, and of its networks the addresses Docker gives one."""
    found: set[Address] = set()
    for line in _lines(proc_net / "route")[1:]:
        to, gateway = (int.from_bytes(bytes.fromhex(word), "little") for word in line.split()[1:3])
        found.add(IPv4Address(gateway or (to + 1)))
    for line in _lines(proc_net / "ipv6_route"):
        words = line.split()
        found.add(IPv6Address(int(words[4], 16) or (int(words[0], 16) + 1)))
    return found - {ip_address("127.0.0.1"), ip_address("::1")}


def forwarded_for(headers: Iterable[tuple[bytes, bytes]]) -> list[Address | None]:
    """The addresses that proxies name; None for one that cannot be read."""
    found: list[Address | None] = []
    for name, value in headers:
        if name == b"forwarded":
            found.append(None)
        if name in (b"x-forwarded-for", b"x-real-ip"):
            found += [address_of(word) for word in value.decode("latin-1").split(",")]
    return found


def address_of(text: str) -> Address | None:
    try:
        address = ip_address(text.strip())
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system, or no IPv6
        return []
