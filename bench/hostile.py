"""What honest clients see during an attack by 20 hostile clients of 26 kinds: `make hostile`.

    .venv/bin/python -m bench.hostile --minutes 10

Each hostile client changes its kind at random every few seconds. Prints a line of JSON per minute,
and at the end what honest clients saw. Targets on two cores with the tiny model: chats' p99 at most
3 s, jobs' median at most 10 s, nothing refused, no worker replaced, and memory flat after the first
minute.
"""

import asyncio
import contextlib
import gzip
import json
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil

from bench.bad_clients import (
    ASKED,
    CHAT,
    COMPLETIONS,
    GENERATE,
    HELD,
    HONEST_CHAT,
    JOB,
    JSON,
    LARGE,
    OUTBOX,
    PAUSE_S,
    Answered,
    allow_many_files,
    ask_on,
    attacking,
    keep_asking,
    keep_open,
    port_for,
    summary,
)
from bench.harness.node import API, MODEL, READY_TIMEOUT_S
from bench.harness.report import parser_of
from cli.supervise.stack import Stack
from workers.engines.options import EngineOptions

CLIENTS = 20
# Connections that one client holds open; fewer if each sends megabytes.
CONNECTIONS, OF_ALMOST = 50, 2
LONGEST_TURN_S = 10.0
LONG = {"model": MODEL, "prompt": "Tell me.", "max_tokens": 1500, "ignore_eos": True}
BOMB = b""  # 256 MB of zeros, compressed in the process that sends it


async def hang_up(client: httpx.AsyncClient) -> None:
    """Begins a long answer and disconnects."""
    async with client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as answer:
        await anext(answer.aiter_raw(), b"")


async def zipped(client: httpx.AsyncClient) -> None:
    await client.post(CHAT, content=BOMB, headers=JSON | {"Content-Encoding": "gzip"})


async def large_jobs(client: httpx.AsyncClient) -> None:
    """Sends a job of thousands of nonces and cancels it."""
    answer = await client.post(GENERATE, json=JOB | {"nonces": list(range(5000))})
    if answer.status_code == 200:
        await client.delete(f"{GENERATE}/{answer.json()['request_id']}")


async def polls(client: httpx.AsyncClient) -> None:
    """Reads the most expensive documents."""
    for path in (f"{API}/status", "/metrics", "/openapi.json", "/v1/models"):
        await client.get(path)


async def nonsense(client: httpx.AsyncClient) -> None:
    """Sends random bytes to a random path, and deeply nested JSON to chat."""
    await client.post(f"/{random.random()}", content=random.randbytes(10_000))
    await client.post(CHAT, content=b"[" * 100_000, headers=JSON)


STEPS: dict[str, Callable[[httpx.AsyncClient], Any]] = {
    step.__name__: step for step in (hang_up, zipped, large_jobs, polls, nonsense)
}
LEFT_OUT = ("large", "prompt_logprobs", "echo")
BAD = (kind for kind, asked in ASKED.items() if asked.instead and kind not in LEFT_OUT)
# Each request of `large` is a separate kind, named by its number.
MIX = (*HELD, *BAD, *(f"large {n}" for n in range(len(LARGE))), *STEPS)


async def _turn(url: str, ports: dict[str, int], kind: str, until: float, number: int) -> None:
    address = f"127.0.0.{2 + number}"
    if kind in HELD:
        n = OF_ALMOST if kind == "almost" else CONNECTIONS
        each = (keep_open(ports[kind], kind, until, address) for _ in range(n))
        await asyncio.gather(*each, return_exceptions=True)
    elif kind in STEPS:
        transport = httpx.AsyncHTTPTransport(local_address=address)
        async with httpx.AsyncClient(base_url=url, timeout=60, transport=transport) as client:
            async with asyncio.timeout(until - time.monotonic()):
                while True:
                    with contextlib.suppress(httpx.HTTPError):
                        await STEPS[kind](client)
                    await asyncio.sleep(PAUSE_S)
    else:
        name, _, which = kind.partition(" ")
        await ask_on(url, name, int(which or number), until, address)


def attack(url: str, ports: dict[str, int], seconds: float, seed: int) -> None:
    """Runs all hostile clients for `seconds`."""
    global BOMB
    BOMB = gzip.compress(bytes(2**28), 1)

    async def client(number: int, until: float) -> None:
        chance = random.Random(seed * CLIENTS + number)
        while (now := time.monotonic()) < until:
            ends_at = min(until, now + chance.uniform(2, LONGEST_TURN_S))
            with contextlib.suppress(Exception):
                await _turn(url, ports, chance.choice(MIX), ends_at, number)

    async def every() -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(client(number, until) for number in range(CLIENTS)))

    asyncio.run(every())


def memory_mb(stack: Stack) -> dict[str, float]:
    """Returns the memory of the API, of a worker and of its engine core."""
    found = {"api": psutil.Process(stack.api_pid)}
    for pid in stack.worker_pids():
        found["worker"] = psutil.Process(pid)
        children = found["worker"].children(recursive=True)
        if children:
            found["core"] = max(children, key=lambda one: one.memory_info().rss)
    return {name: round(one.memory_info().rss / 1e6) for name, one in found.items()}


def in_short(seen: dict[str, list[Answered]]) -> dict[str, Any]:
    return {
        name: {
            "n": one.requests,
            "refused": sum(one.refused.values()),
            "p50_ms": round(one.median_ms),
            "p99_ms": round(one.p99_ms),
        }
        | ({"why": one.refused} if one.refused else {})
        for name, one in ((name, summary(found)) for name, found in seen.items() if found)
    }


async def measure(stack: Stack, seconds: float) -> dict[str, list[Answered]]:
    """Runs the honest clients and prints their figures every minute; returns all answers."""
    began = time.monotonic()
    url, until = stack.base_url, began + seconds
    seen: dict[str, list[Answered]] = {"chat": [], "job": [], "health": []}
    chat, job = ("POST", CHAT, HONEST_CHAT), JOB | {"nonces": [1], "wait": True}
    asked = [("chat", *chat), ("chat", *chat), ("job", "POST", GENERATE, job)]
    clients = [
        asyncio.create_task(keep_asking(url, until, method, path, body, seen[name]))
        for name, method, path, body in (*asked, ("health", "GET", "/health", None))
    ]
    while time.monotonic() < until:
        before = {name: len(found) for name, found in seen.items()}
        await asyncio.sleep(min(60.0, max(0.0, until - time.monotonic())))
        lately = {name: found[before[name] :] for name, found in seen.items()}
        at = {"s": round(time.monotonic() - began), "memory_mb": memory_mb(stack)}
        print(json.dumps(at | in_short(lately)), flush=True)
    await asyncio.gather(*clients)
    return seen


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    allow_many_files()
    with Stack(EngineOptions(model=MODEL, engine="vllm"), workers=1, env=OUTBOX) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        alone = asyncio.run(measure(stack, 30))
        workers, seconds = stack.worker_pids(), given.minutes * 60
        ports = {kind: port_for(stack, kind) for kind in HELD}
        with attacking(attack, stack.base_url, ports, seconds, given.seed):
            seen = asyncio.run(measure(stack, seconds))
        replaced = set(workers) - set(stack.worker_pids())
    print(json.dumps({"alone": in_short(alone)}))
    print(json.dumps({"with hostile clients": in_short(seen), "workers replaced": len(replaced)}))


if __name__ == "__main__":
    main()
