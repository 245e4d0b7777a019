"""What open pages of the console cost: the API's CPU time, and commands to Redis.

.venv/bin/python -m bench.reading.console_pages  # 0, 1 and 50 pages during a round
.venv/bin/python -m bench.reading.console_pages --pages 200 --seconds 30
"""

import asyncio
import contextlib
from dataclasses import asdict, dataclass
from typing import Annotated

import httpx
import psutil
import redis
import typer

from bench.harness.machine import cpu_s, describe
from bench.harness.node import API, MODEL, body_of, document, running
from bench.harness.report import at_most, measures, run, say, say_json
from cli.supervise.stack import Stack
from workers.engines.options import EngineOptions

EVENTS = "/api/v1/console/events"
# Seconds until all pages have had their first event, and the workers their first nonces.
SETTLE_S = 3.0
MOST_CORES = 0.05
# Of the commands with one page, because workers' heartbeats and leases vary.
MOST_COMMANDS = 1.1


@dataclass
class Cost:
    """The load with so many open pages."""

    pages: int
    api_cores: float
    redis_commands_per_s: float  # with those of workers and supervisors
    redis_clients: int
    kib_per_s: float  # received by all pages together


class Pages:
    """Open pages, and the bytes that they received."""

    def __init__(self, base_url: str, n: int) -> None:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(
            base_url=base_url, limits=limits, timeout=60, trust_env=False
        )
        self._tasks = [asyncio.create_task(self._listen()) for _ in range(n)]
        self.n_bytes = 0

    async def _listen(self) -> None:
        async with self._client.stream("GET", EVENTS) as answer:
            async for part in answer.aiter_raw():
                self.n_bytes += len(part)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._client.aclose()


async def measure(stack: Stack, n: int, seconds: float) -> Cost:
    api = psutil.Process(stack.api_pid)
    with redis.Redis.from_url(str(stack.redis_url)) as connection:
        pages = Pages(stack.base_url, n)
        await asyncio.sleep(SETTLE_S)
        cpu, commands, received = cpu_s(api), _commands(connection), pages.n_bytes
        await asyncio.sleep(seconds)
        cost = Cost(
            n,
            (cpu_s(api) - cpu) / seconds,
            (_commands(connection) - commands) / seconds,
            int(connection.info("clients")["connected_clients"]),
            (pages.n_bytes - received) / 1024 / seconds,
        )
        await pages.close()
    return cost


def _commands(connection: redis.Redis) -> int:
    return int(connection.info("stats")["total_commands_processed"])


def report(none: Cost, one: Cost, many: Cost) -> bool:
    """Prints whether the most pages meet the targets, and returns it."""
    cores, commands = many.api_cores - none.api_cores, many.redis_commands_per_s
    most = MOST_COMMANDS * one.redis_commands_per_s
    checks = [
        at_most(f"cores of the API for {many.pages} pages", cores, MOST_CORES),
        at_most(f"commands a second with {many.pages} pages", commands, most, ".0f"),
    ]
    return all(checks)


@measures
def main(
    pages: Annotated[int, typer.Option(min=2, help="The most open pages.")] = 50,
    seconds: Annotated[float, typer.Option(min=1, help="Of each measurement.")] = 20.0,
) -> bool:
    """Exits with 1 if pages take 5 % of a core, or more commands of Redis than one page."""
    say(describe())
    options = EngineOptions(model=MODEL, engine="synthetic", synthetic_step_ms=100)
    with running(Stack(options, workers=2)) as (stack, client):
        document(client.post(f"{API}/init/generate", json=body_of(MODEL)))
        costs = []
        for n in (0, 1, pages):
            costs.append(asyncio.run(measure(stack, n, seconds)))
            say_json(**asdict(costs[-1]))
    return report(*costs)


if __name__ == "__main__":
    run(main)
