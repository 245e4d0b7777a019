"""How far throughput grows with the number of workers.

    .venv/bin/python bench/queue_scale.py

The synthetic engine sleeps 50 ms a batch and uses hardly any CPU: the queue is measured. 16 workers
take 320 batches a second through one Redis, one API and however many cores there are.
"""

import statistics
from dataclasses import dataclass
from typing import Annotated

import httpx
import typer
from rich.table import Table

from bench.harness import machine
from bench.harness.report import LEGEND, console, exit_with, verdict, warn_of_noise
from bench.harness.timed_job import TIMEOUT_S, JobRun, body_of, run_job
from cli.supervise.stack import Stack
from poc_core.errors import ProoflineError
from poc_core.records import ProofSpec
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 300.0
MODEL = "tiny-qwen3"  # its name only: the engine loads none
STEP_MS = 50.0
SEQ_LEN = 8
TARGET = 0.95
WARM_UP_S = 1.0  # of work for all workers


@dataclass(frozen=True)
class Run:
    """One job on all workers. CPU in seconds."""

    job: JobRun
    n_batches: int
    workers_cpu_s: float
    redis_cpu_s: float
    api_cpu_s: float
    usage: machine.Usage

    @property
    def rate(self) -> float:
        """Batches a second."""
        return self.n_batches / self.job.seconds


def main(
    workers: Annotated[
        str, typer.Option(help="Numbers of workers, the smallest first.")
    ] = "1,2,4,8,16",
    repeat: Annotated[
        int, typer.Option(min=1, help="Jobs for each number of workers; their median counts.")
    ] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="How long each job should take.")] = 9.5,
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            max=1024,
            help="Nonces per batch. What is measured is batches; large ones add JSON.",
        ),
    ] = 8,
    quiet_wait: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait before each job until other programs are quiet."),
    ] = 60.0,
) -> None:
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
    exit_with(lambda: measure(counts, repeat, seconds, batch_size, quiet_wait))


def measure(
    counts: list[int], repeat: int, seconds: float, batch_size: int, quiet_wait_s: float
) -> bool:
    console.print(
        f"{machine.describe()}; synthetic engine, {STEP_MS:g} ms a batch of {batch_size} nonces,"
        f" jobs of {seconds:g} s",
        highlight=False,
    )
    runs = {n: measure_workers(n, repeat, seconds, batch_size, quiet_wait_s) for n in counts}
    return report(runs)


def measure_workers(
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
    with Stack(options, workers=n, max_fast_crashes=0, env=env) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        with httpx.Client(base_url=stack.base_url, timeout=TIMEOUT_S, trust_env=False) as client:
            warm_up = round(n * WARM_UP_S * 1000 / STEP_MS)
            run_job(
                client, body_of(spec_of("warm-up"), MODEL, range(warm_up * batch_size), batch_size)
            )

            def measure_run(index: int) -> tuple[Run, float]:
                machine.wait_until_quiet(quiet_wait_s)
                body = body_of(
                    spec_of(f"block-{index}"), MODEL, range(n_batches * batch_size), batch_size
                )
                run = one_run(stack, client, body, n_batches)
                return run, run.usage.others

            return machine.repeated(measure_run, repeat)


def one_run(stack: Stack, client: httpx.Client, body: dict[str, object], n_batches: int) -> Run:
    groups = [stack.worker_pids(), [stack.redis_pid or 0], [stack.api_pid or 0]]
    before = [machine.trees_cpu_s(pids) for pids in groups]
    meter = machine.UsageMeter()
    job = run_job(client, body)
    usage = meter.read()
    if [*stack.worker_pids(), stack.redis_pid, stack.api_pid] != [
        pid for pids in groups for pid in pids
    ]:
        raise ProoflineError(
            "A process of the stack crashed and was restarted; see whether it has enough memory."
        )
    workers_s, redis_s, api_s = (
        machine.trees_cpu_s(pids) - earlier for pids, earlier in zip(groups, before, strict=True)
    )
    return Run(job, n_batches, workers_s, redis_s, api_s, usage)


def report(found: dict[int, list[machine.Observed[Run]]]) -> bool:
    """True when every number of workers reaches the target."""
    smallest = min(found)
    table = Table(title="Queue scale")
    for heading in (
        "workers",
        "batches/s\nof each run",
        "median",
        "of\nN x 20",
        f"of\nN x {smallest}",
    ):
        table.add_column(heading, justify="right")
    for heading in ("CPU ms a batch\nworkers Redis API", "cores\nours others", "load\naverage"):
        table.add_column(heading, justify="right", style="dim")
    counted = {n: [run.result for run in runs if run.counts] for n, runs in found.items()}
    rates = {n: statistics.median(run.rate for run in runs) for n, runs in counted.items()}
    least = 1.0
    for n, runs in counted.items():
        over_ideal, over_smallest = (
            rates[n] * STEP_MS / 1000 / n,
            rates[n] / n / (rates[smallest] / smallest),
        )
        least = min(least, over_ideal, over_smallest)
        table.add_row(
            str(n),
            " ".join(
                f"{run.result.rate:.1f}" if run.counts else f"({run.result.rate:.1f})"
                for run in found[n]
            ),
            f"{rates[n]:.1f}",
            f"[bold]{over_ideal:.3f}[/]",
            f"{over_smallest:.3f}",
            " ".join(f"{ms:.2f}" for ms in median_cpu_ms(runs)),
            f"{max(run.usage.own for run in runs):.2f} {max(run.usage.others for run in runs):.2f}",
            f"{runs[0].usage.load_before:.1f} {runs[-1].usage.load_after:.1f}",
        )
    console.print(table)
    console.print(f"{LEGEND} Ideal: {1000 / STEP_MS:g} batches/s a worker.", style="dim")
    warn_of_noise([run for runs in found.values() for run in runs])
    return verdict(f"the smallest ratio, {smallest} to {max(found)} workers", least, TARGET)


def median_cpu_ms(runs: list[Run]) -> list[float]:
    """CPU milliseconds a batch of workers, Redis and API."""
    seconds = [(run.workers_cpu_s, run.redis_cpu_s, run.api_cpu_s) for run in runs]
    return [
        statistics.median(
            1000 * part[index] / run.n_batches for run, part in zip(runs, seconds, strict=True)
        )
        for index in range(3)
    ]


def spec_of(block_hash: str) -> ProofSpec:
    options = {"k_dim": 12, "stronger_rng": False}
    return ProofSpec(block_hash=block_hash, public_key="bench", seq_len=SEQ_LEN, options=options)


if __name__ == "__main__":
    typer.run(main)
