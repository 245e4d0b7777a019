"""Fetches metrics from a worker's vLLM, over a new connection for each request.

Does not use httpx, which searches all connections of a client for each request. With 64 workers
this search takes several times as long as everything else.
"""

from __future__ import annotations

import asyncio

import h11

from poc_core.records import GATEWAY_SECRET_HEADER, WorkerRecord

# Seconds for a worker's complete answer. A scrape does not wait so long (EngineReadings).
TIMEOUT_S = 5.0
# Largest answer in bytes: an engine sends about 60 KB.
MOST_BYTES = 4 * 1024 * 1024
_PIECE = 256 * 1024


class FetchError(Exception):
    """A worker did not answer, or its answer contains no metrics."""


async def fetch(worker: WorkerRecord) -> str:
    """Returns a worker's metrics as text. FetchError if the worker fails or answers too late."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(worker.chat_host, worker.port)
            try:
                return await _exchange(reader, writer, worker)
            finally:
                writer.transport.abort()
    # UnicodeError: text that is not UTF-8, or a chat host that is no host name
    except (OSError, TimeoutError, h11.RemoteProtocolError, UnicodeError) as error:
        raise FetchError(f"worker {worker.id} did not return its metrics: {error!r}") from error


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, worker: WorkerRecord
) -> str:
    headers = [("Host", "worker"), ("Connection", "close")]
    if worker.chat_secret:
        headers.append((GATEWAY_SECRET_HEADER, worker.chat_secret))
    connection = h11.Connection(h11.CLIENT)
    writer.write(
        connection.send(h11.Request(method="GET", target="/metrics", headers=headers)) or b""
    )
    writer.write(connection.send(h11.EndOfMessage()) or b"")
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_PIECE))
        elif isinstance(event, h11.Response) and event.status_code != 200:
            raise FetchError(f"worker {worker.id} answers {event.status_code}")
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MOST_BYTES:
                raise FetchError(f"worker {worker.id} returned more than {MOST_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return body.decode()
        elif isinstance(event, h11.ConnectionClosed):
            raise FetchError(f"worker {worker.id} hung up")
