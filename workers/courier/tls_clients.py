"""Which client a callback goes by: one with the operator's certificates for the hosts named, else
the usual one."""

from __future__ import annotations

import ssl

import httpx

from poc_core.callback_tls import CallbackTls, PlainUrlError

# No limit on connections, which Places sets; none is kept, as another name's, or one with an
# earlier certificate, must not be taken for it.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class TlsClients:
    """For one event loop."""

    def __init__(self, usual: httpx.AsyncClient, tls: CallbackTls) -> None:
        self._usual = usual
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._named = usual

    def concerns(self, host: str) -> bool:
        """Whether the operator named this host."""
        return self._tls.concerns(host)

    def of(self, url: httpx.URL) -> httpx.AsyncClient:
        """For this url. CertificateError: the certificates cannot be used. PlainUrlError: it is no
        https."""
        if not self.concerns(url.host):
            return self._usual
        if url.scheme != "https":
            raise PlainUrlError(url.host)
        context = self._tls.context()
        if context is not self._context:
            # What is under way goes on by the one before, which keeps no connection when that is
            # over.
            self._context = context
            self._named = httpx.AsyncClient(verify=context, trust_env=False, limits=CONNECTIONS)
        return self._named

    def context(self, url: httpx.URL) -> ssl.SSLContext | None:
        """That of the host's connections; None: it is not named."""
        return self._context if self.concerns(url.host) else None

    async def close(self) -> None:
        await self._usual.aclose()
        if self._named is not self._usual:
            await self._named.aclose()
