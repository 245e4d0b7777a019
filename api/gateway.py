"""Carries OpenAI requests to the workers' own OpenAI servers and their answers back, byte for byte."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass

import httpx
from starlette.types import Receive, Scope, Send

from poc_core.records import ENGINE_LOST_HEADER, WorkerRecord

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]

# Seconds to reach a worker. For its answer there is no limit: a long prompt behind a long queue takes its time, and a
# worker that dies closes its connections.
_TIMEOUT = httpx.Timeout(None, connect=5.0)
# Seconds for what a worker knows without its engine.
_LOOKUP_TIMEOUT_S = 5.0
# Headers of one connection only (RFC 9110, 7.6.1), and those that httpx or uvicorn make themselves.
_HOP_HEADERS = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
    *(b"transfer-encoding", b"upgrade", b"expect", b"host", b"date", b"server"),
}


@dataclass(frozen=True)
class ProxyRequest:
    """A client's request, whole, so that it can be sent to another worker when the first one dies."""

    method: str
    path: str  # with query
    headers: Headers
    body: bytes


class Gateway:
    """Sends each request to the least busy live worker of its model."""

    def __init__(self, client: httpx.AsyncClient | None = None) -> None:
        # trust_env off: workers are on the operator's network, a proxy of the environment is for the internet.
        self._client = client or httpx.AsyncClient(
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
            trust_env=False,
            verify=False,  # workers speak plain http; loading the certificates takes longer than making the whole API
        )
        self._active: Counter[str] = Counter()  # requests of this process under way, by worker

    async def close(self) -> None:
        await self._client.aclose()

    def by_load(self, workers: Iterable[WorkerRecord]) -> list[WorkerRecord]:
        """Least busy first: by this process's own requests, then by what the worker said with its last heartbeat."""

        def load(worker: WorkerRecord) -> tuple[int, int]:
            return self._active[worker.id], int(str(worker.stats.get("chat_active", 0)))

        return sorted(workers, key=load)

    async def look_up(self, worker: WorkerRecord, path: str, headers: Headers) -> httpx.Response:
        """What a worker answers to GET at once. httpx.HTTPError: it does not."""
        return await self._client.get(_url(worker, path), headers=headers, timeout=_LOOKUP_TIMEOUT_S)

    async def open(self, workers: list[WorkerRecord], request: ProxyRequest) -> Upstream:
        """The answer of the first worker that gives one. NoWorkerError: all of them are gone."""
        for worker in workers:
            self._active[worker.id] += 1
            response: httpx.Response | None = None
            try:
                response = await self._send(worker, request)
                if ENGINE_LOST_HEADER in response.headers:
                    raise httpx.RemoteProtocolError("its engine is lost")
                # A worker that dies with its first byte outstanding has done nothing that the client saw.
                chunks = response.aiter_raw()
                return Upstream(self, worker, response, await anext(chunks, None), chunks)
            except httpx.TransportError as error:
                await self.left(worker, response)
                log.warning("worker %s did not answer a chat request (%r); trying another", worker.id, error)
            except BaseException:
                await self.left(worker, response)
                raise
        raise NoWorkerError

    async def left(self, worker: WorkerRecord, response: httpx.Response | None) -> None:
        """A request is over, for whatever reason; where its answer is still on the way, that is cancelled."""
        self._active[worker.id] -= 1
        if self._active[worker.id] <= 0:
            del self._active[worker.id]
        if response is not None:
            with suppress(httpx.HTTPError):
                await response.aclose()

    async def _send(self, worker: WorkerRecord, request: ProxyRequest) -> httpx.Response:
        # Not client.build_request: it would add headers that the client did not send, such as accept-encoding. The
        # body's length is httpx's to say: the client's may have come in chunks.
        headers = [header for header in _end_to_end(request.headers) if header[0].lower() != b"content-length"]
        sent = httpx.Request(
            request.method,
            _url(worker, request.path),
            headers=headers,
            content=request.body or None,
            extensions={"timeout": _TIMEOUT.as_dict()},
        )
        return await self._client.send(sent, stream=True)


class NoWorkerError(Exception):
    """No worker of the model answered."""


class Upstream:
    """A worker's answer, its body still on the way. `close` it, whatever happens: that cancels what is under way."""

    def __init__(
        self,
        gateway: Gateway,
        worker: WorkerRecord,
        response: httpx.Response,
        first: bytes | None,
        rest: AsyncIterator[bytes],
    ) -> None:
        """`first`, `rest`: the body; None where it is empty."""
        self._gateway = gateway
        self._worker = worker
        self._response = response
        self._first = first
        self._rest = rest
        self._is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        self.status = response.status_code
        self.headers = _end_to_end(response.headers.raw)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. A stream whose worker dies ends with an error event; of any other answer httpx's
        TransportError is raised, so that nobody takes a part for the whole."""
        try:
            async for chunk in self._lines() if self._is_stream else self._all():
                yield chunk
        except httpx.TransportError as error:
            log.warning("worker %s died in the middle of an answer: %r", self._worker.id, error)
            if not self._is_stream:
                raise
            message = "The worker that computed this answer was lost; send the request again."
            event = {"error": {"message": message, "type": "worker_lost", "param": None, "code": 502}}
            yield b"\ndata: " + json.dumps(event).encode() + b"\n\n"  # the first newline ends an event cut short

    async def close(self) -> None:
        await self._gateway.left(self._worker, self._response)

    async def _all(self) -> AsyncIterator[bytes]:
        if self._first is None:
            return
        yield self._first
        async for chunk in self._rest:
            yield chunk

    async def _lines(self) -> AsyncIterator[bytes]:
        """Whole lines only: half a line, followed by an error event, would be neither."""
        held = b""
        async for chunk in self._all():
            end = chunk.rfind(b"\n") + 1
            if end:
                yield held + chunk[:end]
                held = chunk[end:]
            else:
                held += chunk
        if held:
            yield held


class ProxiedAnswer:
    """ASGI response: waits for a worker's answer and passes it on, but no longer than the client stays."""

    def __init__(self, gateway: Gateway, workers: list[WorkerRecord], request: ProxyRequest) -> None:
        self._gateway = gateway
        self._workers = workers
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(send))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                if not task.done():
                    task.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        with suppress(asyncio.CancelledError):
            await work

    async def _answer(self, send: Send) -> None:
        try:
            upstream = await self._gateway.open(self._workers, self._request)
        except NoWorkerError:
            return await _send_json(send, *no_worker())
        try:
            await send({"type": "http.response.start", "status": upstream.status, "headers": upstream.headers})
            async for chunk in upstream.chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await upstream.close()


def no_worker() -> tuple[int, dict[str, object], Headers]:
    """Status, body and headers for a request whose workers are all gone, as OpenAI clients understand it."""
    error = {
        "message": "No worker could answer; try again in some seconds.",
        "type": "service_unavailable",
        "param": None,
        "code": 503,
    }
    return 503, {"error": error}, [(b"retry-after", b"5")]


async def _send_json(send: Send, status: int, body: dict[str, object], headers: Headers) -> None:
    all_headers = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _client_gone(receive: Receive) -> None:
    """Returns when the client has hung up. The body was read before, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _end_to_end(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in _HOP_HEADERS]


def _url(worker: WorkerRecord, path: str) -> str:
    return f"http://{worker.chat_host}:{worker.port}{path}"
