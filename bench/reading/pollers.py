"""How long a thousand polling clients wait for answers, compared with a bare FastAPI route.

    .venv/bin/python -m bench.reading.pollers

Each client polls its own job, which waits for the end of a round, or the node's status, every few
seconds. Turns of the bare route and of ours alternate; the ratio of their median p99 counts.
"""

import asyncio
import gc
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import httpx
import typer
from fastapi import FastAPI

from bench.harness.node import API, MODEL, body_of, document, running
from bench.harness.report import at_most, console, measures, run, table
from cli.supervise.ports import reserve_port
from cli.supervise.stack import Stack
from poc_core.answers import Progress
from workers.engines.options import EngineOptions

TARGET = 5.0
# Milliseconds of a micro-batch of the round: workers take next to no CPU time.
STEP_MS = 1000.0
# Seconds at the beginning of a turn that do not count: connections are made.
WARM_UP_S = 2.0
ANSWER_LIMIT_S = 60.0

app = FastAPI()  # the bare route, without Redis, checks or middleware


@app.get("/{request_id}")
async def read(request_id: str) -> Progress:
    return Progress(
        status="running", request_id=request_id, model=MODEL, n_total=1000, n_done=0,
        created_at=1764000000.5,
    )  # fmt: skip


@measures
def main(
    pollers: Annotated[
        int, typer.Option(min=1, help="Clients, each with its own connection.")
    ] = 1000,
    pause: Annotated[
        float,
        typer.Option(min=0, help="Seconds from an answer to the next poll; uvicorn closes at 5."),
    ] = 4.0,
    seconds: Annotated[float, typer.Option(min=1, help="How long each turn takes.")] = 12.0,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each kind.")] = 3,
) -> bool:
    """Exits with 1 when pollers wait more than 5 times as long as a bare route's, by p99."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    options = EngineOptions(model=MODEL, engine="synthetic", synthetic_step_ms=STEP_MS)
    with bare_route() as bare_port, running(Stack(options, workers=2)) as (stack, client):
        document(client.post(f"{API}/init/generate", json=body_of(MODEL)))
        job = body_of(MODEL, nonces=[0])
        ids = [
            document(client.post(f"{API}/generate", json=job))["request_id"] for _ in range(pollers)
        ]
        kinds = {
            "a bare route": (bare_port, [f"/{request_id}" for request_id in ids]),
            "own job": (stack.port, [f"{API}/generate/{request_id}" for request_id in ids]),
            "the status": (stack.port, [f"{API}/status"] * pollers),
        }
        turns: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        # The clients' own pauses for garbage, of 60 ms, would be part of their wait.
        gc.collect()
        gc.freeze()
        for _ in range(repeat):
            for kind, (port, paths) in kinds.items():
                turns[kind].append(asyncio.run(poll(port, paths, pause, seconds)))
    return report(turns, f"{pollers} pollers, {pause:g} s between two polls, {seconds:g} s each")


def report(turns: dict[str, list[list[float]]], title: str) -> bool:
    """Prints the milliseconds of each turn's answers by kind; the first kind is the reference."""
    rows = table(
        title, "polls", "answers", "median ms", "p99 ms of each turn", "median p99", "ratio"
    )
    bare, worst = 0.0, 0.0
    for kind, answers in turns.items():
        p99s = [statistics.quantiles(turn, n=100)[98] for turn in answers]
        p99 = statistics.median(p99s)
        bare = bare or p99
        worst = max(worst, p99 / bare)
        rows.add_row(
            kind,
            str(sum(map(len, answers))),
            f"{statistics.median(ms for turn in answers for ms in turn):.1f}",
            " ".join(f"{value:.1f}" for value in p99s),
            f"{p99:.1f}",
            f"{p99 / bare:.2f}",
        )
    console.print(rows)
    return at_most("p99 over a bare route's", worst, TARGET, ".2f")


async def poll(port: int, paths: Sequence[str], pause_s: float, seconds: float) -> list[float]:
    """Returns the milliseconds of every answer after the warm-up."""
    began = time.monotonic()
    took = await asyncio.gather(
        *(one_poller(port, path, pause_s, began, began + seconds) for path in paths)
    )
    return [ms for one in took for ms in one]


async def one_poller(
    port: int, path: str, pause_s: float, began: float, until: float
) -> list[float]:
    # Clients that come at the same moment would be one burst after the other.
    await asyncio.sleep(random.uniform(0, max(pause_s, 0.2)))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    took_ms: list[float] = []
    try:
        while time.monotonic() < until:
            if reader.at_eof():  # closed because it was idle
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            asked = time.monotonic()
            writer.write(request)
            async with asyncio.timeout(ANSWER_LIMIT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 "), head
                length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length))
            if asked - began > WARM_UP_S:
                took_ms.append((time.monotonic() - asked) * 1000)
            await asyncio.sleep(pause_s)
    finally:
        writer.close()
    return took_ms


@contextmanager
def bare_route() -> Iterator[int]:
    """Runs the bare route in its own process, with uvicorn as the API; yields its port."""
    port = reserve_port("127.0.0.1", 0)
    options = ["--no-access-log", "--http", "httptools", "--ws", "none", "--log-level", "warning"]
    command = [sys.executable, "-m", "uvicorn", "bench.reading.pollers:app", "--port", str(port)]
    with subprocess.Popen([*command, *options]) as server:
        try:
            # Connecting is tried again for up to 60 s.
            transport = httpx.HTTPTransport(retries=9)
            with httpx.Client(transport=transport, trust_env=False) as client:
                client.get(f"http://127.0.0.1:{port}/x").raise_for_status()
            yield port
        finally:
            server.terminate()


if __name__ == "__main__":
    run(main)
