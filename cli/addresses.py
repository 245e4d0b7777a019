"""Parses and checks host names, addresses and ports given on the command line."""

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from cli.terminal import UsageError
from poc_core.callbacks import literal_address

_ALLOW = "POC_CALLBACK_ALLOW"


def receiver_settings(host: str, ports: Sequence[int], env: Mapping[str, str]) -> dict[str, str]:
    """Returns variables for the environment of the API and the courier: POC_API_PORT, and
    POC_CALLBACK_ALLOW if other hosts can reach the API and `env` does not set it.

    This POC_CALLBACK_ALLOW forbids callbacks to this host's loopback addresses.
    """
    settings = {"POC_API_PORT": " ".join(map(str, ports))}
    address = literal_address(host)
    if host != "localhost" and (address is None or not address.is_loopback) and not env.get(_ALLOW):
        settings[_ALLOW] = "public,private"
    return settings


def head_of(text: str) -> tuple[str, int]:
    """Parses the value of --head, such as "10.0.0.1:7070" or "[fd00::1]:7070", to host and port.

    Raises UsageError for any other form, and for an address that stands for all interfaces.
    """
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
            "--head names one address of the host with --rank 0, in a network that the engine's"
            f" hosts have for themselves; {host} is all of them."
        )
    return host, port
