"""What the API adds to a chat request.

    .venv/bin/python -m bench.chat_proxy

A real Redis and API process in front of a worker's server that answers at once: the CPU time of the
API and of Redis for a request, and the time that its client waits.
"""

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import httpx
import psutil
import typer
import uvicorn
from starlette.responses import JSONResponse

from bench.fleet.centre import centre
from bench.harness import machine
from bench.harness.node import MODEL
from bench.harness.report import Repeat, console, measures, run, say, table
from cli.supervise.redis_server import free_port
from poc_core.records import ModelInfo, WorkerRecord
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.registry import WorkerRegistry

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
ANSWER = {"object": "chat.completion", "choices": [{"message": {"content": "Hello"}}]}
WORKER_TTL_S = "3600"
CLIENTS = 4  # at the same time, as many as two cores can serve


@measures
def main(
    workers: Annotated[str, typer.Option(help="Numbers of workers, in turn.")] = "1,16",
    requests: Annotated[int, typer.Option(min=10, help="Chat requests of a run.")] = 2000,
    repeat: Repeat = 5,
) -> None:
    """Prints milliseconds per request, medians of the runs."""
    say(f"{machine.describe()}; {requests} requests a run, {CLIENTS} at a time")
    headings = ("workers", "API CPU ms", "Redis CPU ms", "wait ms")
    rows = table("A chat request through the API", *headings)
    for n_workers in map(int, workers.split(",")):
        with answering() as port, centre(POC_WORKER_TTL_S=WORKER_TTL_S) as node:
            register(n_workers, port, str(node.redis_url))
            processes = [psutil.Process(node.api_pid), psutil.Process(node.redis_pid)]
            measure(node.base_url, processes, requests // 10)  # to warm up
            runs = [measure(node.base_url, processes, requests) for _ in range(repeat)]
        medians = [statistics.median(figures) for figures in zip(*runs, strict=True)]
        rows.add_row(f"{n_workers}", *(f"{figure:.3f}" for figure in medians))
    console.print(rows)


def measure(url: str, processes: list[psutil.Process], n: int) -> list[float]:
    """Returns the milliseconds of each process per request, and the median wait of clients."""
    before = [machine.cpu_s(one) for one in processes]
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:

        def ask(_: int) -> float:
            began = time.monotonic()
            client.post("/v1/chat/completions", json=BODY).raise_for_status()
            return 1000 * (time.monotonic() - began)

        with ThreadPoolExecutor(CLIENTS) as pool:
            waits_ms = list(pool.map(ask, range(n)))
    after = [machine.cpu_s(one) for one in processes]
    cpu_ms = [1000 * (now - then) / n for now, then in zip(after, before, strict=True)]
    return [*cpu_ms, statistics.median(waits_ms)]


def register(n: int, port: int, redis_url: str) -> None:
    """Registers `n` ready workers at one port."""
    settings = load_settings(redis_url=redis_url, worker_ttl_s=float(WORKER_TTL_S))
    registry = WorkerRegistry(connect(settings), settings)
    info = ModelInfo(MODEL, 128, 4, 1024, 8192, "bfloat16")
    stats = {"chat_active": 0, "chat_total": 1000, "chat_refused": 0, "skips": 0}
    at = time.time()
    worker = WorkerRecord("", MODEL, "vllm", "here", 1, "ready", at, info, port)
    worker = replace(worker, chat_host="127.0.0.1", stats={**stats, "proof_busy_s": 1.5})
    for index in range(n):
        registry.heartbeat(replace(worker, id=f"w{index}"))


@contextmanager
def answering() -> Iterator[int]:
    """Runs a server in this process that answers every request; yields its port."""
    port, app = free_port(), JSONResponse(ANSWER)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield port
    server.should_exit = True
    thread.join()


if __name__ == "__main__":
    run(main)
