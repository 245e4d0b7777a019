"""Sends a payload to its receiver once, and reports the result."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

import httpx
from cachetools import LRUCache

from poc_core import callback_tls, callbacks
from poc_core.errors import ForbiddenReceiverError
from poc_core.state.outbox import Delivery
from workers.courier.tls_clients import TlsClients

# Seconds that a try may take, from name resolution to the status line (protocol.md, section 6).
DEADLINE_S = 10.0
# Seconds until the next address of a name is tried in parallel (RFC 8305), and the most addresses.
_STAGGER_S = 0.25
_MOST_ADDRESSES = 32
# Receivers whose last working address is remembered.
_MOST_REMEMBERED = 1000
# Bytes passed to a connection at a time.
_PIECE = 64 * 1024

# The only text for clients about a silent receiver: details would let them scan the network.
UNREACHABLE = (
    f"The receiver could not be reached or did not answer within {DEADLINE_S:g} s; see the"
    " courier's log."
)

# Also for clients; only the log names the files.
NO_CERTIFICATES = (
    "The node's certificates for callbacks cannot be used (POC_CALLBACK_CLIENT_CERT, "
    "POC_CALLBACK_TRUSTED_CERTS); see the courier's log."
)

T = TypeVar("T")

# Resolves a name in a thread: (name, port) -> the result of socket.getaddrinfo.
Lookup = Callable[[str, int], Sequence[tuple[Any, ...]]]


def _look_up(name: str, port: int) -> Sequence[tuple[Any, ...]]:
    return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)


class End(Enum):
    """The result of one attempt to deliver a payload."""

    TAKEN = "taken"
    REFUSED = "refused"  # the receiver answered with another status than 2xx
    TOO_LARGE = "too large"  # the receiver answered 413, or took too long to read the payload
    GONE = "gone"  # the receiver answered 410: it wants no more payloads
    SILENT = "silent"  # no answer
    FORBIDDEN = "forbidden"  # nothing was sent


class Result(NamedTuple):
    end: End
    said: str = ""  # text for clients
    details: str = ""  # text for the log
    retry_after_s: float | None = None  # from a refusal's Retry-After header


class Poster:
    """A client that sends payloads to receivers. Belongs to one event loop."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        policy: callbacks.CallbackPolicy,
        node_ports: Callable[[], callbacks.Own] = frozenset,
        lookup: Lookup = _look_up,
        deadline_s: float = DEADLINE_S,
        tls: callback_tls.CallbackTls | None = None,
        proxy: str | None = None,
    ) -> None:
        """`node_ports()` returns the node's own ports, to which nothing is sent. `tls`: settings
        for the hosts in POC_CALLBACK_TLS_HOSTS. `proxy`: url of an HTTP proxy for public addresses.
        """
        self._clients = TlsClients(
            client, tls or callback_tls.CallbackTls(callback_tls.NO_TLS), proxy
        )
        self._good: LRUCache[str, callbacks.Address] = LRUCache(_MOST_REMEMBERED)  # by receiver
        self._policy = policy
        self._node_ports = node_ports
        self._lookup = lookup
        self._deadline_s = deadline_s
        # Name resolution may block for long; jobs must not block rounds.
        self._threads = {
            is_round: ThreadPoolExecutor(16, "courier-names") for is_round in (True, False)
        }

    async def close(self) -> None:
        await self._clients.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    async def post(self, delivery: Delivery) -> Result:
        """Sends the payload once, and returns the result within the deadline. Never raises."""
        sending = _Sending(delivery.body)
        try:
            async with asyncio.timeout(self._deadline_s):
                status, retry_after_s = await self._status(delivery, sending)
        except callback_tls.CertificateError as error:
            return Result(End.FORBIDDEN, NO_CERTIFICATES, str(error))
        except callback_tls.PlainUrlError as error:
            return Result(End.FORBIDDEN, str(error), str(error))
        except callback_tls.HandshakeError as error:  # no secret: any client can try the handshake
            said = f"No TLS with {callbacks.redacted(delivery.url)}: {error}."
            return Result(End.SILENT, said, said)
        except ForbiddenReceiverError as error:
            return Result(
                End.FORBIDDEN,
                "The receiver's address is not allowed (POC_CALLBACK_ALLOW).",
                str(error),
            )
        except TimeoutError:
            if 0 < sending.n_sent < len(delivery.body):
                details = f"{sending.n_sent} of {len(delivery.body)} bytes were sent in time"
                return Result(End.TOO_LARGE, UNREACHABLE, details)
            return Result(End.SILENT, UNREACHABLE, f"no answer within {self._deadline_s:g} s")
        except Exception as error:
            # Any exception, because bad urls raise more than httpx's errors.
            details = callbacks.without_secret(f"{type(error).__name__}: {error}", delivery.url)
            return Result(End.SILENT, UNREACHABLE, details)
        if 200 <= status < 300:
            return Result(End.TAKEN)
        said = f"{callbacks.redacted(delivery.url)} answered {status}"
        if status == 400 and self._clients.concerns(httpx.URL(delivery.url).host):
            said += "; a proxy that gets no certificate answers 400 (POC_CALLBACK_CLIENT_CERT)"
        end = {410: End.GONE, 413: End.TOO_LARGE}.get(status, End.REFUSED)
        return Result(end, said, said, retry_after_s)

    async def _status(self, delivery: Delivery, sending: _Sending) -> tuple[int, float | None]:
        """Sends the payload to an allowed address. Returns the answer's HTTP status, and the
        seconds in its Retry-After header. ForbiddenReceiverError if no address is allowed.
        """
        url = httpx.URL(delivery.url)
        port = url.port or {"https": 443}.get(url.scheme, 80)
        host, receiver = callbacks.canonical_host(url.host), callbacks.receiver_of(delivery.url)
        node_ports = self._node_ports()
        allowed = []
        problem = ForbiddenReceiverError(f"{host} has no address")
        for address in await self._addresses(url.raw_host.decode(), port, delivery.is_round):
            try:
                self._policy.check(host, address, port, node_ports)
                allowed.append(address)
            except ForbiddenReceiverError as error:
                problem = error
        if not allowed:
            raise problem
        good = self._good.pop(receiver, None)
        allowed.sort(key=lambda address: address != good)  # the last working address comes first
        exchange = partial(self._exchange, delivery, url, host, sending)
        address, answer = await _race(exchange, allowed[:_MOST_ADDRESSES], self._deadline_s)
        self._good[receiver] = address
        return answer

    async def _raise_of_tls(
        self, error: Exception, url: httpx.URL, address: callbacks.Address
    ) -> None:
        """Raises HandshakeError if certificates caused `error` and the host has TLS settings.
        Repeats the handshake if `error` may hide that the receiver refused a certificate.
        """
        context = self._clients.context(url)
        if context is None:
            return
        why = callback_tls.handshake_problem(error)
        is_lost = why is None and not isinstance(error, httpx.ConnectError)
        if is_lost and not self._clients.is_proxied(address):
            port, loop = url.port or 443, asyncio.get_running_loop()
            ask = partial(callback_tls.try_handshake, context, str(address), port, url.host)
            why = await loop.run_in_executor(self._threads[True], ask)
        if why is not None:
            raise callback_tls.HandshakeError(why) from error

    async def _addresses(self, host: str, port: int, is_round: bool) -> list[callbacks.Address]:
        address = callbacks.literal_address(host)
        if address is not None:
            return [address]
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads[is_round], self._lookup, host, port)
        addresses = [callbacks.literal_address(str(entry[-1][0])) for entry in found]
        return list(dict.fromkeys(address for address in addresses if address is not None))

    async def _exchange(
        self,
        delivery: Delivery,
        url: httpx.URL,
        host: str,
        sending: _Sending,
        address: callbacks.Address,
        begin: Callable[[], None],
    ) -> tuple[int, float | None]:
        """Sends the request to one address. Returns the answer's status and Retry-After, as
        `_status` does. Calls `begin` when connected, before anything is sent.
        """

        async def trace(event: str, info: dict[str, Any]) -> None:
            is_to_proxy = info.get("request") and info["request"].method == b"CONNECT"
            if event.endswith("send_request_headers.started") and not is_to_proxy:
                begin()

        headers = {
            "Host": url.copy_with(host=host).netloc.decode(),
            "Content-Type": "application/json",
            "Content-Length": str(len(delivery.body)),
            "X-Payload-Id": delivery.payload_id,
        }
        extensions: dict[str, Any] = {"trace": trace}
        # The connection goes to the checked address; the name is not resolved again. A proxy gets
        # the name of an https url, because httpcore checks certificates behind a proxy by the url.
        target = str(address)
        if callbacks.literal_address(host) is None:
            if url.scheme == "https" and self._clients.is_proxied(address):
                target = host
            else:
                extensions["sni_hostname"] = host
        try:
            # Only the status matters. A stream avoids reading a body, which may be endless.
            async with self._clients.of(url, address).stream(
                "POST",
                url.copy_with(host=target, username="", password=""),
                content=sending.pieces(),
                headers=headers,
                auth=httpx.BasicAuth(url.username, url.password) if url.userinfo else None,
                timeout=None,  # the complete try has a deadline
                extensions=extensions,
            ) as response:
                return response.status_code, _retry_after_s(response.headers.get("Retry-After"))
        # A refusal during sending is not an httpx error.
        except (httpx.TransportError, ssl.SSLError) as error:
            await self._raise_of_tls(error, url, address)
            raise


async def _race(
    exchange: Callable[[callbacks.Address, Callable[[], None]], Coroutine[Any, Any, T]],
    addresses: Sequence[callbacks.Address],
    deadline_s: float,
) -> tuple[callbacks.Address, T]:
    """Sends the request to the first address that accepts a connection. Returns this address and
    the answer. Tries the addresses in order, each when the one before it failed or has not
    connected for some time. The first connection cancels the other tries. If no address connects,
    raises a HandshakeError if one occurred, else the last error.
    """
    problem: BaseException | None = None
    tasks: dict[asyncio.Task[T], callbacks.Address] = {}
    chosen: asyncio.Task[T] | None = None

    def begin() -> None:
        nonlocal chosen
        chosen = asyncio.current_task()
        for task in tasks:
            if task is not chosen:
                task.cancel()

    waiting = list(addresses)
    stagger_s = min(_STAGGER_S, deadline_s / 2 / len(addresses))
    try:
        while True:
            if waiting and chosen is None:
                address = waiting.pop(0)
                tasks[asyncio.ensure_future(exchange(address, begin))] = address
            patience_s = stagger_s if waiting and chosen is None else None
            done, _ = await asyncio.wait(
                tasks, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                address = tasks.pop(task)
                if task.cancelled():
                    continue
                error = task.exception()
                if error is None:
                    return address, task.result()
                problem = problem if isinstance(problem, callback_tls.HandshakeError) else error
                if task is chosen or not (waiting or tasks):
                    raise problem
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _retry_after_s(text: str | None) -> float | None:
    """Returns the seconds in a Retry-After header (number or date); None if they are unreadable."""
    try:
        return float(int(text or ""))
    except (ValueError, OverflowError):
        pass
    try:
        return (parsedate_to_datetime(text or "") - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None


class _Sending:
    """A request body, sent piece by piece. `n_sent`: bytes that the receiver may have received."""

    def __init__(self, body: bytes) -> None:
        self._body = memoryview(body)
        self.n_sent = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        self.n_sent = 0
        for first in range(0, len(self._body), _PIECE):
            piece = bytes(self._body[first : first + _PIECE])
            self.n_sent = min(len(self._body), first + len(piece))
            yield piece
