"""What the API adds to a chat request, with and without its memory of workers (CHAT_MEMORY_S).

    .venv/bin/python -m bench.chat_proxy

A real Redis, one API process and a worker's server that answers at once: the CPU time that a
request takes the API and Redis, and how long its client waits. The two kinds of API take turns.
"""

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

import httpx
import psutil
import typer
import uvicorn
from rich.table import Table
from starlette.types import Receive, Scope, Send

from bench.harness import machine
from bench.harness.report import console, exit_with
from cli.supervise.redis_server import find_redis_server, free_port, wait_for_redis
from poc_core.errors import ProoflineError
from poc_core.records import ModelInfo, WorkerRecord
from poc_core.settings import Settings, load_settings
from poc_core.state import WorkerRegistry, connect

MODEL = "tiny-qwen3"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
CLIENTS = 4  # at the same time, as many as two cores can serve
START_TIMEOUT_S = 60.0
TARGET = 0.95  # of the CPU time without the memory that a request may take with it


@dataclass(frozen=True)
class Run:
    """Milliseconds of one request."""

    api_cpu_ms: float
    redis_cpu_ms: float
    wait_ms: float  # the median that clients saw


class Node:
    """A Redis that knows `workers` workers, all at one address, and an API for each cache time."""

    def __init__(self, stack: ExitStack, workers: int, caches_s: list[float]) -> None:
        port = free_port()
        url = f"redis://127.0.0.1:{port}/0"
        self.redis = stack.enter_context(
            _process([str(find_redis_server()), "--port", str(port), "--save", ""])
        )
        wait_for_redis(url)
        settings = load_settings(redis_url=url, worker_ttl_s=3600)
        _register(settings, workers, stack.enter_context(_worker_server()))
        self.apis: dict[float, tuple[psutil.Process, httpx.Client]] = {}
        for cache_s in caches_s:
            port = free_port()
            remembers = f"from poc_core.state import registry; registry.CHAT_MEMORY_S = {cache_s}"
            code = f"{remembers}; from cli.main import app; app()"
            command = [sys.executable, "-c", code, "api", "--port", str(port), "--redis-url", url]
            api = stack.enter_context(_process(command))
            client = httpx.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=START_TIMEOUT_S, trust_env=False
            )
            self.apis[cache_s] = api, stack.enter_context(client)
            _wait_until_up(client)

    def run(self, cache_s: float, n: int) -> Run:
        api, client = self.apis[cache_s]
        before = [machine.cpu_s(api), machine.cpu_s(self.redis)]

        def ask(_: int) -> float:
            began = time.monotonic()
            client.post("/v1/chat/completions", json=BODY).raise_for_status()
            return 1000 * (time.monotonic() - began)

        with ThreadPoolExecutor(CLIENTS) as pool:
            waits_ms = list(pool.map(ask, range(n)))
        after = [machine.cpu_s(api), machine.cpu_s(self.redis)]
        api_ms, redis_ms = (
            1000 * (now - then) / n for now, then in zip(after, before, strict=True)
        )
        return Run(api_ms, redis_ms, statistics.median(waits_ms))


def main(
    workers: Annotated[str, typer.Option(help="Numbers of workers, in turn.")] = "1,16",
    requests: Annotated[int, typer.Option(min=100, help="Chat requests of a run.")] = 2000,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each kind; medians count.")] = 5,
    cache_s: Annotated[
        float, typer.Option(min=0.01, help="The cache time to compare with none.")
    ] = 0.25,
) -> None:
    """Compares an API that asks Redis for each chat request with one that remembers its workers."""
    exit_with(lambda: measure([int(n) for n in workers.split(",")], requests, repeat, cache_s))


def measure(counts: list[int], requests: int, repeat: int, cache_s: float) -> bool:
    console.print(
        f"{machine.describe()}; {requests} requests a run, {CLIENTS} at a time", highlight=False
    )
    table = Table(title="A chat request through the API")
    for heading in ("workers", "cache s", "API CPU ms", "Redis CPU ms", "wait ms"):
        table.add_column(heading, justify="right")
    passed = True
    for n_workers in counts:
        with ExitStack() as stack:
            node = Node(stack, n_workers, [0.0, cache_s])
            runs: dict[float, list[Run]] = {0.0: [], cache_s: []}
            for kind in runs:
                node.run(kind, requests // 10)  # to warm up
            for _ in range(repeat):
                for kind in runs:
                    runs[kind].append(node.run(kind, requests))
        cpu_ms: dict[float, float] = {}
        for kind, found in runs.items():
            cpu_ms[kind] = statistics.median(run.api_cpu_ms for run in found)
            redis_ms = statistics.median(run.redis_cpu_ms for run in found)
            wait_ms = statistics.median(run.wait_ms for run in found)
            table.add_row(
                str(n_workers),
                f"{kind:g}",
                f"{cpu_ms[kind]:.3f}",
                f"{redis_ms:.3f}",
                f"{wait_ms:.2f}",
            )
        passed &= cpu_ms[cache_s] <= TARGET * cpu_ms[0.0]
    console.print(table)
    return passed


def _register(settings: Settings, workers: int, port: int) -> None:
    registry = WorkerRegistry(connect(settings), settings)
    info = ModelInfo(MODEL, 128, 4, 1024, 8192, "bfloat16")
    stats = {
        "chat_active": 0,
        "chat_total": 1000,
        "chat_refused": 0,
        "skips": 0,
        "proof_busy_s": 1.5,
    }
    worker = WorkerRecord(
        "",
        MODEL,
        "vllm",
        "here",
        1,
        "ready",
        time.time(),
        info,
        port,
        chat_host="127.0.0.1",
        stats=stats,
    )
    for index in range(workers):
        registry.heartbeat(replace(worker, id=f"w{index}"))


@contextmanager
def _process(command: list[str]) -> Iterator[psutil.Process]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield psutil.Process(process.pid)
        process.terminate()


@contextmanager
def _worker_server() -> Iterator[int]:
    """The port of a server in this process that has an answer ready."""
    answer = (
        b'{"id":"chat-1","object":"chat.completion",'
        b'"choices":[{"index":0,"message":{"content":"Hello"}}]}'
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(answer)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port
    server.should_exit = True
    thread.join()


def _wait_until_up(client: httpx.Client) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            client.get("/livez").raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise ProoflineError("The API did not start; `proofline api` says why.")


if __name__ == "__main__":
    typer.run(main)
