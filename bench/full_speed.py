"""What the whole stack with the defaults gets out of an engine.

    python -m bench.full_speed --dimensions qwen3-8b --seq-len 1024 --what round  # on a GPU host
    python -m bench.full_speed ... --parts --chains 128  # all of one start of a slow engine
    python -m bench.full_speed ... --turn /tmp/turn  # engines that start beside each other

Policy `yield` unless another is named, chat server running and idle, dummy weights. The bare loop
on the very same engine computes whole full micro-batches, one behind the other, with nothing
between.
"""

import fcntl
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import typer
from rich.table import Table

from bench.harness import machine
from bench.harness.engine import takes_engine
from bench.harness.open_worker import OpenStack, OpenWorkerError
from bench.harness.report import console, exit_with, run, verdict
from bench.harness.timed_job import body_of, run_job
from bench.harness.timed_round import RoundError, Sink, run_round
from poc_core.records import ProofSpec
from workers.engines.options import EngineOptions

READY_TIMEOUT_S = 1200.0  # the first start compiles kernels
RPC_TIMEOUT_MS = 600_000  # so do the first calls
HTTP_TIMEOUT_S = 60.0
K_DIM = 12
BATCH_SIZE = 32  # what clients send
TARGET = 0.98  # least ratio
MAX_STEP_MS = 50.0  # POC_MAX_STEP_MS
SLICED_S = 6.0  # of the bare loop in slices
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
    parts: Annotated[bool, typer.Option(help="Where the time of a micro-batch goes, too.")] = False,
    chains: Annotated[
        list[int] | None,
        typer.Option(help="Also decode proofs of so many nonces at a time; may be repeated."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Steps of --chains.")] = 256,
    turn: Annotated[
        Path | None,
        typer.Option(help="Measure while no other benchmark that names this file does."),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show the log of all processes.")] = False,
) -> None:
    """Nonces/s of API, Redis, Celery and outbox over those of a bare loop on the engine, in turns.

    A round's are those between its first and its last progress, as it goes on for minutes.
    """
    rows = [(one, n) for n in seq_len or [1024] for one in what or [What.ROUND]]
    asked = Asked(rows, seconds, repeat, parts, chains or [], max_tokens, turn, verbose)
    exit_with(lambda: measure(engine_options, asked, chat_policy))


class Asked(NamedTuple):
    """What is measured of one start of an engine."""

    rows: list[tuple[What, int]]  # (kind of work, seq_len)
    seconds: float  # that each side of a pair computes
    repeat: int  # pairs
    parts: bool
    chains: list[int]  # nonces at a time
    max_tokens: int  # of a chain
    turn: Path | None
    verbose: bool


def measure(options: EngineOptions, asked: Asked, chat_policy: str) -> bool:
    """Prints a table with a row for each kind of work and seq_len. True: all reach TARGET."""
    env = {"POC_CHAT_POLICY": chat_policy, "POC_RPC_TIMEOUT_MS": str(RPC_TIMEOUT_MS)}
    on_line = tell_line if asked.verbose else lambda name, line: None
    with OpenStack(options, env=env, max_fast_crashes=0, on_line=on_line) as stack:
        stack.wait_ready(READY_TIMEOUT_S)
        with turn_of(asked.turn):
            return measure_ready(stack, asked, chat_policy)


def tell_line(name: str, line: str) -> None:
    """Prints a line of a process's log."""
    console.print(f"{name} | {line}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def turn_of(file: Path | None) -> Iterator[None]:
    """Within, no other process is that names this file; None: does not wait."""
    if file is None:
        yield
        return
    with file.open("w") as held:
        console.print(f"ready; waits for its turn ({file})", highlight=False)
        fcntl.flock(held, fcntl.LOCK_EX)
        console.print("measures")
        yield


def measure_ready(stack: OpenStack, asked: Asked, chat_policy: str) -> bool:
    """Prints each figure as soon as it is known, the table last."""
    options = stack.options
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
        httpx.Client(base_url=stack.base_url, timeout=HTTP_TIMEOUT_S, trust_env=False) as client,
        Sink() as sink,
    ):
        for what, seq_len in asked.rows:
            rates = measure_row(stack, client, sink, what, seq_len, asked.seconds, asked.repeat)
            of_stack, of_loop = (statistics.median(side) for side in zip(*rates, strict=True))
            ratio = of_stack / of_loop
            table.add_row(what, f"{seq_len}", f"{of_stack:.1f}", f"{of_loop:.1f}", f"{ratio:.3f}")
            console.print(
                json.dumps({"what": what, "seq_len": seq_len, "pairs": rates}),
                highlight=False,
            )
            passed.append(verdict(f"{what} at seq_len {seq_len}", ratio, TARGET))
    seq_len = asked.rows[0][1]
    if asked.parts:
        tell_parts(stack, seq_len)
    for n in asked.chains:
        tell_chains(stack, seq_len, asked.max_tokens, n)
    console.print(table)
    return all(passed)


def tell_parts(stack: OpenStack, seq_len: int) -> None:
    """Prints the parts of a micro-batch's time, and its longest kernels."""
    try:
        found = stack.parts(spec_of("parts", seq_len), BATCH_SIZE)
    except OpenWorkerError as error:  # other rows are not lost by it
        console.print(f"no parts: {error}", markup=False)
        return
    if found is None:
        console.print("no parts: the engine cannot tell")
        return
    shares = {part: round(1000 * taken_s, 2) for part, taken_s in found.seconds.items()}
    console.print(json.dumps({"seq_len": seq_len, "parts_ms": shares}), highlight=False)
    for part, name, taken_s in found.longest:
        line = f"{1000 * taken_s:9.2f} ms  {part}: {name[:120]}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def tell_chains(stack: OpenStack, seq_len: int, max_tokens: int, n: int) -> None:
    """Prints decode proofs' rate, and tokens/s over vLLM's own."""
    try:
        found = stack.chains(seq_len, max_tokens, n)
    except OpenWorkerError as error:  # other rows are not lost by it
        console.print(f"no chains of {n} nonces: {error}", markup=False)
        return
    ours, own = statistics.median(found.seconds), statistics.median(found.own_seconds)
    told = {
        "chains": n,
        "seconds": found.seconds,
        "own_seconds": found.own_seconds,
        "nonces_per_min": round(60 * n / ours, 1),
        "over_own": round(own / ours, 3),
        "differing_tokens": found.differing_tokens,
        "without_graphs": found.why_no_graphs,
    }
    console.print(json.dumps(told), highlight=False, soft_wrap=True)


def spec_of(block_hash: str, seq_len: int) -> ProofSpec:
    """Artifacts as clients ask for them."""
    options = {"k_dim": K_DIM, "stronger_rng": False}
    return ProofSpec(block_hash=block_hash, public_key="bench", seq_len=seq_len, options=options)


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
        return spec_of(block_hash, seq_len)

    warm = 2 * max(1, 32_768 // seq_len)
    stack.loop(spec("warm-up"), range(warm), warm)  # compiles, fills caches
    took_s, _ = stack.loop(spec("warm-up"), range(2 * warm), 2 * warm)
    n = max(warm, int(2 * warm / took_s * seconds))
    run_round(client, sink, spec("warm-up"), stack.model_name, BATCH_SIZE, 3.0)
    rates = []
    for index in range(repeat):
        if what is What.ROUND:
            stack.spent()
            done = run_round(
                client, sink, spec(f"round-{index}"), stack.model_name, BATCH_SIZE, seconds
            )
            tell_spent(stack, "round", done.n_nonces)
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
        tell_spent(stack, "bare loop", n)
    part = min(n, int(rates[-1][0] * SLICED_S))
    sliced_s, _ = stack.loop(spec("sliced"), range(part), part, MAX_STEP_MS)
    console.print(f"bare loop in slices as beside chat: {part / sliced_s:.2f} nonces/s")
    tell_spent(stack, "bare loop in slices", part)
    return rates


def tell_spent(stack: OpenStack, what: str, n_nonces: int) -> None:
    """Prints milliseconds a slice on each rank: the device's and the host's."""
    for rank, spent in enumerate(stack.spent()):
        slices = max(1.0, spent.pop("slices", 0.0))
        parts = {part: round(1000 * taken_s / slices, 2) for part, taken_s in spent.items()}
        found = {"spent": what, "rank": rank, "slices": slices, "nonces": n_nonces, "ms": parts}
        console.print(json.dumps(found), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run(main)
