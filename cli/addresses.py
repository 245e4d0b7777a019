"""Parses and checks host names, addresses and ports given on the command line."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from cli.terminal import UsageError
from poc_core.callbacks import literal_address

_ALLOW = "POC_CALLBACK_ALLOW"


def receiver_settings(host: str, ports: Sequence[int], env: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables that limit the addresses to which callbacks may be sent.

    POC_API_PORT: the API's ports, to which no callback may be sent. POC_CALLBACK_ALLOW: forbids
    callbacks to loopback addresses; left out if `host` is loopback or if `env` already sets it.
    """
    settings = {"POC_API_PORT": " ".join(map(str, ports))}
    address = literal_address(host)
    if host != "localhost" and (address is None or not address.is_loopback) and not env.get(_ALLOW):
        settings[_ALLOW] = "public,private"
    return settings


def head_of(text: str) -> tuple[str, int]:
    """Parses --head ("10.0.0.1:7070" or "[fd00::1]:7070") to (host, port). Raises UsageError."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.netloc != text or "@" in text:
        raise UsageError(f"--head is HOST:PORT, as in 10.0.0.1:7070, not {text!r}.")
    address = literal_address(host)
    if address is not None and address.is_unspecified:
        raise UsageError(
            "--head names one address of the host with --rank 0, in a private network of the"
            f" engine's hosts; {host} means all addresses."
        )
    return host, port
