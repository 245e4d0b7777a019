"""What each worker of a fleet costs Redis and the API, and what a thousand would.

    .venv/bin/python -m bench.fleet                 # 16, 64 and 256 workers, some eight minutes
    .venv/bin/python -m bench.fleet --part minute   # a round of 1,000,000 nonces a minute

The workers are the product's, with a synthetic engine (`herd.py`). A machine that cannot keep them
all busy lets each take its batches more slowly, at the same pace in a fleet of any size. What a
batch costs Redis is measured without them, at the pace that the machine allows (`pump.py`).
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
from bench.fleet.centre import MODEL, Centre, centre, start_round
from bench.fleet.figures import Stretch, look
from bench.fleet.herd import Herd
from bench.fleet.readers import Read, read_all
from bench.harness import machine
from bench.harness.heartbeats import HEARTBEAT_LIMIT_S, HeartbeatWatch
from bench.harness.report import console, exit_with
from workers.engines.options import EngineOptions

BATCH = 32  # nonces
PER_WORKER = 20.0  # batches a second that a worker is to take
SETTLE_S = 6.0
TOLD_FOR = (256, 1000, 4000)

MOST_REDIS_CORES = 0.4
MOST_STATUS_MS = 200.0
MOST_GROWTH = 0.1


class Part(StrEnum):
    WORKERS = "workers"
    MINUTE = "minute"


@dataclass(frozen=True)
class Beats:
    """The longest time between two heartbeats, in seconds."""

    apart: float  # of a host with cores of its own, while workers work and readers read
    herd: float  # of workers that take what is left of these cores


@dataclass(frozen=True)
class Run:
    """What was seen with so many workers."""

    n: int
    idle: Stretch
    work: Stretch
    read: Read
    beats: Beats
    others: float  # cores of other programs meanwhile
    pumped: Stretch | None = None  # without workers, as fast as the machine allows

    @property
    def idle_commands(self) -> float:
        """Commands a second of a worker that waits, its part of its host's among them."""
        return self.idle.commands_per_s / self.n

    @property
    def batch_commands(self) -> float:
        """Commands of a batch, with those in scripts, beyond a worker's that waits."""
        return (self.work.commands_per_s - self.idle.commands_per_s) / _batches(self.work)

    @property
    def idle_cores(self) -> float:
        """Redis' cores for a worker that waits."""
        return self.idle.redis_cores / self.n

    @property
    def batch_s(self) -> float:
        """Redis' CPU seconds of a batch at full pace."""
        assert self.pumped is not None
        return self.pumped.redis_cores / _batches(self.pumped)


def main(
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, the smallest first.")
    ] = "16,64,256",
    batches: Annotated[
        float, typer.Option(min=1, help="Batches a second of the largest fleet, at most.")
    ] = 160.0,
    seconds: Annotated[float, typer.Option(min=2, help="Of each measurement.")] = 20.0,
    part: Annotated[Part, typer.Option(help="What to measure.")] = Part.WORKERS,
) -> None:
    """Exits with 1 where a target is missed."""
    counts = [int(text) for text in workers.split(",")]
    console.print(machine.describe(), highlight=False)
    if part is Part.MINUTE:
        exit_with(lambda: minute.measure(seconds))
    pace = min(PER_WORKER, batches / counts[-1])
    exit_with(lambda: report(_pumped([measure(n, pace, seconds) for n in counts], seconds)))


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
        start_round(str(node.redis_url), BATCH, "http://127.0.0.1:9")  # nobody listens there
        time.sleep(SETTLE_S)
        work = _stretch(node, herd, connection, seconds)
        with apart(str(node.redis_url)):  # now: what it costs is not the herd's
            read = read_all(node, seconds)
            watch.close()
        beats = Beats(watch.longest(APART), watch.longest("host"))
        others = meter.read().others
    run = Run(n, idle, work, read, beats, others)
    _tell(run)
    return run


def _pumped(runs: Sequence[Run], seconds: float) -> list[Run]:
    """The runs, with what a batch costs a busy Redis."""
    seen = pump.in_turns([run.n for run in runs], BATCH, seconds)
    whole = [replace(run, pumped=seen[run.n]) for run in runs]
    for run in whole:
        _tell_stretch(run.n, "pump", seen[run.n])
        console.print(
            f"  a batch: {1e6 * run.batch_s:.0f} us of Redis"
            f" ({1e9 * run.batch_s / BATCH / 1e3:.2f} ms per 1,000 nonces)",
            highlight=False,
            soft_wrap=True,
        )
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


def _tell(run: Run) -> None:
    """What the run saw, as it is."""
    _tell_stretch(run.n, "wait", run.idle)
    _tell_stretch(run.n, "work", run.work)
    console.print(
        f"  waiting: {1e3 * run.idle_cores:.3f} ms of Redis a second and worker,"
        f" {run.idle_commands:.1f} commands; a batch: {run.batch_commands:.1f} commands",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"  {run.read}; heartbeats at most {run.beats.apart:.2f} s apart with cores of their own,"
        f" {run.beats.herd:.2f} of the herd; other programs used {run.others:.2f} cores",
        highlight=False,
        soft_wrap=True,
    )


def _tell_stretch(n: int, name: str, seen: Stretch) -> None:
    told = f"{n} workers {name}: {_batches(seen):.1f} batches/s"
    told += f"; Redis {seen.redis_cores:.3f} cores, {seen.reads_per_s:.0f} requests/s"
    told += f", {seen.commands_per_s:.0f} commands/s with those in scripts"
    told += "".join(f"; {kind} {cores:.3f} cores" for kind, cores in seen.cores.items())
    console.print(told, highlight=False, soft_wrap=True)


def report(runs: Sequence[Run]) -> bool:
    """Says what holds and what does not; whether all does."""
    first, last = runs[0], runs[-1]
    for n in TOLD_FOR:
        console.print(
            f"{n} workers: Redis takes {_cores(last, n, 0):.2f} cores when all wait,"
            f" {_cores(last, n, 1):.2f} at 1 batch/s each, {_cores(last, n, PER_WORKER):.2f} at"
            f" {PER_WORKER:g}",
            highlight=False,
        )
    grown = {
        "commands of a worker that waits": last.idle_commands / first.idle_commands,
        "commands of a batch": last.batch_commands / first.batch_commands,
        "Redis' CPU time of a worker that waits": last.idle_cores / first.idle_cores,
        "Redis' CPU time of a batch": last.batch_s / first.batch_s,
    }
    checks = [
        (f"{what}, {last.n} workers over {first.n}: {by:.2f}", by <= 1 + MOST_GROWTH)
        for what, by in grown.items()
    ]
    cores, beats = _cores(last, 256, PER_WORKER), max(run.beats.apart for run in runs)
    checks += [
        (
            f"Redis at 256 workers and {PER_WORKER:g} batches/s each: {cores:.2f} cores",
            cores <= MOST_REDIS_CORES,
        ),
        (
            f"/status, p99 at {last.n} workers: {last.read.status_p99_ms:.0f} ms",
            last.read.status_p99_ms < MOST_STATUS_MS,
        ),
        (
            f"heartbeats of a host with cores of its own: {beats:.2f} s apart at most",
            beats <= HEARTBEAT_LIMIT_S,
        ),
    ]
    for said, holds in checks:
        word = "[bold green]PASS[/]" if holds else "[bold red]FAIL[/]"
        console.print(f"{word} {said}", highlight=False, soft_wrap=True)
    return all(holds for _, holds in checks)


def _cores(run: Run, n: int, batches_per_s: float) -> float:
    """That Redis takes where `n` workers take so many batches each, by what the run saw of one."""
    return n * (run.idle_cores + batches_per_s * run.batch_s)


def _batches(seen: Stretch) -> float:
    """A second."""
    return seen.n_nonces / BATCH / seen.seconds


if __name__ == "__main__":
    typer.run(main)
