"""A receiver of callbacks: whether the policy allows it, and whether anybody answers there."""

import ipaddress
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
from pydantic import TypeAdapter, ValidationError

from cli.examine.findings import Finding, ok, problem
from poc_core.callbacks import port_of, redacted
from poc_core.errors import ForbiddenReceiverError
from poc_core.fields import HttpUrl
from poc_core.settings import Settings

_ANSWER_S = 10.0  # as the courier waits


def receiver(url: str, settings: Settings) -> Iterator[Finding]:
    """A look without a payload: GET instead of POST, whose answer may well be 404 or 405."""
    shown = redacted(url)
    try:
        TypeAdapter(HttpUrl).validate_python(url)
    except ValidationError as error:
        says = error.errors(include_url=False, include_input=False)[0]["msg"]
        yield problem(
            "receiver",
            f"{shown}: {says}.",
            "Correct the url: http://host:port/path, nothing after it.",
        )
        return
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        settings.callbacks.check_url(url, settings.own_ports)
        for address in _addresses(host, port_of(parts)):
            settings.callbacks.check(
                host, ipaddress.ip_address(address), port_of(parts), settings.own_ports
            )
    except ForbiddenReceiverError as error:
        remedy = "POC_CALLBACK_ALLOW, for API and courier alike: docs/operating.md, Receivers."
        yield problem("receiver", str(error), remedy)
        return
    except OSError as error:
        yield problem(
            "receiver",
            f"No address is known for {host} ({error}).",
            "Correct the name, or look at the DNS.",
        )
        return
    try:
        status = httpx.get(url, timeout=_ANSWER_S, trust_env=False).status_code
    except httpx.HTTPError as error:
        says = f"{shown} cannot be reached from here ({error or type(error).__name__})."
        yield problem(
            "receiver", says, "Start the receiver; look at the firewall between it and the courier."
        )
        return
    yield ok("receiver", f"{shown} answers (GET: {status})")


def _addresses(host: str, port: int) -> list[str]:
    """Without a scope, which no policy knows."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]).partition("%")[0] for *_, address in found]
