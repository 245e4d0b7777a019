"""HTTP clients for callbacks, with the operator's certificates and proxy."""

import ssl

import httpx

from poc_core import callback_tls
from poc_core.callbacks import Address

# Not kept alive: a connection must not be used for another name or certificate.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class TlsClients:
    """The HTTP clients of one event loop, with or without the operator's certificates and proxy."""

    def __init__(
        self, usual: httpx.AsyncClient, tls: callback_tls.CallbackTls, proxy: str | None = None
    ) -> None:
        self._tls = tls
        self._proxy = proxy
        self._context: ssl.SSLContext | None = None
        self._made: dict[tuple[ssl.SSLContext | None, str | None], httpx.AsyncClient] = {
            (None, None): usual
        }

    def concerns(self, host: str) -> bool:
        """Returns True if POC_CALLBACK_TLS_HOSTS names this host."""
        return self._tls.concerns(host)

    def of(self, url: httpx.URL, address: Address) -> httpx.AsyncClient:
        """Returns the HTTP client for a url at an address. Raises CertificateError if the
        operator's certificates are unusable, PlainUrlError if the host requires https, or
        httpx.ConnectError for an IPv6 address behind the proxy, which httpx formats wrongly.
        """
        context, proxy = None, self._proxy if self.is_proxied(address) else None
        if proxy and address.version == 6:
            raise httpx.ConnectError("IPv6 addresses are not reached through a proxy")
        if self.concerns(url.host):
            if url.scheme != "https":
                raise callback_tls.PlainUrlError(url.host)
            context = self._tls.context()
            if context is not self._context:
                # Requests in progress end on the earlier clients, which keep no connections alive.
                for key in [key for key in self._made if key[0] is not None]:
                    del self._made[key]
                self._context = context
        if (context, proxy) not in self._made:
            self._made[context, proxy] = httpx.AsyncClient(
                verify=context or True, proxy=proxy, trust_env=False, limits=CONNECTIONS
            )
        return self._made[context, proxy]

    def is_proxied(self, address: Address) -> bool:
        """Returns True if requests to this address use the operator's proxy."""
        return self._proxy is not None and address.is_global

    def context(self, url: httpx.URL) -> ssl.SSLContext | None:
        """Returns the TLS context for the url's host; None if the host has no TLS settings."""
        return self._context if self.concerns(url.host) else None

    async def close(self) -> None:
        for client in self._made.values():
            await client.aclose()
