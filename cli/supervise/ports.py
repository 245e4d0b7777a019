"""The address on which an API will listen, tried before anything is started for it."""

import socket
from typing import Self

from cli.terminal import UsageError


class AddressError(UsageError):
    """Nothing can listen at this address; an option names another."""

    @classmethod
    def of(cls, host: str, port: int, error: OSError) -> Self:
        return cls(
            f"Cannot listen on {host} port {port} ({error.strerror}): stop what uses it, or choose"
            " another --port."
        )


def reserve_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. AddressError: nothing can listen there; says what to change."""
    if not 0 <= port <= 65535:
        raise AddressError(f"A port is a number from 0 to 65535, not {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As uvicorn does: an earlier run's connections in TIME_WAIT are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            chosen: int = probe.getsockname()[1]
    except OSError as error:
        raise AddressError.of(host, port, error) from error
    return chosen
