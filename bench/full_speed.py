"""What the whole stack with the defaults gets out of an engine.

    python -m bench.full_speed --dimensions qwen3-8b --seq-len 1024 --what round  # on a GPU host

Policy `yield` unless another is named, chat server running and idle, dummy weights. The bare loop
on the very same engine computes whole full micro-batches, one behind the other, with nothing
between.
"""

import json
import statistics
from enum import StrEnum
from typing import Annotated

import httpx
import typer
from rich.table import Table

from bench.harness import machine
from bench.harness.engine import takes_engine
from bench.harness.open_worker import OpenStack
from bench.harness.report import console, exit_with, run, verdict
from bench.harness.timed_job import body_of, run_job
from bench.harness.timed_round import RoundError, Sink, run_round
from poc_core.records import ProofSpec
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 600.0  # the first start compiles kernels
HTTP_TIMEOUT_S = 60.0
K_DIM = 12
BATCH_SIZE = 32  # what clients send
TARGET = 0.98  # least ratio
MOST_JOB_NONCES = 90_000  # below POC_MAX_QUEUED_NONCES


class What(StrEnum):
    JOB = "job"
    ROUND = "round"


@takes_engine(dimensions="qwen3-0.6b")
def main(
    *,
    engine_options: EngineOptions,
    seq_len: Annotated[
        list[int] | None, typer.Option(help="Positions of a nonce; may be repeated.")
    ] = None,
    what: Annotated[list[What] | None, typer.Option(help="job or round; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long each side computes.")] = 10.0,
    repeat: Annotated[int, typer.Option(min=1, help="Pairs; their medians are compared.")] = 2,
    chat_policy: Annotated[
        str, typer.Option(help="POC_CHAT_POLICY. With off, micro-batches run whole.")
    ] = "yield",
) -> None:
    """Nonces/s of API, Redis, Celery and outbox over those of a bare loop on the engine, in turns.

    A round's are those between its first and its last progress, as it goes on for minutes.
    """
    rows = [(one, n) for n in seq_len or [1024] for one in what or [What.ROUND]]
    exit_with(lambda: measure(engine_options, rows, seconds, repeat, chat_policy))


def measure(
    options: EngineOptions,
    rows: list[tuple[What, int]],
    seconds: float,
    repeat: int,
    chat_policy: str,
) -> bool:
    """Prints a table with a row for each kind of work and seq_len. True: all reach TARGET."""
    with OpenStack(options, env={"POC_CHAT_POLICY": chat_policy}, max_fast_crashes=0) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        parallel = f"TP{options.tensor_parallel} PP{options.pipeline_parallel}"
        console.print(
            f"{machine.describe()}; {stack.model_name}, {parallel}, policy {chat_policy}",
            highlight=False,
        )
        table = Table(title=f"Whole stack, policy {chat_policy}: {stack.model_name}, {parallel}")
        for heading in ("what", "seq_len", "stack\nnonces/s", "bare loop\nnonces/s", "ratio"):
            table.add_column(heading, justify="right")
        passed = []
        with (
            httpx.Client(
                base_url=stack.base_url, timeout=HTTP_TIMEOUT_S, trust_env=False
            ) as client,
            Sink() as sink,
        ):
            for what, seq_len in rows:
                rates = measure_row(stack, client, sink, what, seq_len, seconds, repeat)
                of_stack, of_loop = (statistics.median(side) for side in zip(*rates, strict=True))
                ratio = of_stack / of_loop
                table.add_row(
                    what, f"{seq_len}", f"{of_stack:.1f}", f"{of_loop:.1f}", f"{ratio:.3f}"
                )
                console.print(
                    json.dumps({"what": what, "seq_len": seq_len, "pairs": rates}),
                    highlight=False,
                )
                passed.append(verdict(f"{what} at seq_len {seq_len}", ratio, TARGET))
        console.print(table)
    return all(passed)


def measure_row(
    stack: OpenStack,
    client: httpx.Client,
    sink: Sink,
    what: What,
    seq_len: int,
    seconds: float,
    repeat: int,
) -> list[tuple[float, float]]:
    """(nonces/s of the stack, of the bare loop) of each pair."""

    def spec(block_hash: str) -> ProofSpec:
        options = {"k_dim": K_DIM, "stronger_rng": False}
        return ProofSpec(
            block_hash=block_hash, public_key="bench", seq_len=seq_len, options=options
        )

    warm = 2 * max(1, 32_768 // seq_len)
    stack.loop(spec("warm-up"), range(warm), warm)  # compiles, fills caches
    took_s, _ = stack.loop(spec("warm-up"), range(2 * warm), 2 * warm)
    n = max(warm, int(2 * warm / took_s * seconds))
    run_round(client, sink, spec("warm-up"), stack.model_name, BATCH_SIZE, 3.0)
    rates = []
    for index in range(repeat):
        if what is What.ROUND:
            done = run_round(
                client, sink, spec(f"round-{index}"), stack.model_name, BATCH_SIZE, seconds
            )
            if done.steady is None:
                raise RoundError(
                    f"The round made no progress twice in {seconds:g} s; give it longer."
                )
            rate = done.steady
            console.print(
                f"with start and end: {done.n_nonces / done.seconds:.2f} nonces/s in"
                f" {done.seconds:.0f} s"
            )
        else:
            nonces = range(min(n, MOST_JOB_NONCES))
            job = run_job(
                client, body_of(spec(f"job-{index}"), stack.model_name, nonces, BATCH_SIZE)
            )
            rate = len(nonces) / job.seconds
        loop_s, _ = stack.loop(spec(f"loop-{index}"), range(n), n)
        rates.append((rate, n / loop_s))
    return rates


if __name__ == "__main__":
    run(main)
