"""Twenty hostile clients of 26 kinds beside honest ones, for as long as is asked: `make hostile`.

.venv/bin/python -m bench.hostile --minutes 10

Each hostile client is of one kind for some seconds and then of another, by chance. A line of JSON
for each minute, and at the end what honest clients saw in all. Targets on two cores with the tiny
model: chats' p99 at most 3 s, jobs' median at most 10 s, nothing refused, no worker replaced, and
memory flat after the first minute.
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import multiprocessing
import random
import resource
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import httpx
import psutil

from bench.bad_clients import (
    CHAT,
    GENERATE,
    JOB,
    KINDS,
    LARGE,
    MODEL,
    OUTBOX,
    PAUSE_S,
    READY_TIMEOUT_S,
    Answered,
    _asked,
    _told,
    ask_on,
    chats,
    keep_open,
    port_for,
)
from cli.supervise.stack import Stack
from workers.engines.options import EngineOptions

CLIENTS = 20
# Connections of one client that holds some open, few where each sends megabytes.
CONNECTIONS, OF_ALMOST = 50, 2
LONGEST_TURN_S = 10.0
STREAM = {"model": MODEL, "prompt": "Tell me.", "max_tokens": 1500, "ignore_eos": True}


async def hang_up(client: httpx.AsyncClient) -> None:
    """Begins a long answer and hangs up."""
    async with client.stream("POST", "/v1/completions", json=STREAM | {"stream": True}) as answer:
        await anext(answer.aiter_raw(), b"")


async def zipped(client: httpx.AsyncClient) -> None:
    """Sends 256 MB of nothing in one."""
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    await client.post(CHAT, content=BOMB, headers=headers)


async def large_jobs(client: httpx.AsyncClient) -> None:
    """Sends a job of thousands of nonces and cancels it."""
    answer = await client.post(GENERATE, json=JOB | {"nonces": list(range(5000))})
    if answer.status_code == 200:
        await client.delete(f"{GENERATE}/{answer.json()['request_id']}")


async def polls(client: httpx.AsyncClient) -> None:
    """Asks for what costs most to read."""
    for path in ("/api/v1/pow/status", "/metrics", "/openapi.json", "/v1/models"):
        await client.get(path)


async def nonsense(client: httpx.AsyncClient) -> None:
    """Asks for what there is not, and says what nobody reads."""
    await client.post(f"/{random.random()}", content=random.randbytes(10_000))
    await client.post(CHAT, content=b"[" * 100_000, headers={"Content-Type": "application/json"})


BOMB = b""  # made by the process that sends it
STEPS: dict[str, Callable[[httpx.AsyncClient], Any]] = {
    step.__name__: step for step in (hang_up, zipped, large_jobs, polls, nonsense)
}
BAD = ("answers", "choices", "grammars", "logprobs", "known", "scores", "broken", "dead")
# Each of `large` is a kind of its own, by its number.
MIX = (*KINDS, *BAD, *(f"large {n}" for n in range(len(LARGE))), *STEPS)


async def _turn(url: str, ports: dict[str, int], kind: str, until: float, number: int) -> None:
    address = f"127.0.0.{2 + number}"
    if kind in KINDS:
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


def attack(url: str, ports: dict[str, int], seconds: float, seed: int, begin: Barrier) -> None:
    """All hostile clients, for so long."""
    global BOMB
    BOMB = gzip.compress(bytes(2**28), 1)

    async def client(number: int, until: float) -> None:
        chance = random.Random(seed * CLIENTS + number)
        while (now := time.monotonic()) < until:
            ends_at = min(until, now + chance.uniform(2, LONGEST_TURN_S))
            with contextlib.suppress(Exception):
                await _turn(url, ports, chance.choice(MIX), ends_at, number)

    async def all_of_them() -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(client(number, until) for number in range(CLIENTS)))

    begin.wait(READY_TIMEOUT_S)
    asyncio.run(all_of_them())


def memory_mb(stack: Stack) -> dict[str, float]:
    """Of the API, and of each worker with its engine core."""
    found = {"api": psutil.Process(stack.api_pid)}
    for pid in stack.worker_pids():
        found["worker"] = psutil.Process(pid)
        children = found["worker"].children(recursive=True)
        if children:
            found["core"] = max(children, key=lambda one: one.memory_info().rss)
    return {name: round(one.memory_info().rss / 1e6) for name, one in found.items()}


async def honest(
    url: str, until: float, seen: list[Answered], method: str, path: str, body: Any
) -> None:
    while time.monotonic() < until:
        seen.append(await _asked(url, method, path, body))
        await asyncio.sleep(PAUSE_S)


def in_short(seen: dict[str, list[Answered]]) -> dict[str, Any]:
    told = {name: _told(found) for name, found in seen.items() if found}
    return {
        name: {
            "n": one.requests,
            "refused": one.refused,
            "p50_ms": round(one.median_ms),
            "p99_ms": round(one.p99_ms),
        }
        | ({"why": {what: len(when) for what, when in one.why.items()}} if one.why else {})
        for name, one in told.items()
    }


async def run(stack: Stack, seconds: float, seed: int, is_quiet: bool) -> dict[str, list[Answered]]:
    url = stack.base_url
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(2)
    ports = {kind: port_for(stack, kind) for kind in KINDS}
    bad = context.Process(target=attack, args=(url, ports, seconds, seed, begin))
    if not is_quiet:
        bad.start()
        await asyncio.to_thread(begin.wait, READY_TIMEOUT_S)
    began = time.monotonic()
    until = began + seconds
    seen: dict[str, list[Answered]] = {"chat": [], "job": [], "health": []}
    job = JOB | {"nonces": [1], "wait": True}
    clients = [
        asyncio.create_task(honest(url, until, seen[name], *asked))
        for name, *asked in (
            ("chat", "POST", CHAT, chats(0)),
            ("chat", "POST", CHAT, chats(0)),
            ("job", "POST", GENERATE, job),
            ("health", "GET", "/health", None),
        )
    ]
    while time.monotonic() < until:
        before = {name: len(found) for name, found in seen.items()}
        await asyncio.sleep(min(60.0, max(0.0, until - time.monotonic())))
        lately = {name: found[before[name] :] for name, found in seen.items()}
        at = {"s": round(time.monotonic() - began), "memory_mb": memory_mb(stack)}
        print(json.dumps(at | in_short(lately)), flush=True)
    await asyncio.gather(*clients)
    if not is_quiet:
        await asyncio.to_thread(bad.join)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    with Stack(EngineOptions(model=MODEL, engine="vllm"), workers=1, env=OUTBOX) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        alone = asyncio.run(run(stack, 30, options.seed, is_quiet=True))
        workers = stack.worker_pids()
        seen = asyncio.run(run(stack, options.minutes * 60, options.seed, is_quiet=False))
        replaced = set(workers) - set(stack.worker_pids())
    print(json.dumps({"alone": in_short(alone)}))
    print(json.dumps({"beside hostile clients": in_short(seen), "workers replaced": len(replaced)}))


if __name__ == "__main__":
    main()
