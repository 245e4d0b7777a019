"""The HTTP client of each callback: with the operator's certificates for the hosts named."""

from __future__ import annotations

import ssl

import httpx

from poc_core.callback_tls import CallbackTls, PlainUrlError

# Places limits connections. None is kept: it must not serve another name or certificate.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class TlsClients:
    """The clients of one event loop: a usual one, and one with the operator's certificates."""

    def __init__(self, usual: httpx.AsyncClient, tls: CallbackTls) -> None:
        self._usual = usual
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._named = usual

    def concerns(self, host: str) -> bool:
        """Whether the operator named this host."""
        return self._tls.concerns(host)

    def of(self, url: httpx.URL) -> httpx.AsyncClient:
        """The client for this url. CertificateError: bad certificates. PlainUrlError: not https."""
        if not self.concerns(url.host):
            return self._usual
        if url.scheme != "https":
            raise PlainUrlError(url.host)
        context = self._tls.context()
        if context is not self._context:
            # What is under way ends on the earlier client, which keeps no connection afterwards.
            self._context = context
            self._named = httpx.AsyncClient(verify=context, trust_env=False, limits=CONNECTIONS)
        return self._named

    def context(self, url: httpx.URL) -> ssl.SSLContext | None:
        """The TLS context of the host's connections; None: the host is not named."""
        return self._context if self.concerns(url.host) else None

    async def close(self) -> None:
        await self._usual.aclose()
        if self._named is not self._usual:
            await self._named.aclose()
