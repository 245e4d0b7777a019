"""What a read of /api/v1/metrics takes at a node of many engines, and what it costs the API.

    .venv/bin/python -m bench.reading.node_metrics

The engines are stand-ins, servers in a process of their own that answer as vLLM 0.32 does; API and
Redis are real. Targets at 64 engines: a read within 100 ms, and below 1 % of a core at one read in
10 s.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import httpx
import psutil
import typer
from prometheus_client.parser import text_string_to_metric_families

from api.node_metrics.families import GPU
from bench.harness.machine import cpu_s, describe
from bench.harness.report import console, exit_with
from cli.supervise.stack import Stack
from poc_core.machine_figures import GpuFigures, MachineFigures
from poc_core.records import WorkerRecord
from poc_core.serving.deployments import HostReport, HostState
from poc_core.settings import load_settings
from poc_core.state import DeploymentStore, WorkerRegistry, connect
from tests.harness.samples import worker_record
from tests.vllm_metrics import metrics_text
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 120.0
PATH = "/api/v1/metrics"
MOST_MS = 100.0
MOST_CORES = 0.01
GPUS_OF_A_HOST = 8
HEARTBEAT_S = 2.0


def main(
    engines: Annotated[
        int, typer.Option(min=1, help="Stand-ins for engines, eight to a host.")
    ] = 64,
    reads: Annotated[int, typer.Option(min=1, help="That count, after one that does not.")] = 12,
    pause: Annotated[float, typer.Option(min=0, help="Seconds from one read to the next.")] = 10.0,
    serve: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Exits with 1 when reads, by their median, take longer than the target, or the API more of
    a core.
    """
    if serve:
        asyncio.run(stand_ins(engines))
    else:
        exit_with(lambda: measure(engines, reads, pause))


async def stand_ins(n: int) -> None:
    """Serves until its standard input ends; says its ports."""
    body = metrics_text().encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline() not in (b"\r\n", b""):
            pass
        writer.write(head + body)
        writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(n)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextmanager
def served(n: int) -> Iterator[list[int]]:
    """The ports of so many stand-ins, in a process of their own."""
    command = [sys.executable, "-m", "bench.reading.node_metrics", "--serve", "--engines", str(n)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.communicate()


@contextmanager
def registered(ports: list[int], redis_url: str) -> Iterator[None]:
    """Within, the node takes the stand-ins for engines of hosts with GPUs."""
    settings = load_settings(redis_url=redis_url)
    redis = connect(settings)
    registry, hosts = WorkerRegistry(redis, settings), DeploymentStore(redis, settings)
    records = [
        replace(worker_record(f"stand-in-{port}"), port=port, chat_host="127.0.0.1")
        for port in ports
    ]
    ended = threading.Event()

    def beat() -> None:
        while True:
            tell(registry, hosts, records)
            if ended.wait(HEARTBEAT_S):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def tell(registry: WorkerRegistry, hosts: DeploymentStore, records: list[WorkerRecord]) -> None:
    sensors = {family.name.removeprefix("mlnode_gpu_"): 81.5 for family in GPU}
    for record in records:
        registry.heartbeat(record)
    for host in range(-(-len(records) // GPUS_OF_A_HOST)):
        gpus = [
            GpuFigures(uuid=f"{host}-{gpu}", model="NVIDIA H200", sensors=sensors)
            for gpu in range(GPUS_OF_A_HOST)
        ]
        name = f"stand-in-{host}"
        hosts.report(HostReport(id=name, host=name, state=HostState.IDLE, generation=0))
        hosts.store_machine(name, MachineFigures(host=name, read_at=time.time(), gpus=tuple(gpus)))


def measure(n_engines: int, n_reads: int, pause_s: float) -> bool:
    console.print(describe())
    options = EngineOptions(model="tiny-qwen3", engine="synthetic")
    with served(n_engines) as ports, Stack(options, workers=1) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        assert stack.redis_url is not None
        assert stack.api_pid is not None
        with (
            registered(ports, stack.redis_url),
            httpx.Client(base_url=stack.base_url, trust_env=False) as client,
        ):
            text = first(client, n_engines)
            api = psutil.Process(stack.api_pid)
            idle_s = -cpu_s(api)
            time.sleep(n_reads * pause_s)
            idle_s += cpu_s(api)
            busy_s, took_ms = -cpu_s(api), []
            for _ in range(n_reads):
                began = time.monotonic()
                client.get(PATH).raise_for_status()
                took_ms.append((time.monotonic() - began) * 1000)
                time.sleep(pause_s)
            busy_s += cpu_s(api)
    cores = (busy_s - idle_s) / (n_reads * pause_s)
    n_series = sum(len(family.samples) for family in text_string_to_metric_families(text))
    console.print(f"{n_engines} engines: {n_series} series, {len(text.encode())} bytes")
    console.print(
        f"a read: median {statistics.median(took_ms):.1f} ms, longest {max(took_ms):.1f} ms"
    )
    console.print(
        f"the API: {cores:.4f} of a core more than without reads, at one in {pause_s:g} s"
    )
    return statistics.median(took_ms) < MOST_MS and cores < MOST_CORES


def first(client: httpx.Client, n_engines: int) -> str:
    """The first answer that has all engines."""
    until = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < until:
        text = client.get(PATH).raise_for_status().text
        if text.count("vllm:num_requests_running{") == n_engines:
            return text
        time.sleep(1.5)
    raise TimeoutError(f"not all of {n_engines} engines are told")


if __name__ == "__main__":
    typer.run(main)
