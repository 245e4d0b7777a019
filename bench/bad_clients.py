"""What an honest client sees during attacks, compared with a node without bad clients.

    .venv/bin/python -m bench.bad_clients                 # all kinds except those that request chat
    .venv/bin/python -m bench.bad_clients --kind silent --connections 1000 --seconds 20
    .venv/bin/python -m bench.bad_clients --kind streams --connections 4200 --addresses 40
    .venv/bin/python -m bench.bad_clients --engine vllm   # all kinds, with an honest chat
    .venv/bin/python -m bench.bad_clients --engine vllm --kind logprobs --addresses 1 --addresses 40

Prints a line of JSON for each kind, and at the end a table. Kinds that repeat requests are also
replaced by as many honest clients (`chats`, `long_chats`, `long_prompts`, `jobs`), because any
further clients share the node's capacity.
"""

import asyncio
import contextlib
import functools
import json
import multiprocessing
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import httpx
import psutil

from api.edge.connections import ENDLESS
from bench.harness.node import API, MODEL, READY_TIMEOUT_S, body_of
from bench.harness.report import parser_of
from cli.supervise.stack import Stack
from workers.engines.options import EngineOptions

# Seconds between two requests of an honest client.
PAUSE_S = 0.02
LARGEST = 32 * 1024 * 1024  # bytes of a body
GENERATE, CHAT, COMPLETIONS = f"{API}/generate", "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
HEAD = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
JOB = body_of(MODEL, nonces=list(range(64)), wait=False)
NOBODY = "nobody"
# Room for 64 jobs' callbacks, which fill within seconds.
OUTBOX = {"POC_OUTBOX_MAX_BYTES": str(64 * 512 * 1024)}
# Most waiting callbacks of the honest client: a quarter of 64; and seconds for them at the end.
OWN_CALLBACKS, CALLBACKS_S = 16, 20.0

# Kinds that hold connections open -> the bytes that they send first.
HELD: dict[str, bytes] = {
    "silent": b"",
    "slow": HEAD,  # then a byte of a header a second
    "half": HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 500_000,
    "byte": HEAD + b"Content-Length: 100\r\n\r\n ",
    "unread": b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 8,  # answers are never read
    "streams": f"GET /api/v1{ENDLESS} HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "almost": HEAD + b"Content-Length: %d\r\n\r\n" % LARGEST,  # then all bytes except the last
    "chat_port": f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n".encode(),  # to a worker's own port
}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Tell me."}]} | fields


def _long_prompt(number: int, **fields: Any) -> dict[str, Any]:
    """Returns a prompt of 2,000 tokens with a different beginning for each number."""
    ids = [5 + (number * 31 + n * (1 + number % 7)) % 500 for n in range(2000)]
    return {"model": MODEL, "prompt": ids, "max_tokens": 1} | fields


def _grammar(number: int) -> dict[str, Any]:
    """Returns a request with a short grammar that takes seconds to compile."""
    slow = {"type": "string", "minLength": 1, "maxLength": 100_000 + number}
    return _chat(max_tokens=1, structured_outputs={"json": slow})


def _known(number: int) -> dict[str, Any]:
    """Returns a request that sends the answer's tokens as 8 MB of text, or as 200,000 non-ids."""
    if number % 2:
        return _chat(**LOGPROBS, enforced_tokens={"tokens": [{"token": "no id"}] * 200_000})
    return _chat(**LOGPROBS, enforced_str="hello w\u00f6rld " * 700_000)


def _job(number: int, **fields: Any) -> dict[str, Any]:
    return JOB | {"nonces": [number]} | fields


LOGPROBS = {"logprobs": True, "top_logprobs": 5}
STREAM = {"stream": True, "max_tokens": 1500, "ignore_eos": True}
HONEST_CHAT = _chat(max_tokens=16, ignore_eos=True, **LOGPROBS)
TEXT = {"type": "text", "text": "x"}
ITEMS = {"items": ["x"] * 20_000, "label_token_ids": [1, 2]}
SCORES = {"model": MODEL, "query": "Is it?", **ITEMS}
# Requests for much work before the engine's, and for 700,000 logprobs at once.
LARGE: Sequence[tuple[str, dict[str, Any]]] = (
    ("/tokenize", {"model": MODEL, "prompt": "hello " * 1_400_000}),
    ("/v1/responses", {"model": MODEL, "input": [{"role": "user", "content": "x"}] * 60_000}),
    (CHAT, _chat(chat_template_kwargs={f"k{n}": n for n in range(200_000)})),
    (CHAT, _chat(messages=[{"role": "user", "content": [TEXT] * 100_000}])),
    (CHAT, _chat(n=64, max_tokens=512, ignore_eos=True, logprobs=True, top_logprobs=20)),
)


@functools.cache
def _encoded(which: int) -> bytes:
    """Returns a body of LARGE. Encoding it for each request would take the node's CPU time."""
    return json.dumps(LARGE[which][1]).encode()


class Asked(NamedTuple):
    """A kind of clients that repeat a request, which differs by its number."""

    clients: int
    body: Callable[[int], dict[str, Any]]
    instead: str = ""  # the kind of as many honest clients; empty for honest kinds
    path: str = CHAT


# All except `dead` and `jobs` need a vLLM engine.
ASKED: dict[str, Asked] = {
    "answers": Asked(4, lambda _: _chat(n=10_000, max_tokens=64), "chats"),
    "choices": Asked(
        4,
        lambda number: _chat(
            structured_outputs={"choice": [f"{number}-{n}" for n in range(100_000)]}
        ),
        "chats",
    ),
    "grammars": Asked(40, _grammar, "chats"),
    "logprobs": Asked(40, lambda _: _chat(**STREAM, logprobs=True, top_logprobs=20), "long_chats"),
    "known": Asked(4, _known, "chats"),
    "scores": Asked(2, lambda _: SCORES, "chats", "/generative_scoring"),
    "large": Asked(5, lambda number: LARGE[number % len(LARGE)][1], "chats"),
    "prompt_logprobs": Asked(
        8, lambda number: _long_prompt(number, prompt_logprobs=20), "long_prompts", COMPLETIONS
    ),
    "echo": Asked(
        8, lambda number: _long_prompt(number, echo=True, logprobs=20), "long_prompts", COMPLETIONS
    ),
    "broken": Asked(3, lambda _: _chat(structured_outputs=True), "chats"),  # vLLM answers 500
    "dead": Asked(8, lambda number: _job(number, url="http://127.0.0.1:9/dead"), "jobs", GENERATE),
    "chats": Asked(40, lambda _: HONEST_CHAT),
    "long_chats": Asked(40, lambda _: _chat(**STREAM, **LOGPROBS)),  # as the network's clients
    "long_prompts": Asked(8, _long_prompt, path=COMPLETIONS),
    "jobs": Asked(8, _job, path=GENERATE),
}


class Answered(NamedTuple):
    """How one request of an honest client ended."""

    ms: float
    refusal: str | None  # None for status 200


@dataclass(frozen=True)
class Honest:
    """What an honest client saw of one kind of request."""

    requests: int
    refused: dict[str, int]  # by status and text; also without an answer in 60 s, or a callback
    median_ms: float
    p99_ms: float
    longest_ms: float


@dataclass(frozen=True)
class Seen:
    """The figures of one kind of bad clients."""

    kind: str
    at_once: int
    addresses: int
    honest: dict[str, Honest]  # by request; "chat" and "grammar" with a vLLM engine
    bodies_refused: int  # of the honest client, of a megabyte each
    memory_mb: float  # the most of the API's process
    bench_late_ms: float  # p99 of the delay of the honest clients' own event loop

    def to(self, alone: "Seen") -> dict[str, float]:
        """Returns the ratios of the p99s to those without bad clients."""
        return {
            name: round(one.p99_ms / alone.honest[name].p99_ms, 2)
            for name, one in self.honest.items()
        }


async def keep_open(port: int, kind: str, until: float, address: str) -> None:
    """Acts as one bad client, which connects again when it is disconnected."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            # limit: the bytes that the reader takes while nobody reads.
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, limit=1024, local_addr=(address, 0)
            )
            if kind == "unread":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await _send(writer, kind)
                    while kind == "unread" or await reader.read(1024):
                        await asyncio.sleep(1 if kind == "unread" else 0)
            except TimeoutError:
                pass
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.1)


async def _send(writer: asyncio.StreamWriter, kind: str) -> None:
    writer.write(HELD[kind])
    await writer.drain()
    while kind == "slow":
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(1)
    if kind == "almost":
        for left in range(LARGEST - 1, 0, -65536):
            writer.write(bytes(min(left, 65536)))
            await writer.drain()


async def ask_on(url: str, kind: str, number: int, until: float, address: str) -> None:
    """Acts as one bad client, which sends its next request after each answer."""
    asked = ASKED[kind]
    transport = httpx.AsyncHTTPTransport(local_address=address)
    async with httpx.AsyncClient(base_url=url, timeout=120, transport=transport) as client:
        while time.monotonic() < until:
            number += 1000
            if kind == "large":
                which = number % len(LARGE)
                path, content = LARGE[which][0], _encoded(which)
            else:
                path, content = asked.path, json.dumps(asked.body(number)).encode()
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with (
                    asyncio.timeout(max(0.1, until - time.monotonic())),
                    client.stream("POST", path, content=content, headers=JSON) as answer,
                ):
                    async for _ in answer.aiter_raw():
                        pass
            await asyncio.sleep(0.01)


async def ask(url: str, method: str, path: str, body: Any = None) -> Answered:
    """Sends one request on its own connection, which is the hardest case."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client:
        at = time.monotonic()
        try:
            answer = await client.request(method, path, json=body)
            text = f"{answer.status_code} {answer.text[:100]}"
            refusal = None if answer.status_code == 200 else text
        except httpx.HTTPError as error:
            refusal = type(error).__name__
        return Answered((time.monotonic() - at) * 1000, refusal)


async def keep_asking(
    url: str, until: float, method: str, path: str, body: Any, seen: list[Answered]
) -> None:
    """Acts as an honest client that repeats a request."""
    while time.monotonic() < until:
        seen.append(await ask(url, method, path, body))
        await asyncio.sleep(PAUSE_S)


async def jobs_with_url(url: str, until: float, seen: list[Answered]) -> None:
    """Acts as an honest client of jobs, and as their receiver; a missing callback is a refusal."""
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
        job = _job(1, url=f"http://127.0.0.1:{port}")
        while time.monotonic() < until:
            if n_owed() < OWN_CALLBACKS:
                seen.append(await ask(url, "POST", GENERATE, job))
            await asyncio.sleep(PAUSE_S)
        while n_owed() > 0 and time.monotonic() < until + CALLBACKS_S:
            await asyncio.sleep(PAUSE_S)
    seen += [Answered(CALLBACKS_S * 1000, "no callback")] * max(0, n_owed())


def summary(seen: list[Answered]) -> Honest:
    ms = [one.ms for one in seen]
    refused = Counter(one.refusal for one in seen if one.refusal is not None)
    return Honest(len(seen), dict(refused), statistics.median(ms), _p99(ms), max(ms))


def _p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


async def late(until: float) -> float:
    """Returns the p99 of the delay of this process's event loop, in ms."""
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
    """Returns how many of an honest client's bodies of a megabyte are refused with 503."""
    refused = 0
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client:
        while time.monotonic() < until:
            answer = await client.post(GENERATE, json={"padding": "x" * 1_000_000})
            refused += answer.status_code == 503
            await asyncio.sleep(0.5)
    return refused


@contextlib.contextmanager
def attacking(attack: Callable[..., None], *args: Any) -> Iterator[None]:
    """Calls `attack` in a separate process, so that it does not delay the honest clients.

    The body begins when the process has imported its modules.
    """
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(2)
    process = context.Process(target=_attack, args=(begin, attack, args))
    process.start()
    begin.wait(READY_TIMEOUT_S)
    try:
        yield
    finally:
        process.join()


def _attack(begin: Barrier, attack: Callable[..., None], args: Sequence[Any]) -> None:
    begin.wait(READY_TIMEOUT_S)
    attack(*args)


def all_at_once(url: str, port: int, kind: str, n: int, seconds: float, addresses: int) -> None:
    """Runs `n` bad clients of one kind for `seconds`."""

    async def every() -> None:
        until = time.monotonic() + seconds
        each = []
        for number in range(n):
            address = f"127.0.0.{2 + number % addresses}"
            if kind in ASKED:
                each.append(ask_on(url, kind, number, until, address))
            else:
                each.append(keep_open(port, kind, until, address))
        await asyncio.gather(*each, return_exceptions=True)

    asyncio.run(every())


def port_for(stack: Stack, kind: str) -> int:
    """Returns the port that clients of a kind connect to: the API's, or a worker's for chat."""
    if kind != "chat_port":
        return stack.port
    connections = psutil.Process(stack.worker_pids()[0]).net_connections("tcp")
    port: int = next(one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN)
    return port


def measure(stack: Stack, kind: str, n: int, seconds: float, addresses: int, of_chat: bool) -> Seen:
    async def run() -> Seen:
        until = time.monotonic() + seconds
        seen: dict[str, list[Answered]] = {"health": [], "job_with_url": []}
        clients = [
            keep_asking(url, until, "GET", "/health", None, seen["health"]),
            jobs_with_url(url, until, seen["job_with_url"]),
        ]
        if of_chat:
            choice = _chat(structured_outputs={"choice": ["yes", "no"]})
            for name, body in (("chat", HONEST_CHAT), ("grammar", choice)):
                seen[name] = []
                clients.append(keep_asking(url, until, "POST", CHAT, body, seen[name]))
        bodies = asyncio.create_task(large_bodies(url, until))
        memory = asyncio.create_task(largest_memory(process, until))
        own = asyncio.create_task(late(until))
        await asyncio.gather(*clients)
        honest = {name: summary(found) for name, found in seen.items()}
        addresses_of = addresses if n else 0
        return Seen(kind, n, addresses_of, honest, await bodies, await memory, await own)

    process, url = psutil.Process(stack.api_pid), stack.base_url
    with attacking(all_at_once, url, port_for(stack, kind), kind, n, seconds, addresses):
        return asyncio.run(run())


def table(rows: list[Seen]) -> str:
    """Returns what honest clients saw as a Markdown table, in ms."""
    columns = "bad clients | from | `/health` p99, longest | chat p50, p99 | grammar p99"
    columns += " | a job with a url p99 | refused | memory of the API, MB | the bench itself late"
    lines = [f"| {columns} |", "|" + "---|" * (columns.count("|") + 1)]
    for seen in rows:
        honest = seen.honest
        chat, grammar = honest.get("chat"), honest.get("grammar")
        statuses = Counter[str]()
        for one in honest.values():
            for why, n in one.refused.items():
                statuses[why.split(" ")[0]] += n
        reasons = ", ".join(f"{n} x {status}" for status, n in statuses.items())
        requests = sum(one.requests for one in honest.values())
        cells = [
            f"{seen.at_once} {seen.kind}" if seen.at_once else seen.kind,
            seen.addresses or "-",
            f"{honest['health'].p99_ms:.0f}, {honest['health'].longest_ms:.0f}",
            f"{chat.median_ms:.0f}, {chat.p99_ms:.0f}" if chat else "-",
            f"{grammar.p99_ms:.0f}" if grammar else "-",
            f"{honest['job_with_url'].p99_ms:.0f}",
            f"{seen.bodies_refused + statuses.total()} of {requests} {reasons}",
            f"{seen.memory_mb:.0f}",
            f"{seen.bench_late_ms:.0f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def allow_many_files() -> None:
    """Raises the soft limit of open files to the hard limit."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kind", choices=[*HELD, *ASKED], action="append")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument(
        "--addresses", type=int, action="append", help="of bad clients; may be repeated"
    )
    parser.add_argument("--engine", choices=["synthetic", "vllm"], default="synthetic")
    given = parser.parse_args()
    allow_many_files()
    of_chat = given.engine == "vllm"
    bad = [kind for kind, asked in ASKED.items() if asked.instead]
    usual = [*HELD, *bad] if of_chat else [*(kind for kind in HELD if kind != "chat_port"), "dead"]
    tried = [(NOBODY, 1, 0)]
    for addresses in given.addresses or [1]:
        for kind in given.kind or usual:
            if kind in ASKED:
                n = ASKED[kind].clients
                both = filter(None, (kind, ASKED[kind].instead))
                tried += [(one, addresses, n) for one in both]
            else:
                n = min(6, given.connections) if kind == "almost" else given.connections
                tried.append((kind, addresses, n))
    engine = EngineOptions(model=MODEL, engine=given.engine, synthetic_step_ms=10)
    with Stack(engine, workers=1 if of_chat else 2, env=OUTBOX) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        measure(stack, NOBODY, 0, 6, 1, of_chat)
        rows: list[Seen] = []
        for kind, addresses, n in dict.fromkeys(tried):
            rows.append(measure(stack, kind, n, given.seconds, addresses, of_chat))
            print(json.dumps(asdict(rows[-1]) | {"ratio": rows[-1].to(rows[0])}), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
