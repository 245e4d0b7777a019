"""Checks that the API can listen on its address, before anything is started."""

import socket
from typing import Self

from cli.terminal import UsageError


class AddressError(UsageError):
    """A server cannot listen on the requested address."""

    @classmethod
    def of(cls, host: str, port: int, error: OSError) -> Self:
        return cls(
            f"Cannot listen on {host} port {port} ({error.strerror}): stop what uses it, or choose"
            " another --port."
        )


def reserve_port(host: str, port: int) -> int:
    """Returns `port`, or a free port if `port` is 0. AddressError if no server can listen there."""
    with bound(host, port) as probe:
        chosen: int = probe.getsockname()[1]
    return chosen


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket bound to `host` and `port` (0: any free port). Raises AddressError."""
    if not 0 <= port <= 65535:
        raise AddressError(f"A port is a number from 0 to 65535, not {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            # Connections of an earlier run in TIME_WAIT must not block the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except UnicodeError as error:  # of IDNA
        raise AddressError(f"{host} is no address or host name; choose another --host.") from error
    except OSError as error:
        raise AddressError.of(host, port, error) from error
    return listener
