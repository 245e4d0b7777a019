"""What an honest client sees while bad ones hold connections or ask for much, as a ratio to what it
sees without them, and their cost to the API.

.venv/bin/python -m bench.bad_clients                 # all kinds, one after the other
.venv/bin/python -m bench.bad_clients --kind silent --connections 1000 --seconds 20
.venv/bin/python -m bench.bad_clients --kind streams --connections 4200 --addresses 40
.venv/bin/python -m bench.bad_clients --kind dead --addresses 40
.venv/bin/python -m bench.bad_clients --engine vllm   # those that ask for chat: real engines only
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

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
    "node_count": 1, "wait": False,
    "nonces": list(range(64)), "params": {"model": "tiny-qwen3", "seq_len": 64, "k_dim": 12},
}  # fmt: skip

MODEL, GENERATE, CHAT = "tiny-qwen3", "/api/v1/pow/generate", "/v1/chat/completions"
NOBODY = "nobody"
HONEST = ("health", "chat", "grammar", "job_with_url")
# 64 jobs' callbacks, so that the places for them fill within seconds.
OUTBOX = {"POC_OUTBOX_MAX_BYTES": str(64 * 512 * 1024)}

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


async def byte(streams: Streams) -> None:
    """Sends one byte of a body that never comes."""
    streams[1].write(HEAD + b"Content-Length: 100\r\n\r\n ")
    await streams[1].drain()


KINDS: dict[str, Callable[[Streams], Awaitable[None]]] = {
    "silent": silent,
    "slow": slow,
    "half": half,
    "byte": byte,
    "unread": unread,
    "streams": streams,
    "almost": almost,
}


def _chat(**asked: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Tell me."}], **asked}


def answers(_: int) -> dict[str, Any]:
    """Asks for ten thousand answers."""
    return _chat(n=10_000, max_tokens=64)


def choices(number: int) -> dict[str, Any]:
    """Asks for a grammar of a hundred thousand choices."""
    return _chat(structured_outputs={"choice": [f"{number}-{n}" for n in range(100_000)]})


def grammars(number: int) -> dict[str, Any]:
    """Asks for a grammar of few bytes that takes seconds to compile."""
    slow = {"type": "string", "minLength": 1, "maxLength": 100_000 + number}
    return _chat(max_tokens=1, structured_outputs={"json": slow})


def logprobs(_: int) -> dict[str, Any]:
    """Streams with twenty logprobs for each token."""
    told = {"logprobs": True, "top_logprobs": 20}
    return _chat(stream=True, max_tokens=1500, ignore_eos=True, **told)


def dead(number: int) -> dict[str, Any]:
    """Sends jobs whose receiver does not answer."""
    return JOB | {"nonces": [number], "url": "http://127.0.0.1:9/dead"}


# What is asked again and again, by how many at a time; those of chat want a real engine.
ASKED: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "answers": (4, answers),
    "choices": (4, choices),
    "grammars": (40, grammars),
    "logprobs": (40, logprobs),
    "dead": (8, dead),
}
OF_CHAT = ("answers", "choices", "grammars", "logprobs")


@dataclass(frozen=True)
class Honest:
    """What an honest client saw of one kind of request."""

    requests: int
    refused: int  # not answered with 200, or not within 60 s
    median_ms: float
    p99_ms: float
    longest_ms: float


@dataclass(frozen=True)
class Seen:
    kind: str  # "nobody": no bad clients
    at_once: int
    health: Honest
    # of 16 tokens, or of a choice of two; with a real engine
    chat: Honest | None
    grammar: Honest | None
    job_with_url: Honest
    bodies_refused: int  # of the honest client, of a megabyte each
    memory_mb: float  # the largest of the API's process

    def to(self, alone: "Seen") -> dict[str, float]:
        """Longer than without bad clients by these factors, at the 99th percentile."""
        pairs = {name: (getattr(self, name), getattr(alone, name)) for name in HONEST}
        return {
            name: round(one.p99_ms / other.p99_ms, 2) for name, (one, other) in pairs.items() if one
        }


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


async def ask_on(url: str, kind: str, number: int, until: float, address: str) -> None:
    """One bad client, which asks again when it is answered."""
    asked = ASKED[kind][1]
    transport = httpx.AsyncHTTPTransport(local_address=address)
    path = CHAT if kind in OF_CHAT else GENERATE
    async with httpx.AsyncClient(base_url=url, timeout=120, transport=transport) as client:
        while time.monotonic() < until:
            number += 1000
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with (
                    asyncio.timeout(max(0.1, until - time.monotonic())),
                    client.stream("POST", path, json=asked(number)) as answer,
                ):
                    async for _ in answer.aiter_raw():
                        pass
            await asyncio.sleep(0.01)


async def honest(url: str, until: float, method: str, path: str, body: Any = None) -> Honest:
    """Asks again and again, on a connection of its own each time, as the hardest case."""
    took_ms: list[float] = []
    refused = 0
    while time.monotonic() < until:
        async with httpx.AsyncClient(
            base_url=url, timeout=60, trust_env=False, verify=False
        ) as client:
            began = time.perf_counter()
            try:
                refused += (await client.request(method, path, json=body)).status_code != 200
            except httpx.HTTPError:
                refused += 1
        took_ms.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(PAUSE_S)
    p99 = statistics.quantiles(took_ms, n=100)[98] if len(took_ms) > 1 else took_ms[0]
    return Honest(len(took_ms), refused, statistics.median(took_ms), p99, max(took_ms))


async def _take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A receiver that takes whatever comes."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


async def largest_memory(process: psutil.Process, until: float) -> float:
    largest = 0.0
    while time.monotonic() < until:
        largest = max(largest, process.memory_info().rss / 1e6)
        await asyncio.sleep(0.2)
    return largest


async def large_bodies(url: str, until: float) -> int:
    """How many of an honest client's bodies of a megabyte are refused for want of memory."""
    refused = 0
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client:
        while time.monotonic() < until:
            answer = await client.post("/api/v1/pow/generate", json={"padding": "x" * 1_000_000})
            refused += answer.status_code == 503
            await asyncio.sleep(0.5)
    return refused


def _at_once(options: argparse.Namespace, kind: str) -> int:
    if kind == NOBODY:
        return 0
    if kind in ASKED:
        return ASKED[kind][0]
    return min(6, options.connections) if kind == "almost" else int(options.connections)


def attack(url: str, port: int, kind: str, n: int, until: float, addresses: int) -> None:
    """All bad clients, until then."""

    async def all_of_them() -> None:
        each = []
        for number in range(n):
            address = f"127.0.0.{2 + number % addresses}"
            each.append(
                ask_on(url, kind, number, until, address)
                if kind in ASKED
                else keep_open(port, kind, until, address)
            )
        await asyncio.gather(*each, return_exceptions=True)

    asyncio.run(all_of_them())


async def run(stack: Stack, options: argparse.Namespace, kind: str) -> Seen:
    assert stack.api_pid is not None
    process, url = psutil.Process(stack.api_pid), stack.base_url
    until = time.monotonic() + 3 + options.seconds
    n = _at_once(options, kind)
    args = (url, stack.port, kind, n, until, options.addresses)
    # In a process of their own: what they do must not hold up the honest client.
    bad = multiprocessing.get_context("spawn").Process(target=attack, args=args)
    bad.start()
    await asyncio.sleep(3)  # until they are there
    of_chat = options.engine == "vllm"
    receiver = await asyncio.start_server(_take, "127.0.0.1", 0)
    taken_at = f"http://127.0.0.1:{receiver.sockets[0].getsockname()[1]}"
    asking = {
        "health": honest(url, until, "GET", "/health"),
        "job_with_url": honest(
            url, until, "POST", GENERATE, JOB | {"nonces": [1], "url": taken_at}
        ),
    }
    if of_chat:
        told = {"logprobs": True, "top_logprobs": 5}
        asking["chat"] = honest(
            url, until, "POST", CHAT, _chat(max_tokens=16, ignore_eos=True, **told)
        )
        asking["grammar"] = honest(
            url, until, "POST", CHAT, _chat(structured_outputs={"choice": ["yes", "no"]})
        )
    memory = asyncio.create_task(largest_memory(process, until))
    bodies = asyncio.create_task(large_bodies(url, until))
    found = dict(zip(asking, await asyncio.gather(*asking.values()), strict=True))
    receiver.close()
    await asyncio.to_thread(bad.join)
    return Seen(
        kind,
        n,
        found["health"],
        found.get("chat"),
        found.get("grammar"),
        found["job_with_url"],
        await bodies,
        await memory,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=[*KINDS, *ASKED], action="append")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--addresses", type=int, default=1, help="that bad clients come from")
    parser.add_argument("--engine", choices=["synthetic", "vllm"], default="synthetic")
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    is_real = options.engine == "vllm"
    engine = EngineOptions(model=MODEL, engine=options.engine, synthetic_step_ms=10)
    usual = [*OF_CHAT, "dead"] if is_real else [*KINDS, "dead"]
    with Stack(engine, workers=1 if is_real else 2, env=OUTBOX) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        asyncio.run(run(stack, argparse.Namespace(**{**vars(options), "seconds": 6}), NOBODY))
        alone = None
        for kind in [NOBODY, *(options.kind or usual)]:
            seen = asyncio.run(run(stack, options, kind))
            alone = alone or seen
            print(json.dumps(asdict(seen) | {"ratio": seen.to(alone)}), flush=True)


if __name__ == "__main__":
    main()
