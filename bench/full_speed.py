"""What the whole stack with the defaults gets out of an engine.

    python -m bench.full_speed --dimensions qwen3-8b --seq-len 1024 --what round  # on a GPU host
    python -m bench.full_speed ... --turn /tmp/turn  # several engines start at the same time

Policy `yield` unless --chat-policy names another, chat server running and idle, dummy weights. The
bare loop on the same engine computes full micro-batches back to back.
"""

import fcntl
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench.harness import machine
from bench.harness.engine import takes_engine
from bench.harness.node import NodeError, body_of, run_job, running, spec_of
from bench.harness.open_worker import OpenStack, OpenWorkerError
from bench.harness.report import (
    ChatPolicy,
    Repeat,
    SeqLens,
    at_least,
    console,
    measures,
    run,
    say,
    say_json,
    table,
)
from bench.harness.timed_round import Sink, run_round
from workers.engines.options import EngineOptions

RPC_TIMEOUT_MS = 600_000  # the first calls compile kernels
BATCH_SIZE = 32  # what clients send
TARGET = 0.98  # least ratio
MAX_STEP_MS = 50.0  # POC_MAX_STEP_MS
SLICED_S = 6.0  # of the bare loop in slices
MOST_JOB_NONCES = 90_000  # below POC_MAX_QUEUED_NONCES


class What(StrEnum):
    JOB = "job"
    ROUND = "round"


@takes_engine(dimensions="qwen3-0.6b")
@measures
def main(
    *,
    engine_options: EngineOptions,
    seq_len: SeqLens = None,
    what: Annotated[list[What] | None, typer.Option(help="job or round; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long each side computes.")] = 10.0,
    repeat: Repeat = 2,
    chat_policy: ChatPolicy = "yield",
    parts: Annotated[bool, typer.Option(help="Where the time of a micro-batch goes, too.")] = False,
    turn: Annotated[
        Path | None,
        typer.Option(help="Measure while no other benchmark that names this file does."),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show the log of all processes.")] = False,
) -> bool:
    """Nonces/s of API, Redis, Celery and outbox over those of a bare loop on the engine, in turns.

    A round's rate is measured between its first and its last progress, because rounds last minutes.
    """
    env = {"POC_CHAT_POLICY": chat_policy, "POC_RPC_TIMEOUT_MS": str(RPC_TIMEOUT_MS)}

    def log(name: str, line: str) -> None:
        if verbose:
            say(f"{name} | {line}", markup=False)

    stack = OpenStack(engine_options, env=env, max_fast_crashes=0, on_line=log)
    with running(stack) as (_, client), turn_of(turn), Sink() as sink:
        parallel = f"TP{engine_options.tensor_parallel} PP{engine_options.pipeline_parallel}"
        title = f"{stack.model_name}, {parallel}, policy {chat_policy}"
        say(f"{machine.describe()}; {title}")
        rows = table(title, "what", "seq_len", "stack\nnonces/s", "bare loop\nnonces/s", "ratio")
        passed = []
        for length in seq_len or [1024]:
            for one in what or [What.ROUND]:
                row = Row(stack, client, sink, one, length)
                rates = row.measure(seconds, repeat)
                say_json(what=one, seq_len=length, pairs=rates)
                of_stack, of_loop = (statistics.median(side) for side in zip(*rates, strict=True))
                ratio = of_stack / of_loop
                rows.add_row(
                    one, f"{length}", *(f"{x:.1f}" for x in (of_stack, of_loop)), f"{ratio:.3f}"
                )
                passed.append(at_least(f"{one} at seq_len {length}", ratio, TARGET))
        if parts:
            say_parts(stack, (seq_len or [1024])[0])
        console.print(rows)
    return all(passed)


@contextmanager
def turn_of(file: Path | None) -> Iterator[None]:
    """Waits until no other process holds the file's lock, and holds it; None: does not wait."""
    if file is None:
        yield
        return
    with file.open("w") as held:
        say(f"ready; waits for its turn ({file})")
        fcntl.flock(held, fcntl.LOCK_EX)
        say("measures")
        yield


def say_parts(stack: OpenStack, seq_len: int) -> None:
    """Prints the parts of a micro-batch's time and its longest kernels, or why there are none."""
    try:
        found = stack.parts(spec_of(seq_len, "parts"), BATCH_SIZE)
    except OpenWorkerError as error:  # the other figures are still printed
        say(f"no parts: {error}", markup=False)
        return
    if found is None:
        say("no parts: the engine cannot measure them")
        return
    ms = {part: round(1000 * taken_s, 2) for part, taken_s in found.seconds.items()}
    say_json(seq_len=seq_len, parts_ms=ms)
    for part, name, taken_s in found.longest:
        say(f"{1000 * taken_s:9.2f} ms  {part}: {name[:120]}", markup=False)


@dataclass(frozen=True)
class Row:
    """One kind of work at one seq_len: what the stack reaches, and what the bare loop does."""

    stack: OpenStack
    client: httpx.Client
    sink: Sink
    what: What
    seq_len: int

    def measure(self, seconds: float, repeat: int) -> list[tuple[float, float]]:
        """Returns the nonces/s of the stack and of the bare loop for each pair."""
        warm = 2 * max(1, 32_768 // self.seq_len)
        self._loop("warm-up", warm)  # compiles, fills caches
        n = max(warm, int(2 * warm / self._loop("warm-up", 2 * warm) * seconds))
        self._round("warm-up", 3.0)
        rates = []
        for index in range(repeat):
            if self.what is What.ROUND:
                rate = self._rate_of_round(index, seconds)
            else:
                rate = self._rate_of_job(index, min(n, MOST_JOB_NONCES))
            rates.append((rate, n / self._loop(f"loop-{index}", n)))
            self._say_spent("bare loop", n)
        part = min(n, int(rates[-1][0] * SLICED_S))
        sliced_s = self._loop("sliced", part, MAX_STEP_MS)
        say(f"bare loop in slices as during chat: {part / sliced_s:.2f} nonces/s")
        self._say_spent("bare loop in slices", part)
        return rates

    def _loop(self, block_hash: str, n: int, max_step_ms: float | None = None) -> float:
        """Returns the seconds of `n` nonces in the bare loop."""
        return self.stack.loop(spec_of(self.seq_len, block_hash), range(n), n, max_step_ms)[0]

    def _round(self, block_hash: str, seconds: float) -> Any:
        name = self.stack.model_name
        return run_round(
            self.client, self.sink, name, self.seq_len, block_hash, BATCH_SIZE, seconds
        )

    def _rate_of_round(self, index: int, seconds: float) -> float:
        self.stack.spent()
        done = self._round(f"round-{index}", seconds)
        self._say_spent("round", done.n_nonces)
        if done.steady is None:
            raise NodeError(f"The round made no progress twice in {seconds:g} s; give it longer.")
        rate = done.n_nonces / done.seconds
        say(f"with start and end: {rate:.2f} nonces/s in {done.seconds:.0f} s")
        return float(done.steady)

    def _rate_of_job(self, index: int, n: int) -> float:
        work = {"nonces": list(range(n)), "batch_size": BATCH_SIZE}
        body = body_of(self.stack.model_name, self.seq_len, f"job-{index}", **work)
        return n / run_job(self.client, body)[0]

    def _say_spent(self, what: str, n_nonces: int) -> None:
        """Prints the milliseconds that a slice took on each rank, on the device and on the host."""
        for rank, spent in enumerate(self.stack.spent()):
            slices = max(1.0, spent.pop("slices", 0.0))
            ms = {part: round(1000 * taken_s / slices, 2) for part, taken_s in spent.items()}
            say_json(spent=what, rank=rank, slices=slices, nonces=n_nonces, ms=ms)


if __name__ == "__main__":
    run(main)
