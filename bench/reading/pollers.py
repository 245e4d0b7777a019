"""How long a thousand polling clients wait for answers, over a bare FastAPI route in the same run.

    .venv/bin/python -m bench.reading.pollers

Each polls a job of its own, which waits for the end of a round, or the node's status, once every
few seconds. Turns of the bare route and of ours alternate; the ratio of their median p99 counts.
The target is 5.
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
from rich.table import Table

from bench.harness.report import console, exit_with
from cli.supervise.ports import reserve_port
from cli.supervise.stack import Stack
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 300.0
TARGET = 5.0
MODEL = "tiny-qwen3"  # its name only: the engine loads none
# Milliseconds of a micro-batch of the round: workers take next to no CPU time.
STEP_MS = 1000.0
# Seconds at the beginning of a turn that do not count: connections are made.
WARM_UP_S = 2.0
ANSWER_LIMIT_S = 60.0
ROUND = {
    "block_hash": "bench", "block_height": 1, "public_key": "bench", "node_id": 0, "node_count": 1,
    "params": {"model": MODEL, "seq_len": 64},
}  # fmt: skip
JOB = ROUND | {"nonces": [0]}


def main(
    pollers: Annotated[
        int, typer.Option(min=1, help="Clients, each with a connection of its own.")
    ] = 1000,
    pause: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds from an answer to the client's next question; uvicorn closes at 5."
        ),
    ] = 4.0,
    seconds: Annotated[float, typer.Option(min=1, help="How long each turn takes.")] = 12.0,
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each kind.")] = 3,
) -> None:
    """Exits with 1 when pollers wait more than 5 times as long as a bare route's, by p99."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
    exit_with(lambda: measure(pollers, pause, seconds, repeat))


def measure(n_pollers: int, pause_s: float, seconds: float, repeat: int) -> bool:
    options = EngineOptions(model=MODEL, engine="synthetic", synthetic_step_ms=STEP_MS)
    with bare_route() as bare_port, Stack(options, workers=2) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        with httpx.Client(base_url=stack.base_url, timeout=60, trust_env=False) as client:
            client.post("/api/v1/pow/init/generate", json=ROUND).raise_for_status()
            ids = [submit(client) for _ in range(n_pollers)]
        kinds = {
            "a bare route": (bare_port, [f"/{request_id}" for request_id in ids]),
            "a job of its own": (
                stack.port,
                [f"/api/v1/pow/generate/{request_id}" for request_id in ids],
            ),
            "the status": (stack.port, ["/api/v1/pow/status"] * n_pollers),
        }
        turns: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
        # The clients' own pauses for garbage, of 60 ms, would be part of their wait.
        gc.collect()
        gc.freeze()
        for _ in range(repeat):
            for kind, (port, paths) in kinds.items():
                turns[kind].append(asyncio.run(poll(port, paths, pause_s, seconds)))
    return report(
        turns,
        f"{n_pollers} pollers, {pause_s:g} s between two polls, {repeat} turns of {seconds:g} s",
    )


def report(turns: dict[str, list[list[float]]], title: str) -> bool:
    """Prints a table of `turns`: milliseconds of each turn's answers, by kind.

    The first kind is what the others are held against.
    """
    table = Table(title=title)
    for heading in (
        "polls",
        "answers",
        "median ms",
        "p99 ms of each turn",
        "median p99",
        "over the bare route",
    ):
        table.add_column(heading, justify="right")
    bare, worst = 0.0, 0.0
    for kind, answers in turns.items():
        p99s = [statistics.quantiles(turn, n=100)[98] for turn in answers]
        p99 = statistics.median(p99s)
        bare = bare or p99
        worst = max(worst, p99 / bare)
        table.add_row(
            kind,
            str(sum(map(len, answers))),
            f"{statistics.median(ms for turn in answers for ms in turn):.1f}",
            " ".join(f"{value:.1f}" for value in p99s),
            f"{p99:.1f}",
            f"{p99 / bare:.2f}",
        )
    console.print(table)
    passed = worst <= TARGET
    console.print(
        f"{'PASS' if passed else 'FAIL'}: p99 at most {TARGET:g} times a bare route's: {worst:.2f}"
    )
    return passed


async def poll(port: int, paths: Sequence[str], pause_s: float, seconds: float) -> list[float]:
    """Milliseconds of every answer after the warm-up."""
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
            if reader.at_eof():  # closed for having been idle
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
    """The port of a server of its own, by uvicorn as the API is."""
    port = reserve_port("127.0.0.1", 0)
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "bench.reading.bare_route:app",
        "--port",
        str(port),
        "--no-access-log",
    ]
    with subprocess.Popen(
        [*command, "--http", "httptools", "--ws", "none", "--log-level", "warning"]
    ) as server:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                until = time.monotonic() + 60
                while True:
                    try:
                        client.get("/x")
                        break
                    except httpx.ConnectError:
                        assert time.monotonic() < until, "the bare route's server does not answer"
                        time.sleep(0.1)
            yield port
        finally:
            server.terminate()


def submit(client: httpx.Client) -> str:
    answer = client.post("/api/v1/pow/generate", json=JOB)
    answer.raise_for_status()
    request_id: str = answer.json()["request_id"]
    return request_id


if __name__ == "__main__":
    typer.run(main)
