"""How far throughput grows with the number of workers.

    .venv/bin/python -m bench.queue_scale

The synthetic engine sleeps 50 ms per batch and uses hardly any CPU, so the queue is measured: 16
workers take 320 batches a second through one Redis and one API.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import httpx
import typer

from bench.harness import machine
from bench.harness.node import MODEL, body_of, run_job, running
from bench.harness.report import (
    LEGEND,
    QuietWait,
    Repeat,
    at_least,
    console,
    listed,
    measures,
    run,
    say,
    table,
    warn_of_noise,
)
from cli.supervise.stack import Stack
from poc_core.errors import ProoflineError
from workers.engines.options import EngineOptions

STEP_MS = 50.0
SEQ_LEN = 8
TARGET = 0.95
WARM_UP_S = 1.0  # of work for all workers


@dataclass(frozen=True)
class Run:
    """One job on all workers."""

    seconds: float
    n_batches: int
    cpu_s: Sequence[float]  # of workers, Redis and API
    usage: machine.Usage

    @property
    def rate(self) -> float:
        """Batches a second."""
        return self.n_batches / self.seconds


@measures
def main(
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, the smallest first.")
    ] = "1,2,4,8,16",
    repeat: Repeat = 3,
    seconds: Annotated[float, typer.Option(min=1, help="How long each job should take.")] = 9.5,
    batch_size: Annotated[
        int,
        typer.Option(min=1, max=1024, help="Nonces per batch. Large batches add the cost of JSON."),
    ] = 8,
    quiet_wait: QuietWait = 60.0,
) -> bool:
    """Throughput of N synthetic workers, 50 ms a batch, over N times one worker's ideal.

    Runs that other programs disturbed are repeated, at most twice. Exits with 1 when any number of
    workers stays below 0.95 of linear.
    """
    try:
        counts = [int(part) for part in workers.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or counts != sorted(set(counts)):
        raise typer.BadParameter("give ascending numbers such as 1,4,16", param_hint="--workers")
    say(
        f"{machine.describe()}; synthetic engine, {STEP_MS:g} ms a batch of {batch_size} nonces,"
        f" jobs of {seconds:g} s"
    )
    return report({n: measure(n, repeat, seconds, batch_size, quiet_wait) for n in counts})


def measure(
    n: int, repeat: int, seconds: float, batch_size: int, quiet_wait_s: float
) -> list[machine.Observed[Run]]:
    """Starts `n` workers and runs `repeat` jobs on them."""
    n_batches = round(n * seconds * 1000 / STEP_MS)
    # Long jobs on many workers have more nonces than one request may have by default.
    env = {"POC_MAX_QUEUED_NONCES": str(max(100_000, n_batches * batch_size))}
    # One batch a micro-batch: else a worker would take several together in 50 ms.
    tokens = SEQ_LEN * batch_size
    options = EngineOptions(
        model=MODEL, engine="synthetic", synthetic_step_ms=STEP_MS, max_batch_tokens=tokens
    )
    with running(Stack(options, workers=n, max_fast_crashes=0, env=env)) as (stack, client):

        def body(block_hash: str, batches: int) -> dict[str, object]:
            work = {"nonces": list(range(batches * batch_size)), "batch_size": batch_size}
            return body_of(MODEL, SEQ_LEN, block_hash, **work)

        run_job(client, body("warm-up", round(n * WARM_UP_S * 1000 / STEP_MS)))

        def one(index: int) -> tuple[Run, float]:
            asked = body(f"block-{index}", n_batches)
            machine.wait_until_quiet(quiet_wait_s)
            found = one_run(stack, client, asked, n_batches)
            return found, found.usage.others

        return machine.repeated(one, repeat)


def one_run(stack: Stack, client: httpx.Client, body: dict[str, object], n_batches: int) -> Run:
    def groups() -> list[list[int]]:
        return [stack.worker_pids(), [stack.redis_pid or 0], [stack.api_pid or 0]]

    pids = groups()
    before = [machine.tree_cpu_s(*group) for group in pids]
    meter = machine.UsageMeter()
    seconds, _ = run_job(client, body)
    usage = meter.read()
    if groups() != pids:
        raise ProoflineError(
            "A process of the stack crashed and was restarted; see whether it has enough memory."
        )
    after = [machine.tree_cpu_s(*group) for group in pids]
    cpu_s = [now - then for now, then in zip(after, before, strict=True)]
    return Run(seconds, n_batches, cpu_s, usage)


def report(found: dict[int, list[machine.Observed[Run]]]) -> bool:
    """Prints all runs; returns whether every number of workers reaches the target."""
    smallest = min(found)
    rows = table(
        "Queue scale", "workers", "batches/s\nof each run", "median", "of\nN x 20",
        f"of\nN x {smallest}", "CPU ms a batch\nworkers Redis API", "cores\nours others", dim=2,
    )  # fmt: skip
    counted = {n: machine.counted(runs) for n, runs in found.items()}
    rates = {n: statistics.median(run.rate for run in runs) for n, runs in counted.items()}
    ratios: list[float] = []
    for n, runs in counted.items():
        ratios += [rates[n] * STEP_MS / 1000 / n, rates[n] / n / (rates[smallest] / smallest)]
        cpu_ms = [
            statistics.median(1000 * run.cpu_s[part] / run.n_batches for run in runs)
            for part in range(3)
        ]
        rows.add_row(
            f"{n}",
            listed(found[n], lambda run: f"{run.rate:.1f}"),
            f"{rates[n]:.1f}",
            f"[bold]{ratios[-2]:.3f}[/]",
            f"{ratios[-1]:.3f}",
            " ".join(f"{ms:.2f}" for ms in cpu_ms),
            f"{max(run.usage.own for run in runs):.2f} {max(run.usage.others for run in runs):.2f}",
        )
    console.print(rows)
    console.print(f"{LEGEND} Ideal: {1000 / STEP_MS:g} batches/s a worker.", style="dim")
    warn_of_noise([run for runs in found.values() for run in runs])
    return at_least(f"smallest ratio, {smallest} to {max(found)} workers", min(ratios), TARGET)


if __name__ == "__main__":
    run(main)
