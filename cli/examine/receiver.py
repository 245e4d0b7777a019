"""Checks a receiver of callbacks: whether the node may call its address, and whether it answers."""

import ipaddress
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
from pydantic import TypeAdapter, ValidationError
from redis.exceptions import RedisError

from cli.examine.findings import Finding, Subject
from poc_core import callback_tls, callbacks
from poc_core.errors import ForbiddenReceiverError
from poc_core.fields import HttpUrl
from poc_core.settings import Settings
from poc_core.state.client import connect
from poc_core.state.registry import WorkerRegistry
from workers.courier.main import NodePorts

_RECEIVER = Subject("receiver")

_ANSWER_S = 10.0  # as long as the courier waits
_REDIS_S = 2.0
_UNTRUSTED = (
    "The receiver's certificate is not trusted: POC_CALLBACK_TLS_HOSTS and"
    " POC_CALLBACK_TRUSTED_CERTS, docs/connect.md, Callbacks."
)
_AWAY = "Start the receiver; look at the firewall between it and the courier."
_BOTH = "Give each side the other's certificate: docs/connect.md, Mutual TLS."


def receiver(url: str, settings: Settings) -> Finding:
    """Checks that the node may call the receiver, that TLS works, and that a GET is answered."""
    shown = callbacks.redacted(url)
    try:
        TypeAdapter(HttpUrl).validate_python(url)
    except ValidationError as error:
        says = error.errors(include_url=False, include_input=False)[0]["msg"]
        return _RECEIVER.problem(
            f"{shown}: {says}.", "Correct the url: http://host:port/path, nothing after it."
        )
    parts = urlsplit(url)
    host, port = parts.hostname or "", callbacks.port_of(parts)
    try:
        settings.callbacks.check_url(url, settings.node_ports)
        own = _node_ports(settings)
        addresses = _addresses(host, port)
        for address in addresses:
            settings.callbacks.check(host, ipaddress.ip_address(address), port, own)
    except ForbiddenReceiverError as error:
        remedy = "POC_CALLBACK_ALLOW, for API and courier alike: docs/connect.md, Receivers."
        return _RECEIVER.problem(str(error), remedy)
    except OSError as error:
        return _RECEIVER.problem(
            f"No address is known for {host} ({error}).", "Correct the name, or look at the DNS."
        )
    tls = callback_tls.CallbackTls(settings.callback_tls)
    is_named = tls.concerns(host)
    if is_named and parts.scheme != "https":
        return _RECEIVER.problem(
            str(callback_tls.PlainUrlError(host)), "Correct the url, or the setting."
        )
    try:
        verify = tls.context() if is_named else True
        if isinstance(verify, ssl.SSLContext):
            for address in addresses:
                if why := callback_tls.try_handshake(verify, address, port, host):
                    return _RECEIVER.problem(f"No TLS with {shown}: {why}.", _BOTH)
        proxy = _proxy(settings, addresses)
        answer = httpx.get(url, timeout=_ANSWER_S, trust_env=False, verify=verify, proxy=proxy)
    except callback_tls.CertificateError as error:
        return _RECEIVER.problem(str(error), "Correct the file: docs/connect.md, Mutual TLS.")
    except httpx.HTTPError as error:
        says = f"{shown} cannot be reached from here ({error or type(error).__name__})."
        is_untrusted = "CERTIFICATE_VERIFY_FAILED" in str(error)
        return _RECEIVER.problem(says, _UNTRUSTED if is_untrusted else _AWAY)
    if is_named and answer.status_code == 400 and "SSL certificate" in answer.text:
        says = f"{shown} does not take the node's certificate (POC_CALLBACK_CLIENT_CERT)."
        return _RECEIVER.problem(says, _BOTH)
    how = "by TLS with the configured certificates" if is_named else f"GET: {answer.status_code}"
    return _RECEIVER.ok(f"{shown} answers ({how})")


def _proxy(settings: Settings, addresses: Iterable[str]) -> str | None:
    """Returns the url of the proxy that the courier uses for `addresses`; None if it uses none."""
    if settings.callback_proxy is None or not all(
        ipaddress.ip_address(address).is_global for address in addresses
    ):
        return None
    return settings.callback_proxy.get_secret_value()


def _node_ports(settings: Settings) -> callbacks.Own:
    """Returns the node's own ports: those in the settings and, if Redis answers, in Redis."""
    redis = connect(settings, patient=False, timeout_s=_REDIS_S)
    own = NodePorts.of(settings, WorkerRegistry(redis, settings))
    with suppress(RedisError):
        own.look()
    redis.close()
    return own.now()


def _addresses(host: str, port: int) -> list[str]:
    """Resolves a host name to IP addresses. Scopes of IPv6 addresses (%eth0) are removed."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]).partition("%")[0] for *_, address in found]
