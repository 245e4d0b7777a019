"""What each worker of a fleet costs Redis and the API, and what a thousand would.

    .venv/bin/python -m bench.fleet                 # 16, 64 and 256 workers, some six minutes
    .venv/bin/python -m bench.fleet --part minute   # a round of 1,000,000 nonces a minute

The workers are the product's, with a synthetic engine (`herd.py`). On a machine that cannot keep
them all busy they take their batches more slowly, all together as many a second at each size: what
counts are the CPU seconds of a worker that waits and of a batch, which a fit tells apart.
"""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import redis
import typer
from rich.table import Table

from bench.fleet import minute
from bench.fleet.centre import Centre, centre
from bench.fleet.figures import LOOK, Stretch, look
from bench.fleet.herd import Herd
from bench.fleet.readers import Read, read_all
from bench.harness import machine
from bench.harness.heartbeats import HEARTBEAT_LIMIT_S, HeartbeatWatch
from bench.harness.report import console, exit_with
from poc_core.state import keys
from workers.engines.options import EngineOptions

MODEL = "tiny-qwen3"  # its name only: the engine loads none
BATCH = 32
PER_WORKER = 20.0  # batches a second that a worker is to take
SETTLE_S = 6.0
ROUND = {
    "block_hash": "fleet", "block_height": 1, "public_key": "bench", "node_id": 0, "node_count": 1,
    "batch_size": BATCH, "params": {"model": MODEL, "seq_len": 64, "k_dim": 12},
}  # fmt: skip
TOLD_FOR = (256, 1000, 4000)

MOST_REDIS_CORES = 0.4
MOST_STATUS_MS = 200.0
MOST_GROWTH = 0.1


class Part(StrEnum):
    WORKERS = "workers"
    MINUTE = "minute"


@dataclass(frozen=True)
class Run:
    """What was seen with so many workers."""

    n: int
    idle: Stretch
    work: Stretch
    read: Read
    heartbeat_s: float  # the longest time between two
    others: float  # cores of other programs meanwhile


def main(
    workers: Annotated[str, typer.Option(help="Numbers of workers, the smallest first.")] = (
        "16,64,256"
    ),
    batches: Annotated[
        float, typer.Option(min=1, help="Batches a second of all workers together, at most.")
    ] = 160.0,
    seconds: Annotated[float, typer.Option(min=2, help="Of each measurement.")] = 20.0,
    part: Annotated[Part, typer.Option(help="What to measure.")] = Part.WORKERS,
) -> None:
    """Exits with 1 where a target is missed."""
    counts = [int(text) for text in workers.split(",")]
    # A fleet's workers are on other machines: here they are not to keep Redis and API waiting.
    with suppress(PermissionError):
        os.nice(-10)
    console.print(machine.describe(), highlight=False)
    if part is Part.MINUTE:
        exit_with(lambda: minute.measure(seconds))
    exit_with(lambda: report([measure(n, batches, seconds) for n in counts]))


def measure(n: int, batches_per_s: float, seconds: float) -> Run:
    per_worker = min(PER_WORKER, batches_per_s / n)
    options = EngineOptions(model=MODEL, engine="synthetic", synthetic_step_ms=1000 / per_worker)
    meter = machine.UsageMeter()
    with ExitStack() as exits:
        node = exits.enter_context(centre({}))
        herd = exits.enter_context(Herd(n, options, str(node.redis_url)))
        connection = exits.enter_context(redis.Redis.from_url(str(node.redis_url)))
        node.wait_for_workers(n)
        watch = HeartbeatWatch(str(node.redis_url), look_s=0.25)
        time.sleep(SETTLE_S)
        idle = stretch(node, herd, connection, seconds)
        with httpx.Client(base_url=node.base_url, timeout=60, trust_env=False) as client:
            client.post("/api/v1/pow/init/generate", json=ROUND).raise_for_status()
            time.sleep(SETTLE_S)
            work = stretch(node, herd, connection, seconds)
            read = read_all(node, seconds)
            client.post("/api/v1/pow/stop").raise_for_status()
        run = Run(n, idle, work, read, watch.close(), meter.read().others)
    tell(run)
    return run


def stretch(node: Centre, herd: Herd, connection: redis.Redis, seconds: float) -> Stretch:
    processes = {
        "workers": herd.workers(),
        "hosts": herd.hosts(),
        "api": [psutil.Process(node.api_pid)],
    }
    before = look(connection, n_nonces(connection), processes)
    time.sleep(seconds)
    return Stretch(before, look(connection, n_nonces(connection), processes))


def n_nonces(connection: Any) -> int:
    current = connection.get(keys.CURRENT_ROUND)
    return int(connection.hget(keys.round(current.decode()), "n_processed") or 0) if current else 0


def tell(run: Run) -> None:
    """What the run saw, as it is."""
    for name, seen in (("idle", run.idle), ("work", run.work)):
        n_batches = seen.n_nonces / BATCH
        console.print(
            f"{run.n} workers, {name}: {n_batches / seen.seconds:.1f} batches/s; Redis"
            f" {seen.redis_cores:.3f} cores, {seen.commands_per_s:.0f} commands/s (with those in"
            f" scripts), {seen.reads_per_s:.0f} requests/s; workers {seen.cores('workers'):.3f}"
            f" cores, hosts {seen.cores('hosts'):.3f}, API {seen.cores('api'):.3f}",
            highlight=False,
        )
        most = sorted(seen.calls.items(), key=lambda item: -item[1])[:9]
        told = ", ".join(f"{command} {calls / seen.seconds:.0f}" for command, calls in most)
        console.print(f"  commands/s: {told}", highlight=False, style="dim")
    console.print(f"  {run.read}; others used {run.others:.2f} cores", highlight=False)


def report(runs: Sequence[Run]) -> bool:
    """Says what holds and what does not; whether all does."""
    costs = fitted(runs)
    table = Table(title="A fleet")
    for heading in (
        "workers", "Redis ms/s\na worker waits", "commands/s\na worker waits", "Redis us\na batch",
        "commands\na batch", "seen over\nfitted", "CPU ms/s\na worker waits", "heartbeat\nat most s",
        "/status\np50 p99 ms", "/metrics\nms", "API\nMB", "console\nKiB/s",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            str(run.n),
            f"{1000 * run.idle.redis_cores / run.n:.3f}",
            f"{run.idle.commands_per_s / run.n:.1f}",
            f"{1e6 * of_batches(run, costs) / rate(run.work):.0f}",
            f"{commands_of_batches(run) / rate(run.work):.1f}",
            f"{run.work.redis_cores / told(costs, run.n, rate(run.work), looks(run.work)):.3f}",
            f"{1000 * run.idle.cores('workers') / run.n:.1f}",
            f"{run.heartbeat_s:.2f}",
            f"{run.read.status_p50_ms:.0f} {run.read.status_p99_ms:.0f}",
            f"{run.read.metrics_ms:.0f}",
            f"{run.read.api_mb:.0f}",
            f"{run.read.console_kib_s:.1f}",
        )
    console.print(table)
    wait, batch, each_look = costs
    console.print(
        f"Fitted: Redis {1000 * wait:.3f} ms/s a worker that waits, {1e6 * batch:.0f} us a batch"
        f" ({1e9 * batch / BATCH / 1e3:.0f} us... per 1,000 nonces {1e3 * 1e3 * batch / BATCH:.2f} ms),"
        f" {1e6 * each_look:.0f} us a look at the round",
        highlight=False,
    )
    for n in TOLD_FOR:
        console.print(
            f"  {n} workers at {PER_WORKER:g} batches/s each: {told(costs, n, n * PER_WORKER):.2f}"
            f" cores of Redis; at 1 batch/s each: {told(costs, n, n, 9 * n):.2f}",
            highlight=False,
        )
    first, last = runs[0], runs[-1]
    grown = {
        "commands of a worker that waits": _growth(
            first.idle.commands_per_s / first.n, last.idle.commands_per_s / last.n
        ),
        "Redis CPU of a worker that waits": _growth(
            first.idle.redis_cores / first.n, last.idle.redis_cores / last.n
        ),
        "commands of a batch": _growth(
            commands_of_batches(first) / rate(first.work),
            commands_of_batches(last) / rate(last.work),
        ),
        "Redis CPU of a batch": _growth(
            of_batches(first, costs) / rate(first.work), of_batches(last, costs) / rate(last.work)
        ),
    }
    checks = [
        *((f"{what}: {by:+.1%} from {first.n} to {last.n} workers", by <= MOST_GROWTH)
          for what, by in grown.items()),
        (
            f"Redis at 256 workers and {PER_WORKER:g} batches/s each, fitted:"
            f" {told(costs, 256, 256 * PER_WORKER):.2f} cores",
            told(costs, 256, 256 * PER_WORKER) <= MOST_REDIS_CORES,
        ),
        (
            f"/status: p99 {last.read.status_p99_ms:.0f} ms at {last.n} workers",
            last.read.status_p99_ms < MOST_STATUS_MS,
        ),
        (
            f"heartbeats: {max(run.heartbeat_s for run in runs):.2f} s apart at most",
            max(run.heartbeat_s for run in runs) <= HEARTBEAT_LIMIT_S,
        ),
    ]  # fmt: skip
    for said, holds in checks:
        word = "[bold green]PASS[/]" if holds else "[bold red]FAIL[/]"
        console.print(f"{word} {said}", highlight=False, soft_wrap=True)
    return all(holds for _, holds in checks)


def fitted(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Redis' CPU seconds of a worker's second, of a batch and of a look, by least squares."""
    rows = [(run.n, rate(s), looks(s), s.redis_cores) for run in runs for s in (run.idle, run.work)]
    found, *_ = np.linalg.lstsq([row[:3] for row in rows], [row[3] for row in rows], rcond=None)
    return float(found[0]), float(found[1]), float(found[2])


def told(
    costs: tuple[float, float, float], n: float, batches_per_s: float, looks_per_s: float = 0.0
) -> float:
    """Cores that Redis takes by the fit."""
    return costs[0] * n + costs[1] * batches_per_s + costs[2] * looks_per_s


def rate(seen: Stretch) -> float:
    """Batches a second."""
    return seen.n_nonces / BATCH / seen.seconds


def looks(seen: Stretch) -> float:
    """Looks a second whether the round goes on."""
    return seen.calls.get(LOOK, 0) / seen.seconds


def of_batches(run: Run, costs: tuple[float, float, float]) -> float:
    """Redis' cores beyond those of workers that wait, and without looks."""
    return (
        run.work.redis_cores - run.idle.redis_cores - costs[2] * (looks(run.work) - looks(run.idle))
    )


def commands_of_batches(run: Run) -> float:
    """Commands a second beyond those of workers that wait, and without looks."""
    return (run.work.commands_per_s - looks(run.work)) - (run.idle.commands_per_s - looks(run.idle))


def _growth(first: float, last: float) -> float:
    return last / first - 1


if __name__ == "__main__":
    typer.run(main)
