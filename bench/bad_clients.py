"""What an honest client sees while bad ones hold connections or ask for much, as a ratio to what it
sees without them, and their cost to the API.

.venv/bin/python -m bench.bad_clients                 # all kinds but those that ask for chat
.venv/bin/python -m bench.bad_clients --kind silent --connections 1000 --seconds 20
.venv/bin/python -m bench.bad_clients --kind streams --connections 4200 --addresses 40
.venv/bin/python -m bench.bad_clients --engine vllm   # all kinds, beside an honest chat
.venv/bin/python -m bench.bad_clients --engine vllm --kind logprobs --addresses 1 --addresses 40

A line of JSON for each, and at the end a table. Beside those that ask again and again stand as many
honest clients (`chats`, `long_chats`, `long_prompts`, `jobs`): what a node has for all is shared by
more.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import resource
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.synchronize import Barrier
from typing import Any

import httpx
import psutil

from api.edge.connections import ENDLESS
from cli.supervise.stack import Stack
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 600.0  # others may use the machine too
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
# 64 jobs' callbacks, so that they fill within seconds.
OUTBOX = {"POC_OUTBOX_MAX_BYTES": str(64 * 512 * 1024)}
# Jobs of the honest client whose callbacks may wait: a quarter of 64.
OWN_CALLBACKS = 16
# Seconds in which they come at the end, when nobody asks for anything else.
CALLBACKS_S = 20.0

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


async def chat_port(streams: Streams) -> None:
    """Sends half of a request's headers to a worker's own port."""
    streams[1].write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    await streams[1].drain()


KINDS: dict[str, Callable[[Streams], Awaitable[None]]] = {
    "silent": silent,
    "slow": slow,
    "half": half,
    "byte": byte,
    "unread": unread,
    "streams": streams,
    "almost": almost,
    "chat_port": chat_port,  # with a real engine alone
}


def _chat(**asked: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Tell me."}]} | asked


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


def known(number: int) -> dict[str, Any]:
    """Sends an answer's tokens as 8 MB of text, or as 200,000 texts that are no ids."""
    told = {"logprobs": True, "top_logprobs": 5}
    if number % 2:
        return _chat(**told, enforced_tokens={"tokens": [{"token": "no id"}] * 200_000})
    return _chat(**told, enforced_str="hello w\u00f6rld " * 700_000)


def scores(_: int) -> dict[str, Any]:
    """Asks how likely 20,000 items are."""
    return {"model": MODEL, "query": "Is it?", "items": ["x"] * 20_000, "label_token_ids": [1, 2]}


# Asked in turn by who asks for `large`: what a worker would do before its engine has anything.
LARGE: Sequence[tuple[str, dict[str, Any]]] = (
    ("/tokenize", {"model": MODEL, "prompt": "hello " * 1_400_000}),
    ("/v1/responses", {"model": MODEL, "input": [{"role": "user", "content": "x"}] * 60_000}),
    (CHAT, _chat(chat_template_kwargs={f"k{n}": n for n in range(200_000)})),
    (
        CHAT,
        _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]),
    ),
    (CHAT, _chat(n=64, max_tokens=512, ignore_eos=True, logprobs=True, top_logprobs=20)),
)


def large(number: int) -> dict[str, Any]:
    """Asks for much work before the engine's, or for 700,000 logprobs at once."""
    return LARGE[number % len(LARGE)][1]


def _long_prompt(number: int, **asked: Any) -> dict[str, Any]:
    """Of 2,000 tokens, another one each time: no cache has its beginning."""
    ids = [5 + (number * 31 + n * (1 + number % 7)) % 500 for n in range(2000)]
    return {"model": MODEL, "prompt": ids, "max_tokens": 1} | asked


def prompt_logprobs(number: int) -> dict[str, Any]:
    """Asks for twenty logprobs of each token of a long prompt."""
    return _long_prompt(number, prompt_logprobs=20)


def echo(number: int) -> dict[str, Any]:
    """Asks for a long prompt again, with twenty logprobs for each token."""
    return _long_prompt(number, echo=True, logprobs=20)


def broken(_: int) -> dict[str, Any]:
    """Sends what vLLM fails on, which then closes the connection."""
    return _chat(structured_outputs=True)


def dead(number: int) -> dict[str, Any]:
    """Sends jobs whose receiver does not answer."""
    return JOB | {"nonces": [number], "url": "http://127.0.0.1:9/dead"}


def chats(_: int) -> dict[str, Any]:
    """Asks what the honest client asks."""
    return _chat(max_tokens=16, ignore_eos=True, logprobs=True, top_logprobs=5)


def long_chats(_: int) -> dict[str, Any]:
    """Streams as the network's clients do, with five logprobs for each token."""
    told = {"logprobs": True, "top_logprobs": 5}
    return _chat(stream=True, max_tokens=1500, ignore_eos=True, **told)


def long_prompts(number: int) -> dict[str, Any]:
    """Sends as long prompts, for nothing but an answer."""
    return _long_prompt(number)


def jobs(number: int) -> dict[str, Any]:
    """Sends jobs that no receiver waits for."""
    return JOB | {"nonces": [number]}


# What is asked again and again, by how many at a time; those of chat want a real engine.
ASKED: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "answers": (4, answers),
    "choices": (4, choices),
    "grammars": (40, grammars),
    "logprobs": (40, logprobs),
    "known": (4, known),
    "scores": (2, scores),
    "large": (5, large),
    "prompt_logprobs": (8, prompt_logprobs),
    "echo": (8, echo),
    "broken": (3, broken),
    "dead": (8, dead),
    "chats": (40, chats),
    "long_chats": (40, long_chats),
    "long_prompts": (8, long_prompts),
    "jobs": (8, jobs),
}
# What as many honest clients ask: what bad ones cost beyond that is what they do wrong.
INSTEAD = {
    "answers": "chats",
    "choices": "chats",
    "grammars": "chats",
    "logprobs": "long_chats",
    "known": "chats",
    "scores": "chats",
    "large": "chats",
    "prompt_logprobs": "long_prompts",
    "echo": "long_prompts",
    "broken": "chats",
    "dead": "jobs",
}
OF_CHAT = (*(kind for kind in INSTEAD if kind != "dead"), "chats", "long_chats", "long_prompts")
OF_PROMPTS = ("prompt_logprobs", "echo", "long_prompts")


def _path(kind: str, number: int) -> str:
    if kind == "large":
        return LARGE[number % len(LARGE)][0]
    if kind == "scores":
        return "/generative_scoring"
    if kind in OF_PROMPTS:
        return "/v1/completions"
    return CHAT if kind in OF_CHAT else GENERATE


@dataclass(frozen=True)
class Honest:
    """What an honest client saw of one kind of request."""

    requests: int
    refused: int  # not answered with 200, not within 60 s, or its callback did not come
    no_callback: int  # of these, those whose callback did not come
    # of the others, by status and what was said: when, in seconds since the beginning
    why: dict[str, list[float]]
    median_ms: float
    p99_ms: float
    longest_ms: float


@dataclass(frozen=True)
class Seen:
    kind: str  # "nobody": no bad clients
    at_once: int
    addresses: int
    health: Honest
    # of 16 tokens, or of a choice of two; with a real engine
    chat: Honest | None
    grammar: Honest | None
    job_with_url: Honest
    bodies_refused: int  # of the honest client, of a megabyte each
    memory_mb: float  # the largest of the API's process
    # How late the honest clients' own event loop was: a part of what they saw. The 99th percentile.
    bench_late_ms: float

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
    async with httpx.AsyncClient(base_url=url, timeout=120, transport=transport) as client:
        while time.monotonic() < until:
            number += 1000
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with (
                    asyncio.timeout(max(0.1, until - time.monotonic())),
                    client.stream("POST", _path(kind, number), json=asked(number)) as answer,
                ):
                    async for _ in answer.aiter_raw():
                        pass
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Answered:
    """How one request of an honest client ended."""

    at: float  # of the monotonic clock, in seconds, when it was asked
    ms: float
    refusal: str | None  # None: answered with 200


async def honest(url: str, until: float, method: str, path: str, body: Any = None) -> Honest:
    """Asks again and again."""
    seen: list[Answered] = []
    while time.monotonic() < until:
        seen.append(await _asked(url, method, path, body))
        await asyncio.sleep(PAUSE_S)
    return _told(seen)


async def jobs_with_url(url: str, until: float) -> Honest:
    """Sends jobs, and takes their callbacks; one that does not come is refused too."""
    seen: list[Answered] = []
    n_taken = 0

    def n_owed() -> int:
        return sum(one.refusal is None for one in seen) - n_taken

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_taken
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
        n_taken += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as receiver:
        port = receiver.sockets[0].getsockname()[1]
        job = JOB | {"nonces": [1], "url": f"http://127.0.0.1:{port}"}
        while time.monotonic() < until:
            if n_owed() < OWN_CALLBACKS:
                seen.append(await _asked(url, "POST", GENERATE, job))
            await asyncio.sleep(PAUSE_S)
        while n_owed() > 0 and time.monotonic() < until + CALLBACKS_S:
            await asyncio.sleep(PAUSE_S)
    found = _told(seen)
    missing = max(0, n_owed())
    return replace(found, refused=found.refused + missing, no_callback=missing)


async def _asked(url: str, method: str, path: str, body: Any) -> Answered:
    """One request on a connection of its own, as the hardest case."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client:
        at = time.monotonic()
        try:
            answer = await client.request(method, path, json=body)
            refusal = None if answer.status_code == 200 else _refusal(answer)
        except httpx.HTTPError as error:
            refusal = type(error).__name__
        return Answered(at, (time.monotonic() - at) * 1000, refusal)


def _refusal(answer: httpx.Response) -> str:
    """The status and the beginning of what was said."""
    return f"{answer.status_code} {answer.text[:100]}"


def _told(seen: list[Answered]) -> Honest:
    took_ms = [one.ms for one in seen]
    why: dict[str, list[float]] = {}
    for one in seen:
        if one.refusal is not None:
            why.setdefault(one.refusal, []).append(round(one.at - seen[0].at, 2))
    refused = sum(map(len, why.values()))
    return Honest(
        len(seen), refused, 0, why, statistics.median(took_ms), _p99(took_ms), max(took_ms)
    )


def _p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


async def late(until: float) -> float:
    """How late this process's event loop is, in ms."""
    found = []
    while time.monotonic() < until:
        began = time.perf_counter()
        await asyncio.sleep(0.01)
        found.append((time.perf_counter() - began - 0.01) * 1000)
    return _p99(found)


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


def attack(
    url: str, port: int, kind: str, n: int, seconds: float, addresses: int, begin: Barrier
) -> None:
    """All bad clients at the same moment, for so long."""

    async def all_of_them() -> None:
        each = []
        until = time.monotonic() + seconds
        for number in range(n):
            address = f"127.0.0.{2 + number % addresses}"
            each.append(
                ask_on(url, kind, number, until, address)
                if kind in ASKED
                else keep_open(port, kind, until, address)
            )
        await asyncio.gather(*each, return_exceptions=True)

    begin.wait(READY_TIMEOUT_S)
    asyncio.run(all_of_them())


def port_for(stack: Stack, kind: str) -> int:
    """The port that bad clients of this kind connect to: the API's, or a worker's for chat."""
    if kind != "chat_port":
        return stack.port
    connections = psutil.Process(stack.worker_pids()[0]).net_connections("tcp")
    port: int = next(one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN)
    return port


async def run(
    stack: Stack, options: argparse.Namespace, kind: str, addresses: int, at_once: int | None = None
) -> Seen:
    assert stack.api_pid is not None
    process, url = psutil.Process(stack.api_pid), stack.base_url
    n = _at_once(options, kind) if at_once is None else at_once
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(2)
    args = (url, port_for(stack, kind), kind, n, options.seconds, addresses, begin)
    # In a process of their own: what they do must not hold up the honest client.
    bad = context.Process(target=attack, args=args)
    bad.start()
    await asyncio.to_thread(begin.wait, READY_TIMEOUT_S)  # it has imported what it needs
    until = time.monotonic() + options.seconds
    of_chat = options.engine == "vllm"
    asking = {
        "health": honest(url, until, "GET", "/health"),
        "job_with_url": jobs_with_url(url, until),
    }
    if of_chat:
        asking["chat"] = honest(url, until, "POST", CHAT, chats(0))
        asking["grammar"] = honest(
            url, until, "POST", CHAT, _chat(structured_outputs={"choice": ["yes", "no"]})
        )
    memory = asyncio.create_task(largest_memory(process, until))
    bodies = asyncio.create_task(large_bodies(url, until))
    own = asyncio.create_task(late(until))
    found = dict(zip(asking, await asyncio.gather(*asking.values()), strict=True))
    await asyncio.to_thread(bad.join)
    return Seen(
        kind,
        n,
        addresses if n else 0,
        found["health"],
        found.get("chat"),
        found.get("grammar"),
        found["job_with_url"],
        await bodies,
        await memory,
        await own,
    )


def table(all_seen: list[Seen]) -> str:
    """What honest clients saw, as the documentation has it; ms, and how many were refused."""
    columns = "bad clients | from | `/health` p99, longest | chat p50, p99 | grammar p99"
    columns += " | a job with a url p99 | refused | memory of the API, MB | the bench itself late"
    lines = [f"| {columns} |", "|" + "---|" * (columns.count("|") + 1)]
    for seen in all_seen:
        honest = [getattr(seen, name) for name in HONEST]
        refused = seen.bodies_refused + sum(one.refused for one in honest if one)
        chat = f"{seen.chat.median_ms:.0f}, {seen.chat.p99_ms:.0f}" if seen.chat else "-"
        cells = [
            f"{seen.at_once} {seen.kind}" if seen.at_once else seen.kind,
            seen.addresses or "-",
            f"{seen.health.p99_ms:.0f}, {seen.health.longest_ms:.0f}",
            chat,
            f"{seen.grammar.p99_ms:.0f}" if seen.grammar else "-",
            f"{seen.job_with_url.p99_ms:.0f}",
            f"{refused} of {sum(one.requests for one in honest if one)}{_by_status(honest)}",
            f"{seen.memory_mb:.0f}",
            f"{seen.bench_late_ms:.0f}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _by_status(honest: Sequence[Honest | None]) -> str:
    """Refusals by status, or by the name of the error: " (2 x 429)"; nothing without any."""
    found: Counter[str] = Counter()
    for one in honest:
        for why, moments in one.why.items() if one else ():
            found[why.split(" ")[0]] += len(moments)
    return f" ({', '.join(f'{n} x {what}' for what, n in found.items())})" if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=[*KINDS, *ASKED], action="append")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument(
        "--addresses", type=int, action="append", help="that bad clients come from; again: each"
    )
    parser.add_argument("--engine", choices=["synthetic", "vllm"], default="synthetic")
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    is_real = options.engine == "vllm"
    engine = EngineOptions(model=MODEL, engine=options.engine, synthetic_step_ms=10)
    usual = [*KINDS, *INSTEAD] if is_real else [*KINDS, "dead"]
    if not is_real:
        usual.remove("chat_port")
    tried = [
        (each, addresses, _at_once(options, kind))
        for addresses in options.addresses or [1]
        for kind in options.kind or usual
        for each in (kind, INSTEAD.get(kind))
        if each
    ]
    with Stack(engine, workers=1 if is_real else 2, env=OUTBOX) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        short = argparse.Namespace(**{**vars(options), "seconds": 6})
        asyncio.run(run(stack, short, NOBODY, 1))
        all_seen: list[Seen] = []
        for kind, addresses, n in dict.fromkeys([(NOBODY, 1, 0), *tried]):
            seen = asyncio.run(run(stack, options, kind, addresses, n))
            all_seen.append(seen)
            print(json.dumps(asdict(seen) | {"ratio": seen.to(all_seen[0])}), flush=True)
    print(table(all_seen))


if __name__ == "__main__":
    main()
