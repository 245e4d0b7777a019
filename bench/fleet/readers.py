"""Readers of the node during its work: clients of /status, Prometheus, and a console page."""

import asyncio
import statistics
import time
from dataclasses import dataclass

import httpx
import psutil

from bench.fleet.centre import Centre
from bench.harness.machine import cpu_s

STATUS_PAUSE_S = 0.1
METRICS_PAUSE_S = 3.0
CONSOLE = "/api/v1/console/events"


@dataclass(frozen=True)
class Read:
    """What readers measured, and their cost for the API."""

    status_p50_ms: float
    status_p99_ms: float
    status_kib: float
    metrics_ms: float  # the median
    metrics_kib: float
    console_kib_s: float
    api_mb: float
    api_cores: float


def read_all(node: Centre, seconds: float) -> Read:
    """Runs all kinds of readers together for `seconds`."""
    return asyncio.run(_read_all(node, seconds))


async def _read_all(node: Centre, seconds: float) -> Read:
    api = psutil.Process(node.api_pid)
    began, cpu = time.monotonic(), cpu_s(api)
    async with httpx.AsyncClient(base_url=node.base_url, timeout=60, trust_env=False) as client:
        (status_ms, status_kib), (metrics_ms, metrics_kib), received = await asyncio.gather(
            _ask(client, "/api/v1/pow/status", STATUS_PAUSE_S, began + seconds),
            _ask(client, "/metrics", METRICS_PAUSE_S, began + seconds),
            _listen(client, began + seconds),
        )
    took_s = time.monotonic() - began
    return Read(
        statistics.median(status_ms),
        statistics.quantiles(status_ms, n=100)[98],
        status_kib,
        statistics.median(metrics_ms),
        metrics_kib,
        received / 1024 / took_s,
        api.memory_info().rss / 1e6,
        (cpu_s(api) - cpu) / took_s,
    )


async def _ask(
    client: httpx.AsyncClient, path: str, pause_s: float, until: float
) -> tuple[list[float], float]:
    """Returns the milliseconds of each answer, and the KiB of the last."""
    took_ms: list[float] = []
    while True:
        asked = time.monotonic()
        answer = await client.get(path)
        answer.raise_for_status()
        took_ms.append((time.monotonic() - asked) * 1000)
        if time.monotonic() > until:
            return took_ms, len(answer.content) / 1024
        await asyncio.sleep(pause_s)


async def _listen(client: httpx.AsyncClient, until: float) -> int:
    """Returns the bytes that a page received."""
    n_bytes = 0
    async with client.stream("GET", CONSOLE) as answer:
        async for part in answer.aiter_raw():
            n_bytes += len(part)
            if time.monotonic() > until:
                break
    return n_bytes
