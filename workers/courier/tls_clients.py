"""The HTTP client of each callback: with certificates and proxy as the operator says."""

from __future__ import annotations

import ssl

import httpx

from poc_core.callback_tls import CallbackTls, PlainUrlError
from poc_core.callbacks import Address

# Places limits connections. None is kept: it must not serve another name or certificate.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class TlsClients:
    """The clients of one event loop: a usual one, and ones with the operator's certificates, each
    with and without the operator's proxy.
    """

    def __init__(
        self, usual: httpx.AsyncClient, tls: CallbackTls, proxy: str | None = None
    ) -> None:
        self._tls = tls
        self._proxy = proxy
        self._context: ssl.SSLContext | None = None
        self._made: dict[tuple[ssl.SSLContext | None, str | None], httpx.AsyncClient] = {
            (None, None): usual
        }

    def concerns(self, host: str) -> bool:
        """True if the operator named this host."""
        return self._tls.concerns(host)

    def of(self, url: httpx.URL, address: Address) -> httpx.AsyncClient:
        """The client for this url. CertificateError: bad certificates. PlainUrlError: not https.

        httpx.ConnectError: httpx names no IPv6 address to a proxy as it should.
        """
        context, proxy = None, self._proxy if self.is_proxied(address) else None
        if proxy and address.version == 6:
            raise httpx.ConnectError("IPv6 addresses are not reached through a proxy")
        if self.concerns(url.host):
            if url.scheme != "https":
                raise PlainUrlError(url.host)
            context = self._tls.context()
            if context is not self._context:
                # What is under way ends on the earlier clients, which keep no connection.
                for key in [key for key in self._made if key[0] is not None]:
                    del self._made[key]
                self._context = context
        if (context, proxy) not in self._made:
            self._made[context, proxy] = httpx.AsyncClient(
                verify=context or True, proxy=proxy, trust_env=False, limits=CONNECTIONS
            )
        return self._made[context, proxy]

    def is_proxied(self, address: Address) -> bool:
        """True if the operator's proxy connects to this address."""
        return self._proxy is not None and address.is_global

    def context(self, url: httpx.URL) -> ssl.SSLContext | None:
        """The TLS context of the host's connections; None: the host is not named."""
        return self._context if self.concerns(url.host) else None

    async def close(self) -> None:
        for client in self._made.values():
            await client.aclose()
