"""What an honest client sees while a thousand bad ones hold connections, and their cost to the API.

.venv/bin/python -m bench.bad_clients                 # all kinds, one after the other
.venv/bin/python -m bench.bad_clients --kind silent --connections 1000 --seconds 20
.venv/bin/python -m bench.bad_clients --kind streams --connections 4200 --addresses 40
"""

import argparse
import asyncio
import contextlib
import json
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

import httpx
import psutil

from api.edge.connections import ENDLESS
from cli.supervise.stack import Stack
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 120.0
# Seconds between two requests of the honest client.
PAUSE_S = 0.02
HEAD = b"POST /api/v1/pow/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LARGEST, PART = 32 * 1024 * 1024, 64 * 1024  # bytes
GET = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
JOB = {
    "block_hash": "bench", "block_height": 1, "public_key": "bench", "node_id": 0,
    "node_count": 1, "wait": True,
    "nonces": list(range(64)), "params": {"model": "tiny-qwen3", "seq_len": 64, "k_dim": 12},
}  # fmt: skip

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def silent(_: Streams) -> None:
    """Sends nothing."""


async def slow(streams: Streams) -> None:
    """Sends one byte of a header a second."""
    streams[1].write(HEAD)
    while True:
        streams[1].write(b"x")
        await streams[1].drain()
        await asyncio.sleep(1)


async def half(streams: Streams) -> None:
    """Sends half a body of a megabyte."""
    streams[1].write(HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 500_000)
    await streams[1].drain()


async def unread(streams: Streams) -> None:
    """Asks eight times for the largest document and reads no answer."""
    streams[1].write(GET * 8)
    await streams[1].drain()


async def streams(streams: Streams) -> None:
    """Reads an answer that never ends."""
    streams[1].write(f"GET /api/v1{ENDLESS} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await streams[1].drain()


async def almost(streams: Streams) -> None:
    """Sends all of the largest body but its last byte."""
    streams[1].write(HEAD + b"Content-Length: %d\r\n\r\n" % LARGEST)
    for _ in range(LARGEST // PART - 1):
        streams[1].write(bytes(PART))
        await streams[1].drain()
    streams[1].write(bytes(PART - 1))
    await streams[1].drain()


KINDS: dict[str, Callable[[Streams], Awaitable[None]]] = {
    "silent": silent,
    "slow": slow,
    "half": half,
    "unread": unread,
    "streams": streams,
    "almost": almost,
}


@dataclass(frozen=True)
class Seen:
    kind: str
    connections: int
    requests: int  # of the honest client
    failed: int  # of these
    median_ms: float
    p99_ms: float
    longest_ms: float
    job_s: float | None  # None: it was not answered with a result
    bodies_refused: int  # of the honest client, of a megabyte each
    memory_mb: float  # the largest of the API's process


async def keep_open(port: int, kind: str, until: float, address: str) -> None:
    """One bad client, which comes again when it is thrown out."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            # limit: what the reader takes before it stops, where nothing asks it for more.
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, limit=1024, local_addr=(address, 0)
            )
            if kind == "unread":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await KINDS[kind]((reader, writer))
                    while kind == "unread" or await reader.read(1024):
                        await asyncio.sleep(1 if kind == "unread" else 0)
            except TimeoutError:
                pass
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.1)


async def honest(
    url: str, until: float, memory: Callable[[], float]
) -> tuple[list[float], int, float]:
    """Milliseconds of each answer to /health, failures, and the API's largest memory in MB."""
    took_ms: list[float] = []
    failed, largest = 0, 0.0
    while time.monotonic() < until:
        began = time.perf_counter()
        try:
            async with httpx.AsyncClient(
                base_url=url, timeout=10, trust_env=False, verify=False
            ) as client:
                # A connection of its own each time, as the hardest case.
                began = time.perf_counter()
                answer = await client.get("/health")
            failed += answer.status_code != 200
        except httpx.HTTPError:
            failed += 1
        took_ms.append((time.perf_counter() - began) * 1000)
        largest = max(largest, memory())
        await asyncio.sleep(PAUSE_S)
    return took_ms, failed, largest


async def one_job(url: str) -> float | None:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client:
        began = time.perf_counter()
        answer = await client.post("/api/v1/pow/generate", json=JOB)
        return (
            time.perf_counter() - began
            if answer.status_code == 200 and answer.json()["artifacts"]
            else None
        )


async def large_bodies(url: str, until: float) -> int:
    """How many of an honest client's bodies of a megabyte are refused for want of memory."""
    refused = 0
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client:
        while time.monotonic() < until:
            answer = await client.post("/api/v1/pow/generate", json={"padding": "x" * 1_000_000})
            refused += answer.status_code == 503
            await asyncio.sleep(0.5)
    return refused


async def run(stack: Stack, options: argparse.Namespace, kind: str) -> Seen:
    connections, seconds = options.connections, options.seconds
    assert stack.api_pid is not None
    process = psutil.Process(stack.api_pid)
    until = time.monotonic() + seconds
    bad = [
        asyncio.create_task(
            keep_open(stack.port, kind, until, f"127.0.0.{2 + number % options.addresses}")
        )
        for number in range(connections)
    ]
    await asyncio.sleep(2)  # until they are there
    looking = asyncio.create_task(
        honest(stack.base_url, until, lambda: process.memory_info().rss / 1e6)
    )
    large = asyncio.create_task(large_bodies(stack.base_url, until))
    job_s = await one_job(stack.base_url)
    took_ms, failed, memory_mb = await looking
    await asyncio.gather(*bad, return_exceptions=True)
    p99 = statistics.quantiles(took_ms, n=100)[98]
    return Seen(
        kind,
        connections,
        len(took_ms),
        failed,
        statistics.median(took_ms),
        p99,
        max(took_ms),
        job_s,
        await large,
        memory_mb,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=[*KINDS], action="append")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--addresses", type=int, default=1, help="that bad clients come from")
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    engine = EngineOptions(model="tiny-qwen3", engine="synthetic", synthetic_step_ms=10)
    with Stack(engine, workers=2) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        for kind in options.kind or KINDS:
            print(
                json.dumps(asdict(asyncio.run(run(stack, options, kind)))),
                flush=True,
            )


if __name__ == "__main__":
    main()
