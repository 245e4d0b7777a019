"""The cost of each worker of a fleet for Redis and the API, and of a thousand workers.

    .venv/bin/python -m bench.fleet                 # 16, 64 and 256 workers, some eight minutes
    .venv/bin/python -m bench.fleet --part minute   # a round of 1,000,000 nonces a minute

The workers are the product's, with synthetic engines (`herd.py`), at a pace per worker that the
machine can keep up with in the largest fleet. The cost of a batch for Redis is measured without
workers, as fast as the machine allows (`pump.py`).
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

import psutil
import redis
import typer

from bench.fleet import minute, pump
from bench.fleet.apart import HOST as APART
from bench.fleet.apart import apart
from bench.fleet.centre import Centre, centre, start_round
from bench.fleet.figures import Stretch, look
from bench.fleet.herd import Herd
from bench.fleet.readers import Read, read_all
from bench.harness import machine
from bench.harness.heartbeats import HEARTBEAT_LIMIT_S, HeartbeatWatch
from bench.harness.node import MODEL
from bench.harness.report import at_most, measures, say
from bench.harness.report import run as run_command
from workers.engines.options import EngineOptions

BATCH = 32  # nonces
PER_WORKER = 20.0  # batches a second of a worker
SETTLE_S = 6.0
EXTRAPOLATED = (256, 1000, 4000)  # workers

MOST_REDIS_CORES = 0.4
MOST_STATUS_MS = 200.0
MOST_GROWTH = 0.1


class Part(StrEnum):
    WORKERS = "workers"
    MINUTE = "minute"


@dataclass(frozen=True)
class Run:
    """The figures of a fleet of `n` workers."""

    n: int
    idle: Stretch
    work: Stretch
    read: Read
    apart_s: float  # longest time between heartbeats of `apart.py`, with readers
    herd_s: float  # the same of the herd, which only gets the time that is left
    others: float  # cores of other programs meanwhile
    pumped: Stretch | None = None  # from `pump.py`

    @property
    def idle_commands(self) -> float:
        """Returns the commands per second of a waiting worker, with a share of its host's."""
        return self.idle.commands_per_s / self.n

    @property
    def batch_commands(self) -> float:
        """Returns the commands per batch, with those in scripts, without a waiting worker's."""
        return (self.work.commands_per_s - self.idle.commands_per_s) / _batches(self.work)

    @property
    def idle_cores(self) -> float:
        """Returns the cores that Redis uses per waiting worker."""
        return self.idle.redis_cores / self.n

    @property
    def batch_s(self) -> float:
        """Returns the CPU seconds of Redis per batch at full speed."""
        assert self.pumped is not None
        return self.pumped.redis_cores / _batches(self.pumped)


@measures
def main(
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, the smallest first.")
    ] = "16,64,256",
    batches: Annotated[
        float, typer.Option(min=1, help="Batches a second of the largest fleet, at most.")
    ] = 160.0,
    seconds: Annotated[float, typer.Option(min=2, help="Of each measurement.")] = 20.0,
    part: Annotated[Part, typer.Option(help="What to measure.")] = Part.WORKERS,
) -> bool:
    """Exits with 1 if a target is missed."""
    counts = [int(text) for text in workers.split(",")]
    say(machine.describe())
    if part is Part.MINUTE:
        return minute.measure(seconds)
    pace = min(PER_WORKER, batches / counts[-1])
    return report(_pumped([measure(n, pace, seconds) for n in counts], seconds))


def measure(n: int, pace: float, seconds: float) -> Run:
    """`pace`: batches a second of each worker."""
    options = EngineOptions(model=MODEL, engine="synthetic", synthetic_step_ms=1000 / pace)
    with ExitStack() as exits:
        node = exits.enter_context(centre())
        herd = exits.enter_context(Herd(n, options, str(node.redis_url)))
        connection = exits.enter_context(redis.Redis.from_url(str(node.redis_url)))
        node.wait_for_workers(n)
        time.sleep(SETTLE_S)
        watch = HeartbeatWatch(str(node.redis_url), look_s=0.25)
        meter = machine.UsageMeter()
        idle = _stretch(node, herd, connection, seconds)
        start_round(str(node.redis_url), BATCH)
        time.sleep(SETTLE_S)
        work = _stretch(node, herd, connection, seconds)
        with apart(str(node.redis_url)):  # not earlier: its cost is not the herd's
            read = read_all(node, seconds)
            watch.close()
        others = meter.read().others
    run = Run(n, idle, work, read, watch.longest(APART), watch.longest("host"), others)
    _say_stretch(n, "wait", idle)
    _say_stretch(n, "work", work)
    say(
        f"  waiting: {1e3 * run.idle_cores:.3f} ms of Redis a second and worker,"
        f" {run.idle_commands:.1f} commands; a batch: {run.batch_commands:.1f} commands"
    )
    say(
        f"  {read}; heartbeats at most {run.apart_s:.2f} s apart, {run.herd_s:.2f} s of the herd;"
        f" other programs used {others:.2f} cores"
    )
    return run


def _pumped(runs: Sequence[Run], seconds: float) -> list[Run]:
    """Measures the cost of a batch for a busy Redis; returns the runs with it."""
    seen = pump.in_turns([run.n for run in runs], BATCH, seconds)
    whole = [replace(run, pumped=seen[run.n]) for run in runs]
    for run in whole:
        _say_stretch(run.n, "pump", seen[run.n])
        ms = 1e6 * run.batch_s / BATCH
        say(f"  a batch: {1e6 * run.batch_s:.0f} us of Redis ({ms:.2f} ms per 1,000 nonces)")
    return whole


def _stretch(node: Centre, herd: Herd, connection: redis.Redis, seconds: float) -> Stretch:
    processes = {
        "workers": herd.workers(),
        "hosts": herd.hosts(),
        "API": [psutil.Process(node.api_pid)],
    }
    before = look(connection, processes)
    time.sleep(seconds)
    return Stretch(before, look(connection, processes))


def _say_stretch(n: int, name: str, seen: Stretch) -> None:
    text = f"{n} workers {name}: {_batches(seen):.1f} batches/s"
    text += f"; Redis {seen.redis_cores:.3f} cores, {seen.reads_per_s:.0f} requests/s"
    text += f", {seen.commands_per_s:.0f} commands/s with those in scripts"
    say(text + "".join(f"; {kind} {cores:.3f} cores" for kind, cores in seen.cores.items()))


def report(runs: Sequence[Run]) -> bool:
    """Prints a verdict for each target; returns whether all are met."""
    first, last = runs[0], runs[-1]
    for n in EXTRAPOLATED:
        say(
            f"{n} workers: Redis takes {_cores(last, n, 0):.2f} cores when all wait,"
            f" {_cores(last, n, 1):.2f} at 1 batch/s each, {_cores(last, n, PER_WORKER):.2f} at"
            f" {PER_WORKER:g}"
        )
    grown = {
        "commands of a worker that waits": last.idle_commands / first.idle_commands,
        "commands of a batch": last.batch_commands / first.batch_commands,
        "Redis' CPU time of a worker that waits": last.idle_cores / first.idle_cores,
        "Redis' CPU time of a batch": last.batch_s / first.batch_s,
    }
    checks = [
        at_most(f"{what}, {last.n} workers over {first.n}", by, 1 + MOST_GROWTH, ".2f")
        for what, by in grown.items()
    ]
    cores, p99_ms = _cores(last, 256, PER_WORKER), last.read.status_p99_ms
    what = f"cores of Redis at 256 workers and {PER_WORKER:g} batches/s each"
    checks.append(at_most(what, cores, MOST_REDIS_CORES, ".2f"))
    checks.append(at_most(f"/status at {last.n} workers, p99, ms", p99_ms, MOST_STATUS_MS, ".0f"))
    apart_s = max(run.apart_s for run in runs)
    checks.append(at_most("time between heartbeats, s", apart_s, HEARTBEAT_LIMIT_S, ".2f"))
    return all(checks)


def _cores(run: Run, n: int, batches_per_s: float) -> float:
    """Returns the cores of Redis for `n` workers, extrapolated from the cost of one worker."""
    return n * (run.idle_cores + batches_per_s * run.batch_s)


def _batches(seen: Stretch) -> float:
    """Returns the batches per second."""
    return seen.n_nonces / BATCH / seen.seconds


if __name__ == "__main__":
    run_command(main)
