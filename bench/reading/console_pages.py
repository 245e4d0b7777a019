"""What open pages of the console cost: the API's processor time, and commands that Redis is asked.

.venv/bin/python -m bench.reading.console_pages  # 0, 1 and 50 pages while a round runs
.venv/bin/python -m bench.reading.console_pages --pages 0 1 200 --seconds 30

Targets: the most pages cost the API less than 5 % of a core, and Redis no more commands than one
page does.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from dataclasses import asdict, dataclass

import httpx
import psutil
import redis

from bench.harness.machine import cpu_s, describe
from cli.supervise.stack import Stack
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 120.0
EVENTS = "/api/v1/console/events"
# Seconds until all pages have had their first event, and the workers their first nonces.
SETTLE_S = 3.0
MOST_CORES = 0.05
# Of the commands with one page: workers' heartbeats and leases vary by so much.
MOST_COMMANDS = 1.1
ROUND = {
    "block_hash": "bench", "block_height": 1, "public_key": "bench", "node_id": 0, "node_count": 1,
    "params": {"model": "tiny-qwen3", "seq_len": 64, "k_dim": 12},
}  # fmt: skip


@dataclass
class Cost:
    pages: int
    api_cores: float  # of the API's process: 0.05 is a twentieth of a core
    redis_commands_per_s: float  # workers' and supervisors' too
    redis_clients: int
    kib_per_s: float  # received by all pages together


class Pages:
    """Open pages, and what they received."""

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
    assert stack.api_pid is not None
    assert stack.redis_url is not None
    api = psutil.Process(stack.api_pid)
    with redis.Redis.from_url(stack.redis_url) as connection:
        pages = Pages(stack.base_url, n)
        await asyncio.sleep(SETTLE_S)
        cpu, commands, received = cpu_s(api), _commands(connection), pages.n_bytes
        await asyncio.sleep(seconds)
        clients = int(connection.info("clients")["connected_clients"])
        cost = Cost(
            n,
            (cpu_s(api) - cpu) / seconds,
            (_commands(connection) - commands) / seconds,
            clients,
            (pages.n_bytes - received) / 1024 / seconds,
        )
        await pages.close()
    return cost


def _commands(connection: redis.Redis) -> int:
    return int(connection.info("stats")["total_commands_processed"])


def verdict(costs: list[Cost]) -> str | None:
    """What missed its target, else None. `costs`: by pages, without any and of one page first."""
    none, one, many = costs[0], costs[1], costs[-1]
    if many.api_cores - none.api_cores >= MOST_CORES:
        return f"{many.pages} pages take {many.api_cores - none.api_cores:.3f} of a core"
    if many.redis_commands_per_s > MOST_COMMANDS * one.redis_commands_per_s:
        return (
            f"Redis has {many.redis_commands_per_s:.0f} commands a second, with one page"
            f" {one.redis_commands_per_s:.0f}"
        )
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, nargs=3, default=[0, 1, 50])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    print(describe())
    with Stack(
        EngineOptions(model="tiny-qwen3", engine="synthetic", synthetic_step_ms=100), workers=2
    ) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        httpx.post(
            f"{stack.base_url}/api/v1/pow/init/generate", json=ROUND, timeout=60
        ).raise_for_status()
        costs = []
        for n in options.pages:
            costs.append(asyncio.run(measure(stack, n, options.seconds)))
            print(json.dumps(asdict(costs[-1])), flush=True)
    missed = verdict(costs)
    print(f"missed: {missed}" if missed else "within its targets")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
