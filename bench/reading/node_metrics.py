"""How long a read of /api/v1/metrics takes for a node of many engines, and its cost for the API.

    .venv/bin/python -m bench.reading.node_metrics

The engines are servers in a separate process that answer as vLLM 0.32 does; API and Redis are real.
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
from bench.fleet.centre import centre
from bench.harness.machine import cpu_s, describe
from bench.harness.report import at_most, measures, run, say
from poc_core.machine_figures import GpuFigures, MachineFigures
from poc_core.records import WorkerRecord
from poc_core.serving.deployments import HostReport, HostState
from poc_core.settings import load_settings
from poc_core.state.client import connect
from poc_core.state.deployments import DeploymentStore
from poc_core.state.registry import WorkerRegistry
from tests.harness.samples import worker_record
from tests.vllm_metrics import metrics_text

READY_TIMEOUT_S = 120.0
PATH = "/api/v1/metrics"
MOST_MS = 100.0
MOST_CORES = 0.01
GPUS_OF_A_HOST = 8
HEARTBEAT_S = 2.0


@measures
def main(
    engines: Annotated[
        int, typer.Option(min=1, help="Stand-ins for engines, eight to a host.")
    ] = 64,
    reads: Annotated[int, typer.Option(min=1, help="That count, after one that does not.")] = 12,
    pause: Annotated[float, typer.Option(min=0, help="Seconds from one read to the next.")] = 10.0,
    serve: Annotated[bool, typer.Option(hidden=True)] = False,
) -> bool | None:
    """Exits with 1 if the median read takes 100 ms, or reads take 1 % of a core."""
    if serve:
        asyncio.run(stand_ins(engines))
        return None
    say(describe())
    with served(engines) as ports, centre() as node:
        api = psutil.Process(node.api_pid)
        with (
            registered(ports, str(node.redis_url)),
            httpx.Client(base_url=node.base_url, trust_env=False) as client,
        ):
            text = first(client, engines)
            idle_s = -cpu_s(api)
            time.sleep(reads * pause)
            idle_s += cpu_s(api)
            busy_s, took_ms = -cpu_s(api), []
            for _ in range(reads):
                began = time.monotonic()
                client.get(PATH).raise_for_status()
                took_ms.append((time.monotonic() - began) * 1000)
                time.sleep(pause)
            busy_s += cpu_s(api)
    n_series = sum(len(family.samples) for family in text_string_to_metric_families(text))
    say(f"{engines} engines: {n_series} series, {len(text.encode())} bytes")
    cores = (busy_s - idle_s) / (reads * max(pause, 1e-9))
    checks = [
        at_most("a read, median, ms", statistics.median(took_ms), MOST_MS, ".1f"),
        at_most(f"cores more with a read every {pause:g} s", cores, MOST_CORES, ".4f"),
    ]
    return all(checks)


async def stand_ins(n: int) -> None:
    """Prints the ports of `n` servers, and serves until standard input ends."""
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
    """Runs `n` stand-ins in a separate process; yields their ports."""
    command = [sys.executable, "-m", "bench.reading.node_metrics", "--serve", "--engines", str(n)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.communicate()


@contextmanager
def registered(ports: list[int], redis_url: str) -> Iterator[None]:
    """Sends heartbeats of the stand-ins as engines on hosts with GPUs."""
    settings = load_settings(redis_url=redis_url)
    redis = connect(settings)
    registry, hosts = WorkerRegistry(redis, settings), DeploymentStore(redis, settings)
    records = [
        replace(worker_record(f"stand-in-{port}"), port=port, chat_host="127.0.0.1")
        for port in ports
    ]
    ended = threading.Event()

    def beat() -> None:
        report(registry, hosts, records)
        while not ended.wait(HEARTBEAT_S):
            report(registry, hosts, records)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def report(registry: WorkerRegistry, hosts: DeploymentStore, records: list[WorkerRecord]) -> None:
    """Stores one heartbeat of each worker, and one report of each host and its GPUs."""
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


def first(client: httpx.Client, n_engines: int) -> str:
    """Waits for the first answer with the metrics of all engines, and returns it."""
    until = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < until:
        text = client.get(PATH).raise_for_status().text
        if text.count("vllm:num_requests_running{") == n_engines:
            return text
        time.sleep(1.5)
    raise TimeoutError(f"the metrics of {n_engines} engines are incomplete")


if __name__ == "__main__":
    run(main)
