"""Settings of the API: access, and limits of requests (SECURITY.md)."""

import re
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from poc_core.settings.theme import Theme, listed, parsed

# The entry of POC_TRUSTED_NETWORKS that means all private networks.
PRIVATE = "private"


def parse_ports(text: str) -> list[int]:
    """Parses one or more ports, separated by spaces. Raises ValueError, which says what is allowed,
    if the text has anything else.
    """
    ports = [int(part) if part.isdecimal() else 0 for part in text.split()]
    if not ports or not all(0 < port < 65536 for port in ports):
        raise ValueError("must be a port from 1 to 65535, or several with spaces between")
    return ports


def parse_networks(text: str) -> list[IPv4Network | IPv6Network]:
    """Parses comma-separated networks, and skips PRIVATE. Raises ValueError, which says what is
    allowed, if the text has anything else.
    """
    try:
        return [ip_network(entry) for entry in listed(text) if entry != PRIVATE]
    except ValueError:
        raise ValueError(
            "must be addresses or networks such as 10.0.0.0/8, or private, after commas"
        ) from None


def check_origins(text: str) -> None:
    """Raises ValueError unless the text lists origins of web pages."""
    if not all(re.fullmatch(r"https?://[^/?#@\s]+", origin) for origin in listed(text)):
        raise ValueError(
            "must be origins such as https://ui.example.org, without a path, after commas"
        )


class ApiSettings(Theme):
    """Access to the API, and its limits."""

    require_keys: Literal["auto", "always", "never"] = "auto"
    """When requests need a key (exceptions: SECURITY.md). auto: if the API listens beyond loopback.
    always. never."""
    cache_salt: Literal["auto", "always", "never"] = "auto"
    """When chat has a separate prefix cache for each client (key or address), so that response
    times do not reveal other clients' prompts. auto: if keys are required. always. never."""
    api_keys_file: Path = Path("~/.proofline/keys.json")
    """The API's keys, hashed. `proofline key` writes the file; the API rereads a changed file."""
    api_key: SecretStr | None = Field(None, min_length=16)
    """The key that commands send to an API. If the API itself has this variable, the key has all
    rights."""
    trusted_networks: Annotated[str, parsed(parse_networks)] = ""
    """Addresses and networks (CIDR, separated by commas) whose clients need no key, such as the
    network node's address. The entry private means loopback and private networks, except gateways
    (SECURITY.md)."""
    allowed_hosts: str = ""
    """Names by which clients may call the API, separated by commas (.example.org: all names below
    example.org; *: any name). Always allowed: addresses, this host's name, the name in --host,
    names without a dot, and names below localhost, local and internal."""
    allowed_origins: Annotated[str, parsed(check_origins)] = ""
    """Origins (https://ui.example.org, separated by commas) whose web pages may use the API. The
    API's own pages are always allowed."""
    max_requests_per_s: float | None = Field(None, gt=0)
    """Largest number of requests a second from one client (key or address); a burst may have ten
    times as many requests. Further requests get 429. Unset: unlimited."""
    max_waiting_requests: int = Field(256, ge=1)
    """Largest number of waiting requests with wait=true; further requests get 429."""
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1024)
    """Largest request body in bytes; a validation of 100,000 nonces has 11 MB."""
    api_port: Annotated[str, parsed(parse_ports)] = Field("8000", coerce_numbers_to_str=True)
    """The API's ports, separated by spaces, if no --port is given."""
