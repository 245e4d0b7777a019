"""Forwards OpenAI requests to the workers' vLLM servers, and forwards the answers unchanged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import quote
from weakref import WeakValueDictionary

import httpx
from anyio import to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.chat.chat_workers import ChatWorkers
from api.chat.chats import Chats
from api.chat.clients import TIMEOUT, Clients
from api.chat.prefixes import NO_PREFIX, Prefix, PrefixMemory
from api.chat.streams import KEEP_ALIVE_S, Headers, Sending, failure, first_events
from api.chat.suspects import RECENT_S, Engine, LostError, fingerprint
from api.errors import RETRY_AFTER_S
from poc_core.records import (
    ENGINE_LOST_HEADER,
    GATEWAY_CLIENT_HEADER,
    GATEWAY_SALT_HEADER,
    GATEWAY_SECRET_HEADER,
    WorkerRecord,
)
from poc_core.serving.openai_errors import error_body, error_event, said_by, shaped

log = logging.getLogger(__name__)

# Most bytes of an answer that needs no engine.
_LOOKUP_BYTES = 1024 * 1024
# Headers of a single connection (RFC 9110, 7.6.1), and headers that httpx or uvicorn create.
_HOP_HEADERS = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"host", b"date", b"server"),
}
_PRINTABLE = bytes(range(0x21, 0x7F))
# Request headers that only the gateway may set.
_SECRET, _CLIENT, _SALT = (
    name.encode() for name in (GATEWAY_SECRET_HEADER, GATEWAY_CLIENT_HEADER, GATEWAY_SALT_HEADER)
)
_OURS = {b"content-length", _SECRET, _CLIENT, _SALT}

Answer = tuple[httpx.Response, AsyncIterator[bytes]]  # an answer's head, and its body


@dataclass(frozen=True)
class ProxyRequest:
    """A client's complete request, which can be sent again if a worker dies."""

    method: str
    path: bytes  # raw, with the query
    headers: Headers
    body: bytes
    prefix: Prefix = NO_PREFIX
    client: str = ""  # the client's name, by which workers distinguish clients
    salt: str = ""  # of the prefix cache
    is_stream: bool = False  # the client asks for server-sent events
    by_id: bool = False  # the request names a stored answer, which perhaps only one worker has


class NoWorkerError(Exception):
    """None of the model's workers answered the request."""


class DeadlyRequestError(Exception):
    """The request is refused, because two engines died recently during equal requests."""


@dataclass
class _Losses:
    """Counts the engines that died during one request, which is sent to several workers in turn."""

    n: int = 0
    n_equal: int = 0  # engines that died recently during equal requests of all clients
    is_suspect: bool = False  # whether an engine died soon after this request was sent to it

    @property
    def are_deadly(self) -> bool:
        return max(self.n, self.n_equal) > 1


class _Way:
    """How far one request to a worker has come: connection opened, request sent, answer begun."""

    def __init__(self) -> None:
        self.is_new = False  # the connection was opened for this request
        self.was_sent = False  # the complete request was sent
        self.is_answered = False

    async def note(self, event: str, _: object) -> None:
        """Records an event of the request. Called by httpcore (its request extension `trace`)."""
        self.is_new |= event.startswith("connection.connect_")
        self.was_sent |= event == "http11.send_request_body.complete"
        self.is_answered |= event == "http11.receive_response_headers.complete"

    @property
    def worker_failed(self) -> bool:
        """Whether an error is the worker's: not if it had only closed an idle connection."""
        return self.is_new or self.is_answered


class Gateway:
    """Forwards requests to workers, and sends a request again if its worker dies.

    Prefers the worker whose prefix cache has the prompt's beginning, else the least busy worker.
    """

    def __init__(self, workers: ChatWorkers, chats: Chats) -> None:
        self.workers = workers
        self._chats = chats
        self._clients = Clients()
        self._active: Counter[str] = Counter()  # requests in progress of this process, by worker
        self._prefixes = PrefixMemory()
        # an entry lives as long as a request uses its engine
        self._engines = WeakValueDictionary[tuple[str, int | None], Engine]()

    async def close(self) -> None:
        await self._clients.close()

    def by_prefix(self, workers: Sequence[WorkerRecord], prefix: Prefix) -> list[WorkerRecord]:
        """Sorts workers in the order to try: first the worker that probably cached the prefix."""
        return self._prefixes.order(prefix, self.by_load(workers), self._active.__getitem__)

    def by_load(self, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
        """Sorts workers by this process's requests to them, then by the chats that they report."""

        def load(worker: WorkerRecord) -> tuple[int, float]:
            return self._active[worker.id], worker.stats.get("chat_active", 0)

        return sorted(workers, key=load)

    async def look_up(
        self, worker: WorkerRecord, path: bytes, headers: Headers, timeout_s: float
    ) -> httpx.Response:
        """Sends a worker a GET that needs no engine. Returns the answer. Raises httpx.HTTPError if
        no answer arrives in time, if the answer is too long, or if its status is none of HTTP.
        Raises httpx.InvalidURL or UnicodeError if the worker's host is not a host name.
        """
        sent = [*headers, *_secret(worker), (b"accept-encoding", b"identity")]
        try:
            async with asyncio.timeout(timeout_s):
                with self._clients.lend() as client:
                    while True:
                        way = _Way()
                        try:
                            return await _looked_up(client, _url(worker, path), sent, way)
                        except httpx.TransportError:
                            if way.worker_failed:
                                raise
        except TimeoutError:
            raise httpx.ReadTimeout(f"no answer within {timeout_s:g} s") from None

    @asynccontextmanager
    async def open(
        self, workers: Sequence[WorkerRecord], request: ProxyRequest
    ) -> AsyncIterator[Answer]:
        """Sends a request to one worker after another until one answers.

        Yields the answer's head, and its body for the client. Leaving the context early cancels the
        request. `workers`: one or more workers of one model, in the order to try. NoWorkerError if
        no worker answered, or if two engines died during this request. DeadlyRequestError if two
        engines died recently during an equal request.
        """
        if self.workers.deadly and await _fingerprint(request) in self.workers.deadly:
            raise DeadlyRequestError
        losses = _Losses()
        with self._chats.under_way(workers[0].model) as chat:
            for worker in workers:
                async with AsyncExitStack() as stack:
                    answer = await self._attempt(stack, worker, request, losses)
                    if losses.are_deadly:
                        break
                    if answer is None:
                        continue
                    response, _ = answer
                    if response.status_code == 404 and request.by_id and worker is not workers[-1]:
                        continue
                    if response.status_code >= 500:
                        chat.failed()
                    elif _is_stream(response):
                        chat.first_token()
                    yield answer
                    chat.ended()
                    return
            chat.failed()
        raise NoWorkerError

    async def _attempt(
        self, stack: AsyncExitStack, worker: WorkerRecord, request: ProxyRequest, losses: _Losses
    ) -> Answer | None:
        """Sends a request to a worker. Returns the answer; None if the worker did not answer.

        `stack`: collects the resources of the answer, which the caller closes later.
        """
        if not await self.workers.is_ready(worker.id):
            return None  # an earlier attempt took long; meanwhile this worker left or was revoked
        engine = self._engines.setdefault((worker.id, worker.port), Engine())
        stack.enter_context(self._counted(worker))
        self._prefixes.remember(request.prefix, worker.id)
        began_at = time.monotonic()
        try:
            async with engine.trial(request) if losses.is_suspect else nullcontext():
                began_at = time.monotonic()
                response, first, rest = await self._ask(stack, worker, request)
        except LostError as error:
            self.workers.lost(worker.id)
            log.warning("worker %s did not answer a chat request: %s", worker.id, error)
            if error.in_engine and not engine.was_ended_by_another(request):
                losses.n += 1
                if time.monotonic() - began_at < RECENT_S:
                    losses.is_suspect = True
                    losses.n_equal = await self._died_with(worker, request)
            return None
        body = self._body(worker, engine, request, response, first, rest, losses.is_suspect)
        return response, body

    async def _ask(
        self, stack: AsyncExitStack, worker: WorkerRecord, request: ProxyRequest
    ) -> tuple[httpx.Response, bytes, AsyncIterator[bytes]]:
        """Sends a request to a worker. Returns the answer's head, its first bytes, and its rest.

        The first bytes of a stream end with the first event that shows whether the answer failed.
        LostError if the worker did not answer.
        """
        client = stack.enter_context(self._clients.lend())
        was_sent = False
        while True:
            way = _Way()
            try:
                response = await client.send(_sent(worker, request, way), stream=True)
                stack.push_async_callback(_cancel, response)
                lost = response.headers.get(ENGINE_LOST_HEADER)
                if lost is not None:
                    raise LostError("its engine is lost", in_engine=lost != "0")
                if not _can_be_passed_on(response):
                    raise LostError(f"it answered {response.status_code}", in_engine=False)
                chunks = response.aiter_raw()
                first = await (first_events if _is_stream(response) else _next)(chunks)
                return response, first, chunks
            except httpx.TransportError as error:
                was_sent |= way.was_sent
                if way.worker_failed:
                    raise LostError(repr(error), was_sent) from error
            except (httpx.InvalidURL, UnicodeError) as error:  # POC_CHAT_ADVERTISE_HOST of its host
                raise LostError(repr(error), in_engine=False) from error

    async def _body(
        self,
        worker: WorkerRecord,
        engine: Engine,
        request: ProxyRequest,
        response: httpx.Response,
        first: bytes,
        rest: AsyncIterator[bytes],
        is_suspect: bool,
    ) -> AsyncIterator[bytes]:
        """Yields an answer's body for the client: `first`, then `rest`.

        If the worker dies, a stream ends with an error event. Any other answer raises
        httpx.TransportError, so that no client mistakes a partial answer for a complete one.
        `is_suspect`: another engine has died during this request.
        """
        is_stream, began_at = _is_stream(response), time.monotonic()
        # Only complete lines of a stream: half a line would break a following error event.
        held = b""
        chunk = first
        try:
            while chunk:
                end = chunk.rfind(b"\n") + 1 if is_stream else len(chunk)
                if end:
                    yield held + chunk[:end]
                    held = b""
                held += chunk[end:]
                chunk = await anext(rest, b"")
        except httpx.TransportError as error:
            log.warning("worker %s died in the middle of an answer: %r", worker.id, error)
            if not is_stream:
                raise
            is_recent = time.monotonic() - began_at < RECENT_S
            if is_recent and not engine.was_ended_by_another(request):
                await self._died_with(worker, request)
            event = error_body(
                502,
                "The worker that computed this answer was lost; send the request again.",
                "worker_lost",
            )
            # the first newline ends a truncated event
            yield b"\n" + error_event(shaped(_path_of(request), 502, event))
        else:
            if held:
                yield held
            if is_suspect:
                await self.workers.outlived(await _fingerprint(request))

    async def _died_with(self, worker: WorkerRecord, request: ProxyRequest) -> int:
        """Records that an engine died. Returns how many engines died during equal requests."""
        what = f"A request of {request.client} to {_path_of(request)[:80]}"
        return await self.workers.died_with(worker.id, await _fingerprint(request), what)

    @contextmanager
    def _counted(self, worker: WorkerRecord) -> Iterator[None]:
        self._active[worker.id] += 1
        try:
            yield
        finally:
            self._active[worker.id] -= 1
            if self._active[worker.id] <= 0:
                del self._active[worker.id]


class ProxiedAnswer(Response):
    """A response that forwards a worker's answer, until the client disconnects."""

    def __init__(
        self, gateway: Gateway, workers: Sequence[WorkerRecord], request: ProxyRequest
    ) -> None:
        """`workers`: one or more workers of one model, in the order to try."""
        super().__init__()
        self._gateway = gateway
        self._workers = workers
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = Sending(send)
        work = asyncio.create_task(self._pass_on(scope["path"], sending))
        others = [asyncio.create_task(_client_gone(receive))]
        if self._request.is_stream:
            others.append(asyncio.create_task(sending.keep_alive(KEEP_ALIVE_S)))
        try:
            await asyncio.wait({work, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, *others):
                if not task.done():
                    task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        with suppress(asyncio.CancelledError):
            await work

    async def _pass_on(self, path: str, sending: Sending) -> None:
        try:
            async with self._gateway.open(self._workers, self._request) as (answer, body):
                await _passed_on(path, answer, body, sending)
        except DeadlyRequestError:
            message = (
                "Two engines died while they computed this request: it is refused for ten minutes."
                " Change it, and tell the node's operator."
            )
            await sending.fail(400, shaped(path, 400, error_body(400, message)), [])
        except NoWorkerError:
            message = "No worker could answer; try again in some seconds."
            error = shaped(path, 503, error_body(503, message))
            retry_after = (b"retry-after", str(RETRY_AFTER_S).encode())
            await sending.fail(503, error, [retry_after])


async def _passed_on(
    path: str, answer: httpx.Response, body: AsyncIterator[bytes], sending: Sending
) -> None:
    """Forwards a worker's answer to the client. A stream that begins with an error becomes an HTTP
    error response, unless keep-alives were sent before.
    """
    first, failed = await _next(body), None
    if _is_stream(answer):
        failed = failure(path, first)
    elif sending.has_begun:  # the keep-alive began a stream before the worker refused
        said = b"".join([first, *[chunk async for chunk in body]])
        failed = answer.status_code, shaped(path, answer.status_code, said_by(said))
    if failed is not None:
        await sending.fail(*failed, [])
        return
    await sending.begin(answer.status_code, _end_to_end(answer.headers.raw))
    if first:
        await sending.go_on(first)
        async for chunk in body:
            await sending.go_on(chunk)
    await sending.end()


async def _looked_up(
    client: httpx.AsyncClient, url: httpx.URL, headers: Headers, way: _Way
) -> httpx.Response:
    body, trace = bytearray(), {"trace": way.note}
    call = client.stream("GET", url, headers=headers, timeout=None, extensions=trace)
    async with call as answer:
        if not _can_be_passed_on(answer):
            raise httpx.RemoteProtocolError(f"the status {answer.status_code}")
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > _LOOKUP_BYTES:
                raise httpx.ReadError(f"an answer of more than {_LOOKUP_BYTES} bytes")
    return httpx.Response(answer.status_code, content=bytes(body))


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    return await anext(chunks, b"")


def _can_be_passed_on(response: httpx.Response) -> bool:
    """Returns False if the API's server would refuse to send the response's status."""
    return 200 <= response.status_code < 600


def _is_stream(response: httpx.Response) -> bool:
    return bool(response.headers.get("content-type", "").startswith("text/event-stream"))


async def _cancel(response: httpx.Response) -> None:
    """Closes a worker's answer. If its body is not complete, the worker cancels the request."""
    with suppress(httpx.HTTPError):
        await response.aclose()


async def _client_gone(receive: Receive) -> None:
    """Waits until the client disconnects. Call it only after the request's body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _path_of(request: ProxyRequest) -> str:
    return request.path.partition(b"?")[0].decode("latin-1")


async def _fingerprint(request: ProxyRequest) -> str:
    return await to_thread.run_sync(fingerprint, request.path, request.body)


def _sent(worker: WorkerRecord, request: ProxyRequest, way: _Way) -> httpx.Request:
    # Not client.build_request, which adds headers such as accept-encoding. httpx sets the body's
    # length: the client's body may have come in chunks.
    headers = [header for header in _end_to_end(request.headers) if header[0].lower() not in _OURS]
    # A worker must see neither addresses nor names of keys.
    client = blake2b(request.client.encode(), digest_size=8).hexdigest().encode()
    salt = [(_SALT, request.salt.encode())] if request.salt else []
    return httpx.Request(
        request.method,
        _url(worker, request.path),
        headers=[*headers, *_secret(worker), (_CLIENT, client), *salt],
        content=request.body or None,
        extensions={"timeout": TIMEOUT.as_dict(), "trace": way.note},
    )


def _end_to_end(headers: Headers) -> Headers:
    """Removes hop-by-hop headers, including those that the header Connection names."""
    named = [value.split(b",") for name, value in headers if name.lower() == b"connection"]
    hop = _HOP_HEADERS | {token.strip().lower() for tokens in named for token in tokens}
    return [(name, value) for name, value in headers if name.lower() not in hop]


def _secret(worker: WorkerRecord) -> Headers:
    return [(_SECRET, worker.chat_secret.encode())] if worker.chat_secret else []


def _url(worker: WorkerRecord, path: bytes) -> httpx.URL:
    # Escape bytes that are not allowed in a URL but that some HTTP parsers accept.
    raw_path = quote(path, safe=_PRINTABLE).encode()
    return httpx.URL(
        scheme="http", host=worker.chat_host or "", port=worker.port, raw_path=raw_path
    )
