"""Carries OpenAI requests to the workers' OpenAI servers and the answers back, byte for byte."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import quote
from weakref import WeakValueDictionary

import httpx
from anyio import to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.chat.chat_workers import ChatWorkers
from api.chat.clients import TIMEOUT, Clients
from api.chat.prefixes import NO_PREFIX, Prefix, PrefixMemory
from api.chat.streams import KEEP_ALIVE_S, Headers, Sending, failure, first_events
from api.chat.suspects import RECENT_S, Engine, LostError, fingerprint
from api.errors import RETRY_AFTER_S
from api.seen.chats import Chats
from poc_core.records import (
    ENGINE_LOST_HEADER,
    GATEWAY_CLIENT_HEADER,
    GATEWAY_SALT_HEADER,
    GATEWAY_SECRET_HEADER,
    WorkerRecord,
)
from poc_core.serving.openai_errors import error_body, error_event, said_by, shaped

log = logging.getLogger(__name__)

# Seconds for what a worker knows without its engine.
_LOOKUP_TIMEOUT_S = 5.0
# Headers of one connection (RFC 9110, 7.6.1), and those that httpx or uvicorn make.
_HOP_HEADERS = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"expect",
    b"host",
    b"date",
    b"server",
}
_PRINTABLE = bytes(range(0x21, 0x7F))
# Headers of a request to a worker that only the gateway may set.
_OURS = {
    b"content-length",
    GATEWAY_SECRET_HEADER.encode(),
    GATEWAY_CLIENT_HEADER.encode(),
    GATEWAY_SALT_HEADER.encode(),
}


@dataclass(frozen=True)
class ProxyRequest:
    """A client's request, whole, so that another worker can get it when the first one dies."""

    method: str
    path: bytes  # with query, as it goes over the wire
    headers: Headers
    body: bytes
    prefix: Prefix = NO_PREFIX
    client: str = ""  # who asks, as workers tell clients apart
    salt: str = ""  # of the prefix cache
    is_stream: bool = False  # the client asks for events
    by_id: bool = False  # it names an answer that one of the workers may keep


class NoWorkerError(Exception):
    """No worker of the model answered."""


class DeadlyRequestError(Exception):
    """Two engines died lately while they had this request."""


class _Way:
    """How far a request came."""

    def __init__(self) -> None:
        self.is_new = False  # its connection
        self.was_sent = False  # as a whole
        self.is_answered = False

    async def note(self, event: str, _: object) -> None:
        """Records events of a request that httpcore reports (its extension `trace`)."""
        self.is_new |= event.startswith("connection.connect_")
        self.was_sent |= event == "http11.send_request_body.complete"
        self.is_answered |= event == "http11.receive_response_headers.complete"


class Gateway:
    """Sends each request to a worker of its model: the one with its prefix, or the least busy."""

    def __init__(self, workers: ChatWorkers, chats: Chats) -> None:
        self.workers = workers
        self._chats = chats
        self._clients = Clients()
        self._active: Counter[str] = Counter()  # requests of this process under way, by worker
        self._prefixes = PrefixMemory()
        # as long as one of their requests is under way
        self._engines = WeakValueDictionary[tuple[str, int | None], Engine]()

    async def close(self) -> None:
        await self._clients.close()

    def by_prefix(self, workers: Sequence[WorkerRecord], prefix: Prefix) -> list[WorkerRecord]:
        """Workers by load, but first the one that has the prompt's beginning in its cache."""
        return self._prefixes.order(prefix, self.by_load(workers), self._active.__getitem__)

    def by_load(self, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
        """Workers, the least busy first: by this process's requests, then by the last heartbeat."""

        def load(worker: WorkerRecord) -> tuple[int, float]:
            return self._active[worker.id], worker.stats.get("chat_active", 0)

        return sorted(workers, key=load)

    async def look_up(self, worker: WorkerRecord, path: bytes, headers: Headers) -> httpx.Response:
        """A worker's answer to a GET that needs no engine. httpx.HTTPError: there is none."""
        with self._clients.lend() as client:
            return await client.get(
                _url(worker, path), headers=[*headers, *_secret(worker)], timeout=_LOOKUP_TIMEOUT_S
            )

    @asynccontextmanager
    async def open(
        self, workers: Sequence[WorkerRecord], request: ProxyRequest
    ) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
        """Yields the answer of the first worker that gives one, and its body for the client.

        `workers`: of one model, one at least. Leaving cancels what is still under way.
        NoWorkerError: all workers are gone, or two engines died while they had the request.
        DeadlyRequestError: they did lately.
        """
        if self.workers.deadly and await _fingerprint(request) in self.workers.deadly:
            raise DeadlyRequestError
        n_lost = 0  # engines that died while they had the request
        is_suspect = False  # one of them soon after it came
        with self._chats.under_way(workers[0].model) as chat:
            for worker in workers:
                if not await self.workers.is_ready(worker.id):
                    continue  # others took long to fail, and it has left or was revoked meanwhile
                engine = self._engines.setdefault((worker.id, worker.port), Engine())
                async with AsyncExitStack() as stack:
                    stack.enter_context(self._counted(worker))
                    self._prefixes.remember(request.prefix, worker.id)
                    began_at = time.monotonic()
                    try:
                        async with engine.trial(request) if is_suspect else nullcontext():
                            began_at = time.monotonic()
                            response, first, chunks = await self._ask(stack, worker, request)
                    except LostError as error:
                        self.workers.lost(worker.id)
                        log.warning("worker %s did not answer a chat request: %s", worker.id, error)
                        if error.in_engine and not engine.was_ended_by_another(request):
                            n_lost += 1
                            n_blamed = 0
                            if time.monotonic() - began_at < RECENT_S:
                                is_suspect = True
                                n_blamed = await self._died_with(worker, request)
                            if max(n_lost, n_blamed) > 1:
                                break
                        continue
                    if response.status_code == 404 and request.by_id and worker is not workers[-1]:
                        continue
                    if response.status_code >= 500:
                        chat.failed()
                    elif _is_stream(response):
                        chat.first_token()
                    body = self._body(worker, engine, request, response, first, chunks, is_suspect)
                    yield response, body
                    chat.ended()
                    return
            chat.failed()
        raise NoWorkerError

    async def _ask(
        self, stack: AsyncExitStack, worker: WorkerRecord, request: ProxyRequest
    ) -> tuple[httpx.Response, bytes, AsyncIterator[bytes]]:
        """A worker's answer, its first bytes and what follows; what is to be closed goes on the
        stack. LostError: it died before, and has done nothing that the client saw."""
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
                chunks = response.aiter_raw()
                first = await (first_events if _is_stream(response) else _next)(chunks)
                return response, first, chunks
            except httpx.TransportError as error:
                was_sent |= way.was_sent
                if way.is_new or way.is_answered:
                    raise LostError(repr(error), was_sent) from error
                # An idle connection, which the worker had closed: the worker itself may be well.

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
        """Yields the body as it comes; a stream whose worker dies ends with an error event.

        Other answers raise httpx's TransportError, so that nobody takes a part for the whole.
        `is_suspect`: of another engine's end.
        """
        is_stream, began_at = _is_stream(response), time.monotonic()
        # of a stream only whole lines: half a line followed by an error event would be neither
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
            # the first newline ends an event cut short
            yield b"\n" + error_event(shaped(_path_of(request), 502, event))
        else:
            if held:
                yield held
            if is_suspect:
                await self.workers.outlived(await _fingerprint(request))

    async def _died_with(self, worker: WorkerRecord, request: ProxyRequest) -> int:
        """How many engines died, as far as is known, because of the request; this one too."""
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
    """Waits for a worker's answer and passes it on, but no longer than the client stays."""

    def __init__(
        self, gateway: Gateway, workers: Sequence[WorkerRecord], request: ProxyRequest
    ) -> None:
        """`workers`: of one model, in the order in which they are asked; one at least."""
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
    """Sends a worker's answer; one whose first event is an error has that error's status."""
    first, failed = await _next(body), None
    if _is_stream(answer):
        failed = failure(path, first)
    elif sending.has_begun:  # as a stream, before the worker refused it
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


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    return await anext(chunks, b"")


def _is_stream(response: httpx.Response) -> bool:
    """True if the answer comes token by token."""
    return bool(response.headers.get("content-type", "").startswith("text/event-stream"))


async def _cancel(response: httpx.Response) -> None:
    """Cancels an answer whose body is still on the way."""
    with suppress(httpx.HTTPError):
        await response.aclose()


async def _client_gone(receive: Receive) -> None:
    """Returns when the client has hung up; its body was read before, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _path_of(request: ProxyRequest) -> str:
    return request.path.partition(b"?")[0].decode("latin-1")


async def _fingerprint(request: ProxyRequest) -> str:
    return await to_thread.run_sync(fingerprint, request.path, request.body)


def _sent(worker: WorkerRecord, request: ProxyRequest, way: _Way) -> httpx.Request:
    # Not client.build_request: it adds headers, such as accept-encoding. httpx sets the body's
    # length: the client's body may have come in chunks.
    headers = [header for header in _end_to_end(request.headers) if header[0].lower() not in _OURS]
    # Neither addresses nor names of keys are a worker's business.
    client = blake2b(request.client.encode(), digest_size=8).hexdigest().encode()
    salt = [(GATEWAY_SALT_HEADER.encode(), request.salt.encode())] if request.salt else []
    return httpx.Request(
        request.method,
        _url(worker, request.path),
        headers=[*headers, *_secret(worker), (GATEWAY_CLIENT_HEADER.encode(), client), *salt],
        content=request.body or None,
        extensions={"timeout": TIMEOUT.as_dict(), "trace": way.note},
    )


def _end_to_end(headers: Headers) -> Headers:
    """Headers without those of this connection, also those that only Connection names."""
    named = [value.split(b",") for name, value in headers if name.lower() == b"connection"]
    hop = _HOP_HEADERS | {token.strip().lower() for tokens in named for token in tokens}
    return [(name, value) for name, value in headers if name.lower() not in hop]


def _secret(worker: WorkerRecord) -> Headers:
    return (
        [(GATEWAY_SECRET_HEADER.encode(), worker.chat_secret.encode())]
        if worker.chat_secret
        else []
    )


def _url(worker: WorkerRecord, path: bytes) -> httpx.URL:
    # Escape bytes that no URL may hold, but that some parsers of requests let through.
    raw_path = quote(path, safe=_PRINTABLE).encode()
    return httpx.URL(
        scheme="http", host=worker.chat_host or "", port=worker.port, raw_path=raw_path
    )
