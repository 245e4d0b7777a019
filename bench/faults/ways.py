"""The connections between the parts of a campaign: without TLS, or with TLS where possible."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from bench.faults.work import TIMEOUT_S
from bench.harness.tls_front import tls_front
from tests.certificates import HOST, make_certificate
from tests.stacks.tls_redis import tls_redis

Client = Callable[[], httpx.Client]


@dataclass(frozen=True)
class Ways:
    """The urls and TLS contexts of a campaign."""

    redis_url: str | None = None  # None: the stack starts a Redis
    env: Mapping[str, str] = field(default_factory=dict)
    receiver: ssl.SSLContext | None = None
    front: ssl.SSLContext | None = None
    clients: ssl.SSLContext | bool = True

    def client_of(self, exits: ExitStack, port: int) -> Client:
        """Returns a function that makes clients of the API; its proxy ends with `exits`."""
        url = f"http://{HOST}:{port}"
        if self.front is not None:
            url = f"https://{HOST}:{exits.enter_context(tls_front(port, self.front))}"
        told = {"base_url": url, "timeout": TIMEOUT_S, "trust_env": False}
        return partial(httpx.Client, verify=self.clients, **told)  # type: ignore[arg-type]


@contextmanager
def by_tls(folder: Path) -> Iterator[Ways]:
    """Yields TLS for Redis, and mutual TLS for callbacks and clients; skips without a TLS Redis."""
    names = ("node", "receiver", "front", "client")
    pairs = {name: make_certificate(folder, name) for name in names}
    both = folder / "node.both"
    both.write_text("".join(path.read_text() for path in pairs["node"]))
    clients = ssl.create_default_context(cafile=pairs["front"][0])
    clients.load_cert_chain(*pairs["client"])
    with tls_redis(folder) as redis:
        yield Ways(
            redis.trusting_url,
            {
                "POC_CALLBACK_TLS_HOSTS": HOST,
                "POC_CALLBACK_CLIENT_CERT": str(both),
                "POC_CALLBACK_TRUSTED_CERTS": str(pairs["receiver"][0]),
            },
            _taking(pairs["receiver"], pairs["node"][0]),
            _taking(pairs["front"], pairs["client"][0]),
            clients,
        )


def _taking(own: tuple[Path, Path], only: Path) -> ssl.SSLContext:
    """Returns the context of a server that accepts only clients with the certificate `only`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*own)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(only)
    return context
